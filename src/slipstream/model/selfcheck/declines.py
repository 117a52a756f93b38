"""Reasons why layers that a family supports are not fused: their contents, shared modules, or the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slipstream.errors import ConfigError, UnsupportedError
from slipstream.model.fused.layer_changes import is_hooked
from slipstream.model.layers import Found
from slipstream.ops.activation import ACTIVATIONS, LEARNED
from slipstream.parallel import Mesh, share_of

__all__ = ["declines", "in_several", "is_repeated", "unsplit"]


def in_several(layers: Sequence[Found]) -> set[nn.Module]:
    """Return the modules with parameters of their own that occur in several layers."""
    seen: set[nn.Module] = set()
    several: set[nn.Module] = set()
    for found in layers:
        own = {module for module in found.layer.modules() if module._parameters}
        several |= seen & own
        seen |= own
    return several


def is_repeated(model: nn.Module, found: Found) -> bool:
    """Whether the module that holds a layer has it several times."""
    owner = model.get_submodule(found.name.rpartition(".")[0])
    return sum(child is found.layer for child in owner._modules.values()) > 1


def declines(found: Found, shared: set[nn.Module]) -> str:
    """Return why a layer that has a spec is not replaced by a block; empty if it may be.

    Args:
        found: A layer with a spec.
        shared: From `in_several`.
    """
    if found.spec is None:
        raise AssertionError("a layer without a spec has a reason")
    if found.spec.activation not in ACTIVATIONS and found.spec.activation not in ("swiglu_oai", *LEARNED):
        return f"no op for the activation {found.spec.activation!r}"
    moe = found.spec.moe
    if (
        moe is not None
        and moe.top_groups < moe.groups
        and moe.top_k > moe.top_groups * moe.experts // moe.groups
    ):
        return f"a token has {moe.top_k} experts, more than its {moe.top_groups} groups of them hold"
    if any(not p.is_floating_point() for p in found.layer.parameters()):
        return "its weights are already quantized"
    if any(is_hooked(module) for module in list(found.layer.modules())[1:]):
        return "its submodules have hooks, which a fused block would not run"
    if shared and not shared.isdisjoint(found.layer.modules()):
        return "it shares a submodule with another layer, but a block takes over all of its layer's tensors"
    return ""


def unsplit(found: Found, mesh: Mesh, group: int, narrow: list[ConfigError]) -> str:
    """Return why a layer's block cannot be split over the ranks, though its own code may be; empty if it can.

    Args:
        found: A layer with a spec.
        mesh: The ranks.
        group: Number of inputs that share a scale in the weight format.
        narrow: Receives the error if the layer has fewer heads or feed-forward units than there are ranks;
            other layers of the model may be wider.

    Raises:
        ConfigError: There are fewer experts than ranks that they are distributed over.
    """
    if found.spec is None:
        raise AssertionError("a layer without a spec has a reason")
    try:
        share_of(found.spec, mesh, group)
    except UnsupportedError as error:
        return str(error)
    except ConfigError as error:
        if mesh.ep.size > 1:
            raise
        narrow.append(error)
        return str(error)
    return ""

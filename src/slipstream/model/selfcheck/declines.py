"""Why layers that a family knows stay as they are: what they hold, who else does, or too many ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from slipstream.errors import ConfigError, UnsupportedError
from slipstream.model.fused.layer_changes import is_hooked
from slipstream.model.layers import Found
from slipstream.ops.activation import ACTIVATIONS, LEARNED
from slipstream.parallel import Mesh, share_of

__all__ = ["declines", "in_several", "unsplit"]


def in_several(layers: Sequence[Found]) -> set[nn.Module]:
    """Modules with parameters of their own that stand in several layers."""
    seen: set[nn.Module] = set()
    several: set[nn.Module] = set()
    for found in layers:
        own = {module for module in found.layer.modules() if module._parameters}
        several |= seen & own
        seen |= own
    return several


def declines(found: Found, shared: set[nn.Module]) -> str:
    """Why no block takes a layer's place that a family has numbers for; empty where one may.

    Args:
        found: It has numbers.
        shared: From `in_several`.
    """
    if found.spec is None:
        raise AssertionError("a layer without a spec has a reason")
    if found.spec.activation not in ACTIVATIONS and found.spec.activation not in ("swiglu_oai", *LEARNED):
        return f"no op for the activation {found.spec.activation!r}"
    if any(not p.is_floating_point() for p in found.layer.parameters()):
        return "its weights are already quantized"
    if any(is_hooked(module) for module in list(found.layer.modules())[1:]):
        return "someone listens to its parts by hooks, which a fused block would pass over"
    if shared and not shared.isdisjoint(found.layer.modules()):
        return "it shares a part with another layer, and a block takes over all of its layer's tensors"
    return ""


def unsplit(found: Found, mesh: Mesh, group: int, narrow: list[ConfigError]) -> str:
    """Why ranks cannot share a layer's block; its own code they may. Empty where they can.

    Args:
        found: It has numbers.
        mesh: The ranks.
        group: Inputs that share a scale in the weights' format.
        narrow: Is given the error of a layer that has fewer heads or units than there are ranks: others of
            the model may be wider.

    Raises:
        ConfigError: The experts are fewer than the ranks that they are spread over.
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

"""Checks that the ranks of a model agree on configuration, model, prompts, random numbers and tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.config import InferenceConfig
from slipstream.config.section import Section
from slipstream.errors import ConfigError, DeviceError, RequestError, SlipstreamError, WeightError
from slipstream.parallel.collectives import gather_objects, largest, together
from slipstream.parallel.mesh import Axis, Mesh

__all__ = [
    "agree_on_call",
    "agree_on_engine",
    "agree_on_tokens",
    "agree_on_values",
    "agree_on_weights",
    "any_of",
    "share_random_state",
]

_SAMPLE = 16
_WHAT = "compared their arguments"
_BESIDE = re.compile(r"_.*|.*dtype|architectures|transformers_version")
"""Entries of a model's config that state its origin; saving a model on one rank changes them on that rank."""


def agree_on_engine(model: nn.Module, config: InferenceConfig, mesh: Mesh) -> None:
    """Compare configuration and model with the other ranks, before any work.

    Raises:
        ConfigError: The ranks differ; the message names the field or parameter, and each rank's value.
    """
    if mesh.is_alone:
        return
    own = {f"the field {name}": _text(value) for name, value in _fields(config)}
    own["the class of the model"] = type(model).__name__
    model_config: Any = getattr(model, "config", None)
    entries = model_config.to_dict() if hasattr(model_config, "to_dict") else {}
    own |= {f"the entry {k} of the model's config": _text(v) for k, v in _numbers(entries).items()}
    own |= {f"the parameter {name}": _sample(p) for name, p in model.named_parameters()}
    _compare(own, mesh.replica, ConfigError, "give every rank the same configuration, model and weights")


def agree_on_weights(model: nn.Module, stored: Iterable[tuple[str, Sequence[Tensor]]], mesh: Mesh) -> None:
    """Compare a checkpoint, and a model's parameters, with the other ranks, which may have their own files.

    Args:
        model: Some of its parameters may be on the meta device.
        stored: The checkpoint's tensors by name, each as views, of which only the ends are read.
        mesh: The ranks.

    Raises:
        ConfigError: The ranks differ; the message names the parameter or weight, and each rank's value.
    """
    if not mesh.is_alone:
        own = {f"the parameter {name}": _sample(p) for name, p in model.named_parameters()}
        own |= {f"the weight {n} of the checkpoint": "; ".join(map(_sample, views)) for n, views in stored}
        _compare(own, mesh.replica, ConfigError, "give every rank the same checkpoint")


def agree_on_values(check: Callable[[], dict[str, Tensor]], axis: Axis) -> dict[str, Tensor]:
    """Return the weights that a check returns, once it has passed on all ranks with equal weights.

    Args:
        check: Checks new weights and returns them by name.
        axis: The ranks.

    Raises:
        SlipstreamError: The check's error on this rank.
        WeightError: The check failed on another rank, or the values differ.
    """
    if axis.size == 1:
        return check()
    checked, error = dict[str, Tensor](), None
    try:
        checked = check()
    except SlipstreamError as failure:
        error = failure
    failures = gather_objects(None if error is None else str(error), axis, _WHAT)
    if error is not None:
        raise error
    for rank, message in zip(axis.ranks, failures, strict=True):
        if message is not None:
            raise WeightError(f"rank {rank}: {message}")
    own = {f"the values of {name}": _sample(value) for name, value in checked.items()}
    _compare(own, axis, WeightError, "give every rank the same weights; nothing was written")
    return checked


def agree_on_call(kind: str, values: Mapping[str, Any], mesh: Mesh) -> bool:
    """Compare the arguments of a call with the other ranks.

    Returns:
        Whether all ranks of the model run the same call. Ranks that only share experts may run independent
        calls; ranks that split layers may not.

    Raises:
        RequestError: Ranks that split layers differ; the message names the argument, and each rank's value.
    """
    if mesh.is_alone:
        return True
    own = {"the call": kind} | {f"the argument {name}": _text(value) for name, value in values.items()}
    way_out = "ranks that split a model's layers run each call together: broadcast its inputs first"
    size = mesh.tp.size
    digests = gather_objects(_digest(own), mesh.replica, _WHAT)
    teams = [set(digests[start : start + size]) for start in range(0, len(digests), size)]
    if any(len(team) > 1 for team in teams):  # all ranks see this, including those of other teams
        every: list[Mapping[str, str]] = gather_objects(own, mesh.replica, _WHAT)
        for start in range(0, len(every), size):
            _refuse(every[start : start + size], mesh.replica.ranks[start:], RequestError, way_out)
    return len(set(digests)) == 1


def agree_on_tokens(tokens: Tensor, axis: Axis) -> None:
    """Check that all ranks chose the same tokens.

    Args:
        tokens: Any shape, int64.
        axis: The ranks.

    Raises:
        DeviceError: Ranks chose different tokens: their random numbers or their arithmetic have diverged.
    """
    if axis.size == 1:
        return
    mine = tokens.detach().cpu()
    both = largest(torch.stack([mine, -mine]), axis, "compared tokens")
    if not torch.equal(both[0], -both[1]):
        raise DeviceError(
            f"rank {axis.ranks[axis.rank]} chose the tokens {mine.flatten()[:4].tolist()}, and the ranks "
            f"{list(axis.ranks)} do not agree on them: give all of them the same processors and stopping "
            "criteria, and draw no random numbers on one rank alone while it generates"
        )


def any_of(flags: list[bool], axis: Axis, *, known: bool) -> list[bool]:
    """Return flags that are set if set on any rank, so that one rank's clock decides for all.

    With `known`, the flags are already equal on all ranks, and are returned unchanged.
    """
    if axis.size == 1 or known:
        return flags
    up = torch.tensor(flags, dtype=torch.int32, device="cpu")
    up = largest(up, axis, "agreed on which sequences are finished")
    return [bool(flag) for flag in up.tolist()]


def share_random_state(axis: Axis, device: torch.device) -> None:
    """Copy the first rank's random state to all ranks, for the CPU and the device that samples."""
    if axis.size == 1:
        return
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    with together(axis, "shared the random state"):
        for state in states:
            dist.broadcast(state, axis.ranks[0], group=axis.control)
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _compare(own: Mapping[str, str], axis: Axis, error: type[Exception], way_out: str) -> None:
    if len(set(gather_objects(_digest(own), axis, _WHAT))) > 1:
        _refuse(gather_objects(own, axis, _WHAT), axis.ranks, error, way_out)


def _digest(own: Mapping[str, str]) -> bytes:
    return hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=16).digest()


def _refuse(
    every: Sequence[Mapping[str, str]], ranks: Sequence[int], error: type[Exception], way_out: str
) -> None:
    """Raise `error` with the first entry in which the ranks differ, if there is one."""
    for name in dict.fromkeys(n for one in every for n in one):
        values = [one.get(name, "not there") for one in every]
        if len(set(values)) > 1:
            listed = "; ".join(f"rank {rank}: {v}" for rank, v in zip(ranks, values, strict=False))
            raise error(f"the ranks that share a model disagree on {name} ({listed}); {way_out}")


def _fields(section: Section, path: str = "") -> list[tuple[str, Any]]:
    fields: list[tuple[str, Any]] = []
    for name in type(section).model_fields:
        value = getattr(section, name, None)
        fields += _fields(value, f"{path}{name}.") if isinstance(value, Section) else [(path + name, value)]
    return fields


def _numbers(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config and its nested configs, without those that only state its origin."""
    kept = {str(name): value for name, value in entries.items() if not _BESIDE.fullmatch(str(name))}
    return {name: _numbers(v) if isinstance(v, Mapping) else v for name, v in kept.items()}


def _text(value: Any) -> str:
    """Describe a value as text that ranks can compare; other objects by their class alone."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        digest = hashlib.blake2b(data.view(-1).view(torch.uint8).numpy().tobytes(), digest_size=6)
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} #{digest.hexdigest()}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, Mapping):
        # Sorted: an order may come from a set, and differs between processes then.
        return "{" + ", ".join(sorted(f"{_text(k)}: {_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, type):
        return value.__name__
    if hasattr(value, "to_dict") and not isinstance(value, nn.Module):
        return f"{type(value).__name__} {_text(value.to_dict())}"
    return f"a {type(value).__name__}"


def _sample(parameter: Tensor) -> str:
    """Shape, dtype and a few numbers of both ends: enough to detect another seed or checkpoint."""
    flat = parameter.detach()
    if flat.is_meta or not flat.numel() or flat.layout is not torch.strided:
        return f"{str(parameter.dtype).removeprefix('torch.')} {tuple(parameter.shape)}"
    rows = flat.reshape(-1) if flat.dim() < 2 else flat.flatten(0, -2)
    ends = torch.cat([rows[:1].flatten()[:_SAMPLE], rows[-1:].flatten()[-_SAMPLE:]])
    return f"{tuple(parameter.shape)} {_text(ends.float())}"

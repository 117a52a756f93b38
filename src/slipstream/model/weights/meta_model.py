"""Models without weights: parameters on the meta device, and buffers with values that models compute."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from slipstream.errors import WeightError
from slipstream.model.selfcheck.check import MODEL_ERRORS

__all__ = ["computed_parameters", "exact_buffers", "hollow", "lost_buffers"]

_default_dtype = threading.Lock()


_LARGE = 1 << 18
"""Tensors of this many elements or more are not even allocated."""


class _LargeOnMeta(TorchFunctionMode):
    """Mode in which large tensors made by `torch.empty` without a device are on the meta device.

    They would be freed at once, as parameters become meta tensors, but the allocator returns their memory
    only much later: building a model of 2.2 GB took 1.6 GB of address space.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and _numel(args) >= _LARGE:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _numel(args: tuple[Any, ...]) -> int:
    """Number of elements of a tensor, from the arguments of `torch.empty`."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    return math.prod(size for size in sizes if isinstance(size, int))


@contextmanager
def hollow(dtype: torch.dtype) -> Iterator[None]:
    """Context in which modules made by this thread get parameters on the meta device, and real buffers.

    Args:
        dtype: Dtype of floating parameters; the process's default dtype is set to it, and restored on exit.
    """
    here = threading.get_ident()

    def empty(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    with _default_dtype:
        before = torch.get_default_dtype()
        handle = register_module_parameter_registration_hook(empty)
        try:
            torch.set_default_dtype(dtype)
            with _LargeOnMeta():
                yield
        finally:
            torch.set_default_dtype(before)
            handle.remove()


def exact_buffers(model: nn.Module, config: Any) -> None:
    """Give a model that was built in a 16-bit dtype the buffers that it computes in float32.

    The default dtype while a model is made rounds what it computes its tables from: a table of angles in
    float32 was wrong by 0.05. transformers computes them in float32.

    Args:
        model: Built by `hollow`.
        config: What it was built from.
    """
    rounded = [name for name, b in model.named_buffers() if b.is_floating_point() and not b.is_meta]
    # transformers computes inverse frequencies in float32 by themselves.
    if all(name.endswith("inv_freq") for name in rounded):
        return
    with hollow(torch.float32), torch.no_grad():
        build: Any = type(model)
        twin = build(copy.deepcopy(config))
    for name in rounded:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = twin.get_buffer(name)


def lost_buffers(model: nn.Module, given: frozenset[str]) -> dict[str, torch.Tensor]:
    """Compute the values of buffers that are on the meta device and not in the checkpoint.

    Args:
        model: Built on the meta device; only read.
        given: Names that the checkpoint has.

    Raises:
        WeightError: They cannot be computed, as the model cannot be built again from its config.
    """
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in given]
    if not lost:
        return {}
    config = getattr(model, "config", None)
    try:
        if config is None:
            raise TypeError("it has no config")
        with hollow(torch.get_default_dtype()), torch.no_grad(), torch.device("cpu"):
            build: Any = type(model)
            twin = dict(build(copy.deepcopy(config)).named_buffers())
        return {name: twin[name] for name in lost}
    except MODEL_ERRORS as error:
        why = str(error).strip().partition("\n")[0]
        raise WeightError(
            f"the buffers {', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''} are on the meta device, the "
            f"checkpoint lacks them, and {type(model).__name__} cannot be rebuilt to compute them ({why}); "
            "build the model with its buffers on a real device"
        ) from error


def computed_parameters(model: nn.Module) -> frozenset[str]:
    """Names of parameters that transformers computes and does not save, such as sinusoidal positions.

    A parameter counts only if the model's own `_init_weights` gives it the same values for any random seed.
    """
    named = (*(getattr(model, "_keys_to_ignore_on_save", None) or ()),)
    inner: Any = getattr(model, "base_model", model)
    named += (*(getattr(inner, "_keys_to_ignore_on_load_missing", None) or ()),)
    own = dict(model.named_parameters(remove_duplicate=False))
    return frozenset(name for name in own if name in named and computed(model, name) is not None)


def computed(model: nn.Module, name: str) -> torch.Tensor | None:
    """Return the float32 value that a model's initialization computes for a parameter; None if random."""
    path, _, leaf = name.rpartition(".")
    make: Any = getattr(model, "_init_weights", None)
    made = []
    for seed in range(2):
        twin = copy.deepcopy(model.get_submodule(path)).float().to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            twin.get_parameter(leaf).fill_(float(seed))
            try:
                make(twin)
            except MODEL_ERRORS:
                return None
        made.append(twin.get_parameter(leaf).detach())
    return made[0] if torch.equal(*made) else None

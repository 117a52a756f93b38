"""Makes a launch a torch operator, which graphs can record and torch.compile does not trace into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from slipstream.kernels.triton.target import interpreted

__all__ = ["operator"]

_LIBRARY = torch.library.Library("slipstream", "DEF")


def operator(schema: str, launch: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define `slipstream::<name>` and return it.

    `torch.library.Library` costs half of what `torch.library.custom_op` does per call (1.8 us).

    Args:
        schema: In torch's notation, "norm(Tensor x, float eps) -> Tensor".
        launch: Runs the kernel on CUDA tensors (also on CPU tensors, where Triton interprets kernels).
        fake: Makes results of the right shape and dtype for tensors without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _guarded(launch), "CUDA")
    if interpreted():
        _LIBRARY.impl(name, launch, "CPU")
    torch.library.register_fake(f"slipstream::{name}", fake, lib=_LIBRARY)
    defined: Callable[..., Any] = getattr(torch.ops.slipstream, name).default
    return defined


def _guarded(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run a launch on the GPU that holds the tensors; Triton by itself would use the current one."""

    def run(*arguments: Any) -> Any:
        index = next(_indices(arguments))
        if index == torch.cuda.current_device():
            return launch(*arguments)
        with torch.cuda.device(index):
            return launch(*arguments)

    return run


def _indices(arguments: Iterable[Any]) -> Iterator[int]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument.get_device()
        elif isinstance(argument, (list, tuple)):
            yield from _indices(argument)

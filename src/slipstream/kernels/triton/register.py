"""Makes a launch an operator of torch, so that graphs can record it and torch.compile can pass over it."""

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
        schema: As torch writes it, "norm(Tensor x, float eps) -> Tensor".
        launch: Runs the kernel on CUDA tensors (on any, where Triton interprets).
        fake: Makes results of the right shape and dtype on tensors without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, _guarded(launch), "CUDA")
    if interpreted():
        _LIBRARY.impl(name, launch, "CPU")
    torch.library.register_fake(f"slipstream::{name}", fake, lib=_LIBRARY)
    found: Callable[..., Any] = getattr(torch.ops.slipstream, name).default
    return found


def _guarded(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch on the GPU that has the tensors, where Triton alone would take the current one."""

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

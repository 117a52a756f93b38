"""Dense copies of packed weights, which refuse writes: they would not reach the planes that the ops read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.model.values import writes_into

__all__ = ["Unpacked", "UnpackedParameter", "resize_refusal"]


class Unpacked(Tensor):
    """The unpacked values of a packed matrix, which refuse in-place writes."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse functions that write into the tensor; run all others on plain tensors."""
        if writes_into(Unpacked, func, args, kwargs or {}):
            raise _refusal()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The tensor itself, so that writes through `data` are refused as well."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        # transformers resizes an embedding by setting this.
        raise _refusal() if value.shape == self.shape else resize_refusal(len(self), len(value))


class UnpackedParameter(Unpacked, nn.Parameter):
    """The same for an embedding: a parameter, since transformers ties other modules to it."""


def _refusal() -> UnsupportedError:
    return UnsupportedError(
        "this tensor is an unpacked copy of packed weights: writing to it changes nothing; change weights by "
        "engine.refresh_weights, or before init_inference"
    )


def resize_refusal(rows: int, wanted: int) -> UnsupportedError:
    """Return the error for an embedding of `rows` packed rows that is resized to `wanted`."""
    return UnsupportedError(
        f"an embedding with {rows} packed rows cannot be resized to {wanted}; resize the model before "
        "init_inference, or leave quant.embedding out"
    )

"""Records the operations of a function and replays them into the same memory, as a captured graph does.

A replay behaves like a graph: no Python code runs, addresses and scalar arguments stay as they were, and each
operation writes its result to the same memory as when it was recorded. What a real capture forbids is refused
while recording. Only operations that torch dispatches are seen.

Source: CUDA C++ Programming Guide, section "CUDA Graphs", prohibited and unhandled operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.errors import DeviceError

__all__ = ["NothingIsRead", "Recorder"]

_READS_BACK = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::item",
        "aten::masked_select",
        "aten::nonzero",
        "aten::repeat_interleave",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
    }
)
"""Operations whose result, or its shape, the host needs to know."""

_READS_AT_ONCE = frozenset({Tensor.tolist, Tensor.numpy})
"""Methods that read a CPU tensor's values without dispatching any operation."""

_FROM_HOST = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
"""Operations that make a tensor from Python numbers, by a copy from pageable memory."""


class Recorder(TorchDispatchMode):
    """Records the operations that run within its context.

    Attributes:
        static: Whether the set of tensors that may be read was given.
    """

    def __init__(self, static: Iterable[Tensor] | None = None) -> None:
        """Prepare a recording.

        Args:
            static: Tensors at fixed addresses: parameters, caches, buffers. If given, reading any other
                tensor that was not made while recording is refused.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.static = static is not None
        self._kept: list[Tensor] = list(static or ())
        self._known = {_memory(tensor) for tensor in self._kept}
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it.

        Raises:
            DeviceError: A capture forbids the operation.
        """
        kwargs = kwargs or {}
        name = func._schema.name
        given = _tensors((args, kwargs))
        by_mask = name.startswith("aten::index") and any(t.dtype == torch.bool for t in given[1:])
        if name in _READS_BACK or by_mask:
            raise DeviceError(f"{name} reads a value back to the host, which a captured step cannot do")
        if name in _FROM_HOST:
            raise DeviceError(
                "a tensor is made from Python numbers within a captured step, which would copy from memory "
                "that no longer exists at replay; make it before the step, or on the device"
            )
        if self.static:
            for tensor in given:
                if tensor.numel() and _memory(tensor) not in self._known:
                    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                    raise DeviceError(
                        f"{name} reads a tensor {shape} of {dtype} that is neither static nor made within "
                        "the captured step; it may no longer exist at replay"
                    )
        made = func(*args, **kwargs)
        results = _tensors(made)
        self._known |= {_memory(tensor) for tensor in results}
        # Keep all tensors allocated: reused memory would make another tensor look known.
        self._kept += [*given, *results]
        self._calls.append((func, args, kwargs, results))
        return made

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat every operation; each result is written to the memory of the recorded one."""
        for func, args, kwargs, results in self._calls:
            made = func(*args, **kwargs)
            if func.namespace == "c10d":
                # A collective operation only starts the work; its caller has to wait for it.
                _wait(made)
            for old, new in zip(results, _tensors(made), strict=True):
                if _memory(old) != _memory(new):
                    old.copy_(new)


class NothingIsRead(TorchFunctionMode):
    """Refuses functions that read a tensor's values without dispatching an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse functions in `_READS_AT_ONCE`; call all others."""
        if func in _READS_AT_ONCE:
            raise DeviceError(f"{func.__name__} reads values to the host, which a captured step cannot do")
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _wait(made: Any) -> None:
    for leaf in tree_leaves(made):
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()  # type: ignore[attr-defined]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

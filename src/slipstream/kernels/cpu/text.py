"""A text encoder in one native call: its embedding tables, their norm, the layers and the pooler.

Shapes: as in `ops.text`; O output width of the pooler.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.abi_text import Lookup, TextCall
from slipstream.kernels.cpu.blocks import Prepared
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Weight
from slipstream.ops.text import TextFrame, TextRows

if TYPE_CHECKING:
    from slipstream.kernels.cpu.stack import NativeStack

__all__ = ["NativeText", "refuse_text"]

_LAYER = 2
"""The library's number of the norm kind LayerNorm."""


def refuse_text(frame: TextFrame) -> str | None:
    """Return why the library cannot run what surrounds an encoder's layers, or None if it can."""
    for name in ("words", "types", "places", "norm_weight", "norm_bias"):
        tensor = getattr(frame, name)
        if tensor is not None and not _is_read(tensor):
            return f"{name}: a tensor in {tensor.dtype} with strides {tensor.stride()} is not supported"
    tables = {t.dtype for t in (frame.words, frame.types, frame.places) if t is not None}
    if len(tables) > 1:
        return f"tables in {' and '.join(sorted(map(str, tables)))} are not supported"
    for name in ("project_in", "pooler"):
        weight = getattr(frame, name)
        if weight is None:
            continue
        if weight.beside is not None:
            return f"{name}: an unmerged adapter is not supported"
        matrix = matrix_of(weight)
        if isinstance(matrix, str):
            return f"{name}: {matrix}"
    return None


class NativeText:
    """Runs a whole text encoder. The addresses of its frame's tensors are read once; they are kept alive."""

    def __init__(self, stack: NativeStack, frame: TextFrame) -> None:
        """Fill in what does not change from call to call.

        Args:
            stack: Runs the layers.
            frame: Accepted by `refuse_text`.
        """
        self._stack, self._frame = stack, frame
        self._known: tuple[Sequence[object], Prepared | None] = (), None
        some = frame.norm_weight if frame.norm_weight is not None else frame.norm_bias
        self._matrices = [_matrix(weight) for weight in (frame.project_in, frame.pooler)]
        self._template = TextCall(
            lookups=(Lookup * 3)(*(_table(t) for t in (frame.words, frame.types, frame.places))),
            width=frame.words.shape[1],
            norm=abi.Norm(
                weight=address(frame.norm_weight),
                bias=address(frame.norm_bias),
                count=0 if some is None else some.numel(),
                eps=frame.eps,
                kind=_LAYER,
                weight_dtype=_dtype(frame.norm_weight),
                bias_dtype=_dtype(frame.norm_bias),
            ),
            project_in=self._matrices[0],
            pooler=self._matrices[1],
        )

    def __call__(
        self, blocks: Sequence[Any], rows: TextRows, known: Sequence[object]
    ) -> tuple[Tensor, Tensor | None] | None:
        """Run the encoder.

        Args:
            blocks: Blocks of the stack, in order.
            rows: The tokens.
            known: Objects compared by identity with those of the last call: if they are the same ones, no
                tensor of the layers may have moved since.

        Returns:
            The output of the last block, `(T, C)`, and of the pooler, `(N, O)` (None without a pooler), both
            in the dtype of the tables. None if another implementation must run it or is faster.

        Raises:
            DeviceError: A token, type or place is out of range of its table.
        """
        like, pooler = self._frame.words, self._frame.pooler
        out = like.new_empty(rows.ids.shape[0], blocks[0].spec.hidden)
        prepared = self._prepared_for(blocks, out, known)
        if prepared is None:
            return None
        pooled = None
        if pooler is not None:
            pooled = like.new_empty(rows.packed.kv_lens.shape[0], pooler.shape[0])
        given = (rows.ids, rows.types, rows.places, rows.pooled)
        if any(t is not None and (t.dtype != torch.int64 or not t.is_contiguous()) for t in given):
            return None
        # A copy, since several threads may call at the same time.
        call = TextCall.from_buffer_copy(self._template)
        words, types, places = call.lookups
        words.at, types.at, places.at = address(rows.ids), address(rows.types), address(rows.places)
        places.first, places.period = rows.first, rows.period
        call.pooled_tokens, call.pooled = address(rows.pooled), address(pooled)
        call.stack.step = abi.Step(kv_lens=rows.packed.kv_lens.data_ptr())
        self._stack.run_layers(prepared, call.stack, blocks, out, rows.packed, {}, call)
        return out, pooled

    def _prepared_for(self, blocks: Sequence[Any], out: Tensor, known: Sequence[object]) -> Prepared | None:
        """Return the layers' structs; where `known` is unchanged, tensor addresses are not compared."""
        before, prepared = self._known
        same = len(known) == len(before) > 0 and all(map(operator.is_, known, before))
        if not (same and prepared is not None and self._stack.serves(prepared, blocks, out)):
            prepared = self._stack.prepared_for(blocks, out)
            self._known = known, prepared
        return prepared


def _is_read(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.device.type == "cpu"


def _dtype(tensor: Tensor | None) -> int:
    return 0 if tensor is None else DTYPES[tensor.dtype]


def _table(tensor: Tensor | None) -> Lookup:
    if tensor is None:
        return Lookup()
    return Lookup(table=tensor.data_ptr(), rows=tensor.shape[0], period=1, dtype=DTYPES[tensor.dtype])


def _matrix(weight: Weight | None) -> abi.Matrix:
    matrix = abi.Matrix() if weight is None else matrix_of(weight)
    if isinstance(matrix, str):
        raise AssertionError("a frame is described only once refuse_text has accepted it")
    return matrix

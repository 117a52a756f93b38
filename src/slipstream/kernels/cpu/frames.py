"""Describes what surrounds a causal language model's blocks to the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from slipstream.kernels.cpu import abi, abi_model
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.angles import AngleSource
from slipstream.kernels.cpu.blocks import refuse_vector
from slipstream.kernels.cpu.matrix import kept_matrix, matrix_of
from slipstream.kernels.cpu.norm import norm_of
from slipstream.kernels.requirements import VectorLike
from slipstream.ops.activation import KINDS
from slipstream.ops.linear import Weight
from slipstream.spec import FrameSpec

__all__ = ["FrameLike", "refuse_frame", "struct_of_frame"]

_TABLES = {"embed", "inputs_embed"}
"""Matrices of which single rows are read."""


class FrameLike(AngleSource, Protocol):
    """The part of `model.frame.Frame` that is used here; this package cannot import it."""

    spec: FrameSpec

    @property
    def angles_share_a_length(self) -> bool: ...  # noqa: D102
    @property
    def embed_factor(self) -> float: ...  # noqa: D102
    @property
    def embeds_below(self) -> int | None: ...  # noqa: D102
    @property
    def inputs_factor(self) -> float: ...  # noqa: D102
    @property
    def pos_table(self) -> Tensor | None: ...  # noqa: D102
    @property
    def type_row(self) -> Tensor | None: ...  # noqa: D102
    @property
    def logit_bias(self) -> Tensor | None: ...  # noqa: D102
    def matrices(self) -> Mapping[str, Weight]: ...  # noqa: D102
    def norms(self) -> Mapping[str, VectorLike]: ...  # noqa: D102


def refuse_frame(frame: FrameLike) -> str | None:
    """Return why the library cannot run a frame (all that surrounds the blocks), or None if it can."""
    matrices, table, type_row = frame.matrices(), frame.pos_table, frame.type_row
    for name, weight in matrices.items():
        if weight.beside is not None:
            return f"{name}: an unmerged adapter is not supported"
        matrix = matrix_of(weight)
        if isinstance(matrix, str):
            return f"{name}: {matrix}"
    for name in _TABLES & matrices.keys():
        if matrices[name].format == "plain" and not (plane := matrices[name].planes[0]).is_contiguous():
            return f"{name}: a table with strides {plane.stride()} is not supported"
    activation = frame.spec.out_activation
    if activation is not None and (activation not in KINDS or "project_out" not in matrices):
        return f"the activation {activation!r} before the vocabulary projection is not supported"
    bias, head = frame.logit_bias, matrices["head"]
    if bias is not None and (
        head.bias is not None or frame.spec.logit_scale != 1.0 or bias.numel() != head.shape[0]
    ):
        return "a logit bias together with a head bias or a logit multiplier is not supported"
    widths = {width for weight in matrices.values() for width in weight.shape}
    if frame.spec.inputs is not None:
        widths.add(frame.spec.inputs.width)
        added = table is not None or type_row is not None
        if "project_in" in matrices or added or "embed_norm" in frame.norms():
            return "layers' own inputs, with another input of the first layer than a token's embedding"
    for name, vector in frame.norms().items():
        if (reason := refuse_vector(vector, widths)) is not None:
            return f"{name}: {reason}"
    for tensor in (table, type_row, bias):
        if tensor is not None and (tensor.dtype not in DTYPES or not tensor.is_contiguous()):
            return f"a tensor in {tensor.dtype} with strides {tensor.stride()} is not supported"
    return None


def struct_of_frame(frame: FrameLike) -> tuple[abi_model.Frame, list[Any]]:
    """Describe a frame that `refuse_frame` accepts.

    Returns:
        The struct, and the objects that it points to, which must be kept alive with it.
    """
    # A parametrized weight is another tensor each time that it is read.
    matrices, norms, row = frame.matrices(), frame.norms(), frame.type_row
    memory: list[Any] = [matrices, norms, row]
    described = {name: kept_matrix(weight, memory) for name, weight in matrices.items() if "." not in name}
    head, bias, table, spec = described["head"], frame.logit_bias, frame.pos_table, frame.spec
    memory += [bias, table]
    if bias is not None:
        head.bias, head.bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
    struct = abi_model.Frame(
        pos_embed=address(table),
        pos_rows=0 if table is None else table.shape[0],
        pos_offset=spec.pos_offset,
        pos_padding=-1 if spec.pos_padding is None else spec.pos_padding,
        type_row=address(row),
        type_dtype=0 if row is None else DTYPES[row.dtype],
        pos_after_norm=int(spec.pos_after_norm),
        embed_scale=frame.embed_factor,
        out_activation=-1 if spec.out_activation is None else KINDS[spec.out_activation],
        logit_scale=spec.logit_scale,
        softcap=spec.logit_softcap or 0.0,
        pos_dtype=0 if table is None else DTYPES[table.dtype],
        **{name: norm_of(vector, spec.norm) for name, vector in norms.items()},
        **described,
    )
    if spec.placeholders:
        memory.append((ctypes.c_int64 * len(spec.placeholders))(*spec.placeholders))
        struct.placeholders, struct.num_placeholders = ctypes.addressof(memory[-1]), len(spec.placeholders)
        struct.stand_in = spec.stand_in
    for name in ("split", "join"):
        several = [weight for path, weight in matrices.items() if path.startswith(f"{name}.")]
        memory.append((abi.Matrix * len(several))(*(kept_matrix(weight, memory) for weight in several)))
        setattr(struct, name, ctypes.addressof(memory[-1]))
        struct.others = len(several)
    struct.embed_end = frame.embeds_below or 0
    if (inputs := spec.inputs) is not None:
        struct.inputs_rows = inputs.rows or 0
        struct.inputs_embed_scale = frame.inputs_factor
        struct.inputs_project_scale, struct.inputs_scale = inputs.project_scale, inputs.scale
    return struct, memory

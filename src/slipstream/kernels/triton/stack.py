"""Decode steps in as few launches as possible: five for a layer like Llama's.

1. norm, qkv
2. q/k norm, rope, cache, attention
3. attn_out, residual
4. norm, mlp_in, activation
5. mlp_out, residual

That is for one sequence. For more, norms are separate launches; a packed matrix takes two launches (the
second sums the splits and applies activation and residual), a dense one is multiplied by torch.
Norms after a branch are separate launches, and mixtures of experts run as the op.

Shapes: T tokens, one per sequence; C hidden, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.requirements import BlockLike, VectorLike, WeightsLike
from slipstream.kernels.triton.activation import activation as activate
from slipstream.kernels.triton.decode_attention import Heads, attend_one
from slipstream.kernels.triton.linear import MOST_ROWS, matrix_of, takes_norm, times
from slipstream.kernels.triton.norm import WIDEST, norm_onto, run_norm
from slipstream.kernels.triton.operands import Around, Matrix
from slipstream.kernels.triton.register import operator
from slipstream.ops.activation import KINDS
from slipstream.ops.bind import Bound
from slipstream.ops.kv_cache import CachePart, Caches
from slipstream.ops.linear import Weight
from slipstream.ops.step import Step, piece_of
from slipstream.spec import BlockSpec, Norm, Role, Rope

__all__ = ["TritonStack", "bind_stack", "refuse_block"]

Tables = dict[Rope, tuple[Tensor, Tensor]]
Run = Callable[[Any, Tensor, Step, Caches, Tables, Tensor | None], Tensor]
"""The signature of `model.frame.run_stack`."""

_WIDEST_HEAD = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# fmt: off
_KNOWN = {
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "norm",
    "place", "parallel", "residual_from", "residual_scale", "activation", "gated",
    "scale", "softcap", "mask", "cache_repeated", "causal", "window",
    "alibi", "alibi_scale", "alibi_in_mask", "sinks", "rope", "qk_norm",
    "clip_qkv", "moe",
}
"""Fields of a spec that are implemented here, or refused below."""

_ROLES = {
    Role.ATTN_NORM, Role.QKV, Role.Q_NORM, Role.K_NORM, Role.SINKS,
    Role.ATTN_OUT, Role.ATTN_POST_NORM, Role.MLP_NORM, Role.MLP_IN, Role.MLP_OUT,
    Role.MLP_POST_NORM, Role.ROUTER, Role.ROUTER_BIAS, Role.EXPERTS_IN, Role.EXPERTS_OUT,
    Role.SHARED_IN, Role.SHARED_OUT, Role.SHARED_GATE,
}
"""Roles that a layer may have."""
# fmt: on


def refuse_block(block: BlockLike) -> str | None:
    """Return why a layer's decode steps run op by op, or None if they run fused."""
    spec, vectors = block.spec, block.weights.vectors
    for field in fields(spec):  # fields added to the spec later are refused until they are handled here
        if field.name not in _KNOWN and getattr(spec, field.name) != field.default:
            return f"{field.name}={getattr(spec, field.name)!r} is not supported"
    strange = [role for role in (*block.weights.matrices, *vectors) if role not in _ROLES]
    if strange:
        return f"the role {strange[0]} is not supported"
    adapted = [role for role, weight in block.weights.matrices.items() if weight.beside is not None]
    if adapted:
        return f"{adapted[0]}: an unmerged adapter is not supported"
    if not spec.causal or spec.place != "pre" or spec.residual_from != "input":
        return "it is not causal, or normalises something other than a branch's input"
    if spec.hidden > WIDEST or spec.head_dim > _WIDEST_HEAD:
        return f"rows of {spec.hidden} or heads of {spec.head_dim} do not fit in one program"
    if spec.activation not in KINDS:
        return f"no kernel supports the activation {spec.activation!r}"
    roles = (Role.QKV, Role.ATTN_OUT, *((Role.MLP_IN, Role.MLP_OUT) if spec.moe is None else ()))
    for role in roles:
        matrix = matrix_of(block.weights.matrices[role])
        if isinstance(matrix, str):
            return f"{role}: {matrix}"
    for role, vector in vectors.items():
        if any(t is not None and not t.is_contiguous() for t in (vector.weight, vector.bias)):
            return f"{role}: a vector that is not contiguous is not supported"
    if spec.norm.kind == "rms" and any(r in vectors and vectors[r].bias is not None for r in _NORMS):
        return "its RMS norm has a bias"
    return _refuse_qk_norm(spec, vectors)


_NORMS = (Role.ATTN_NORM, Role.MLP_NORM)


def _refuse_qk_norm(spec: BlockSpec, vectors: Mapping[Role, VectorLike]) -> str | None:
    if spec.qk_norm is None:
        return None
    if spec.qk_norm.over != "head" or spec.qk_norm.norm.kind != "rms":
        return "queries and keys are not normalised by an RMS norm for each head"
    given = [vectors[role] for role in (Role.Q_NORM, Role.K_NORM) if role in vectors]
    if any(vector.weight is None or vector.bias is not None for vector in given):
        return "the norm of queries and keys has no weight, or has a bias"
    if len({vector.weight.numel() > spec.head_dim for vector in given if vector.weight is not None}) > 1:
        return "query heads share one norm weight and key heads do not, or the reverse"
    return None


def bind_stack(blocks: Sequence[BlockLike], otherwise: Run) -> Bound:
    """Choose the implementation that runs all blocks on a GPU.

    Args:
        blocks: The layers in order.
        otherwise: The fallback, `model.frame.run_stack`, for steps other than decode steps, and for layers
            that are not accepted.
    """
    reasons = [reason for block in blocks if (reason := refuse_block(block)) is not None]
    refused = {"triton": f"{len(reasons)} of {len(blocks)} layers: {reasons[0]}"} if reasons else {}
    if len(reasons) == len(blocks):
        return Bound("stack", "reference", otherwise, refused or {"triton": "there are no blocks"})
    return Bound("stack", "triton", TritonStack(otherwise), refused)


class TritonStack:
    """Runs layers over packed tokens and the paged cache, as `model.frame.run_stack` does.

    Weights are read in place; the stack only remembers which of them were accepted.
    """

    def __init__(self, otherwise: Run) -> None:
        """Take the fallback for other steps and other layers."""
        self._otherwise = otherwise
        self._accepted: dict[int, WeightsLike] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TritonStack:
        """Return a stack for a copy of the engine, which has not accepted any weights yet."""
        return TritonStack(self._otherwise)

    def __call__(
        self,
        blocks: Sequence[Any],
        x: Tensor,
        step: Step,
        caches: Caches,
        tables: Tables,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run consecutive layers over packed tokens and the paged cache.

        Args:
            blocks: All blocks of the engine, or a contiguous part of them.
            x: `(T, C)`; not modified.
            step: Lengths, slots and block table.
            caches: What each of the blocks keeps; updated in place.
            tables: Cosines and sines by rope, `(T, R / 2)`.
            inputs: `(T, blocks, P)`, the blocks' own inputs, where they have some.

        Returns:
            `(T, C)`, the output of the last block.
        """
        rows = x.shape[0]
        is_decode = step.max_query_len == 1 and step.kv_lens.shape[0] == rows
        if not is_decode or not 0 < rows <= MOST_ROWS or x.dtype not in _DTYPES or not blocks:
            return self._otherwise(blocks, x, step, caches, tables, inputs)
        most = max(block.spec.kv_heads for block in blocks)
        # One launch clears the arrival counters of all layers: an aborted step leaves no counts behind.
        # Each layer's counters begin at a multiple of 16 bytes: other launches would be compiled separately.
        counters = -(-rows * most // 4) * 4
        arrived = torch.zeros(len(blocks), counters, dtype=torch.int32, device=x.device)
        x = x.contiguous()
        for index, (block, kept) in enumerate(zip(blocks, caches, strict=True)):
            if self._accepts(block):
                x = _layer(block, x, step, kept.pages, tables, arrived[index])
            else:
                x = self._otherwise([block], x, step, [kept], tables, piece_of(inputs, index))
        return x

    def _accepts(self, block: BlockLike) -> bool:
        weights = block.weights
        if self._accepted.get(id(block)) is not weights:
            if refuse_block(block) is not None:
                return False
            self._accepted[id(block)] = weights
        return True


def _layer(
    block: BlockLike,
    x: Tensor,
    step: Step,
    caches: tuple[CachePart, CachePart],
    tables: Tables,
    arrived: Tensor,
) -> Tensor:
    spec = block.spec
    qkv = _times(x, block, Role.QKV, replace(_before(block, Role.ATTN_NORM), lets=True))
    attended = attend_one(qkv, _heads(block, tables), caches, step, block.mask, arrived)
    middle = _onto(x, attended, block, Role.ATTN_OUT, Role.ATTN_POST_NORM)
    entry = x if spec.parallel else middle
    shared = spec.parallel and Role.MLP_NORM not in block.weights.vectors
    role = Role.ATTN_NORM if shared else Role.MLP_NORM
    if spec.moe is not None:
        vector = block.weights.vectors.get(role)
        normed = entry if vector is None else run_norm(entry, vector.weight, vector.bias, spec=spec.norm)
        return _added(middle, block.feed_forward(normed), block, Role.MLP_POST_NORM)
    after = replace(_before(block, role), activation=KINDS[spec.activation], gated=spec.gated)
    return _onto(middle, _times(entry, block, Role.MLP_IN, after), block, Role.MLP_OUT, Role.MLP_POST_NORM)


def _onto(residual: Tensor, x: Tensor, block: BlockLike, role: Role, post: Role) -> Tensor:
    """Return `residual + scale * post(matrix(x))`."""
    if post in block.weights.vectors:
        return _added(residual, _times(x, block, role, Around()), block, post)
    return _times(x, block, role, Around(residual=residual, factor=block.spec.residual_scale))


def _added(residual: Tensor, branch: Tensor, block: BlockLike, post: Role) -> Tensor:
    spec, vector = block.spec, block.weights.vectors.get(post)
    if vector is None:
        return torch.add(residual, branch, alpha=spec.residual_scale)
    return norm_onto(residual, branch, vector.weight, vector.bias, spec.norm, spec.residual_scale)


def _before(block: BlockLike, role: Role) -> Around:
    """Return the norm in front of a matrix."""
    vector, norm = block.weights.vectors.get(role), block.spec.norm
    if vector is None:
        return Around()
    kind = 1 if norm.kind == "rms" else 2
    return Around(kind, norm.eps, norm.offset, vector.weight, vector.bias)


def _heads(block: BlockLike, tables: Tables) -> Heads:
    spec, vectors = block.spec, block.weights.vectors
    heads = Heads(spec.heads, spec.kv_heads, spec.head_dim, clip=spec.clip_qkv or 0.0)
    if spec.rope is not None:
        cos, sin = tables[spec.rope]
        if cos.stride() != sin.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        heads = replace(heads, rope=(cos, sin), interleaved=spec.rope.interleaved)
    if spec.qk_norm is None:
        return heads
    q_gain, k_gain = (vectors[r].weight if r in vectors else None for r in (Role.Q_NORM, Role.K_NORM))
    norm: Norm = spec.qk_norm.norm
    place = 2 if spec.qk_norm.after_rope else 1
    return replace(heads, norm=place, gains=(q_gain, k_gain), eps=norm.eps, offset=norm.offset)


def _times(x: Tensor, block: BlockLike, role: Role, around: Around) -> Tensor:
    """Multiply by a role's matrix, including the norm before it and what follows it."""
    weight = block.weights.matrices[role]
    matrix = matrix_of(weight)
    if isinstance(matrix, str):
        raise AssertionError("a layer is run only once refuse_block has accepted it")
    if around.norm and not takes_norm(x):
        x = run_norm(x, around.gain, around.shift, spec=block.spec.norm)
        around = replace(around, norm=0, gain=None, shift=None)
    if weight.format == "plain" and not takes_norm(x):
        return _by_torch(x, weight, block.spec, around)
    optional = [matrix.bias, around.gain, around.shift, around.residual]
    sizes = [matrix.kind, matrix.blocks, matrix.outputs, around.norm, around.activation, int(around.gated)]
    sizes.append(int(around.lets))
    return _fused(x, matrix.planes, optional, sizes, [around.eps, around.offset, around.factor])  # type: ignore[no-any-return]


def _by_torch(x: Tensor, weight: Weight, spec: BlockSpec, around: Around) -> Tensor:
    dense, residual = weight.dense(), around.residual
    if residual is not None and weight.bias is None and residual.dtype == dense.dtype:
        return torch.addmm(residual, x, dense.t(), alpha=around.factor)
    y = F.linear(x, dense, weight.bias)
    if around.activation >= 0:
        y = activate(y, name=spec.activation, gated=around.gated)
    return y if residual is None else torch.add(residual, y, alpha=around.factor)


def _launch(
    x: Tensor, planes: list[Tensor], optional: list[Tensor | None], sizes: list[int], numbers: list[float]
) -> Tensor:
    bias, gain, shift, residual = optional
    kind, blocks, outputs, norm, activation, gated, lets = sizes
    eps, offset, factor = numbers
    matrix = Matrix(planes, bias, kind, blocks, outputs)
    around = Around(norm, eps, offset, gain, shift, activation, bool(gated), residual, factor, bool(lets))
    return times(x, matrix, around)


_fused = operator(
    "fused_linear(Tensor x, Tensor[] planes, Tensor?[] optional, int[] sizes, float[] numbers) -> Tensor",
    _launch,
    lambda x, planes, optional, sizes, numbers: x.new_empty(x.shape[0], sizes[2] // (2 if sizes[5] else 1)),
)

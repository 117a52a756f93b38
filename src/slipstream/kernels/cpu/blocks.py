"""Describes blocks as structs of the native library, and explains why a block cannot be described."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import BRANCHES, DTYPES, GATES, KEYS_VALUES, address
from slipstream.kernels.cpu.block_parts import (
    inputs_of,
    latent_of,
    refuse_latent,
    refuse_streams,
    streams_of,
)
from slipstream.kernels.cpu.matrix import kept_matrix, matrix_of
from slipstream.kernels.cpu.mixture import mixture_of
from slipstream.kernels.cpu.multipliers import multipliers_of, refuse_multipliers
from slipstream.kernels.cpu.norm import norm_of
from slipstream.kernels.cpu.paged_attention import mask_of
from slipstream.kernels.cpu.recurrence import (
    describe_recurrence,
    refuse_recurrence,
    tensors_of_recurrence,
)
from slipstream.kernels.requirements import BlockLike, VectorLike, WeightsLike
from slipstream.ops.activation import KINDS, deviations_at
from slipstream.ops.recurrence import RecurrentLike
from slipstream.spec import BlockSpec, Role, Rope

__all__ = [
    "Prepared",
    "biased",
    "prepare",
    "refuse_block",
    "refuse_vector",
]

_MATRICES = {Role.QKV: "qkv", Role.ATTN_OUT: "attn_out", Role.MLP_IN: "mlp_in", Role.MLP_OUT: "mlp_out"}
_NORMS = {
    Role.ATTN_NORM: "attn_norm",
    Role.ATTN_POST_NORM: "attn_post_norm",
    Role.MLP_NORM: "mlp_norm",
    Role.MLP_POST_NORM: "mlp_post_norm",
}
_QK_NORMS = {Role.Q_NORM: "q_norm", Role.K_NORM: "k_norm"}
_SCALES = {
    Role.ATTN_SCALE: "attn_scale",
    Role.MLP_SCALE: "mlp_scale",
    Role.LAYER_SCALE: "layer_scale",
}
_OF_OTHER_WIDTHS = {
    *_QK_NORMS,
    Role.SINKS,
    Role.ROUTER_BIAS,
    Role.EXPERTS_SCALE,
    Role.Q_DOWN_NORM,
    Role.KV_DOWN_NORM,
    Role.LAYER_SCALE,
}
"""Vectors whose width is not that of the residual stream."""

_UNKNOWN = (
    "carry",
    "feeder",
    "inner_norms",
    "twice",
)
"""Fields of a spec that the library supports only at their default."""


def refuse_block(block: BlockLike, *, cross_attends: bool = False) -> str | None:
    """Return why the library cannot run a block, or None if it can.

    Args:
        block: The block.
        cross_attends: Whether the block is given an encoder's keys and values, and its bias by relative
            position, before it runs.
    """
    spec = block.spec
    for field in fields(spec):
        if field.name in _UNKNOWN and getattr(spec, field.name) != field.default:
            return f"{field.name}={getattr(spec, field.name)!r} is not supported"
    if spec.course is not None and spec.streams is None:
        return f"course={spec.course!r} is not supported"
    if spec.streams is not None and (reason := refuse_streams(block)):
        return reason
    if not cross_attends and (spec.cross is not None or spec.relative is not None):
        return "cross-attention and relative position biases are not supported"
    if spec.activation not in KINDS or (spec.activation == "swiglu_oai" and not spec.gated):
        return f"the activation {spec.activation!r} is not supported"
    for role, weight in block.weights.matrices.items():
        if weight.beside is not None:
            return f"{role}: an unmerged adapter is not supported"
        matrix = matrix_of(weight, 0 if len(weight.shape) == 3 else None)
        if isinstance(matrix, str):
            return f"{role}: {matrix}"
    if spec.own_attention:
        return "a family's own attention is not supported"
    if spec.branches != "both" and (
        spec.branches not in BRANCHES or spec.parallel or spec.place == "post" or spec.cross is not None
    ):
        return f"branches={spec.branches!r} is not supported"
    if spec.mixer is not None and (
        reason := refuse_recurrence(spec, block.part, block.weights.lease is not None)
    ):
        return reason
    if spec.latent is not None and (reason := refuse_latent(block)):
        return reason
    if (reason := _refuse_keys_values(spec) or refuse_multipliers(block)) is not None:
        return reason
    if spec.moe is not None and (spec.moe.residual or spec.moe.idle):
        return (
            "experts that share their weight with shared ones, or that return their input, are not supported"
        )
    if (reason := _refuse_vectors(block)) is not None:
        return reason
    for slopes in (block.mask.alibi, block.mask.sinks):
        if spec.attends and slopes is not None and slopes.numel() != spec.heads:
            return f"{slopes.numel()} slopes or sinks do not fit {spec.heads} heads"
    return None


def _refuse_vectors(block: BlockLike) -> str | None:
    """Return why the library cannot read a block's norms and scales, or None if it can."""
    spec = block.spec
    for role, vector in block.weights.vectors.items():
        if role == Role.ACTIVATION:
            return f"{role}: it is not supported"
        if role == Role.LAYER_SCALE and _numbers(vector) != 1:
            return f"{role}: only one number is supported"
        if role == Role.EXPERTS_SCALE and (spec.moe is None or _numbers(vector) != spec.moe.experts):
            return f"{role}: {_numbers(vector)} numbers do not fit the experts"
        reason = refuse_vector(vector, None if role in _OF_OTHER_WIDTHS else {spec.hidden})
        if reason is not None:
            return f"{role}: {reason}"
    return None


def _numbers(vector: VectorLike) -> int:
    return 0 if vector.weight is None else vector.weight.numel()


def _refuse_keys_values(spec: BlockSpec) -> str | None:
    """Return why the library cannot run a block with such keys and values, or such inputs, or None."""
    plain = spec.values == "own" and spec.sharing != "borrows" and not spec.value_norm
    if not plain and (spec.latent is not None or spec.clip_qkv is not None or spec.mixer is not None):
        return "shared or normalised values of latents, of mixers, or with clipping are not supported"
    if (growth := spec.growth) is not None and (
        spec.latent is not None or spec.mixer is not None or growth.period <= 0 or growth.offset < 0
    ):
        return f"{growth!r} is not supported"
    if spec.inputs and (spec.place == "post" or spec.parallel or spec.activation == "swiglu_oai"):
        return "per-layer inputs of post-norm or parallel layers are not supported"
    return None


def refuse_vector(vector: VectorLike, widths: Set[int] | None) -> str | None:
    """Return why the library cannot read a norm's weight and bias, or None if it can.

    Args:
        vector: The weight and bias.
        widths: Allowed lengths of each; None for any length, as long as both have the same.
    """
    tensors = [t for t in (vector.weight, vector.bias) if t is not None]
    for tensor in tensors:
        if tensor.dtype not in DTYPES or not tensor.is_contiguous():
            return f"a vector in {tensor.dtype} with strides {tensor.stride()} is not supported"
    counts = {t.numel() for t in tensors}
    if len(counts) > 1 or (widths is not None and not counts <= widths):
        shapes = " and ".join(str(tuple(t.shape)) for t in tensors)
        return f"a norm's vectors of shape {shapes}, some of them broadcast, are not supported"
    return None


@dataclass(frozen=True)
class Prepared:
    """The structs of some blocks, valid as long as no tensor moves.

    Attributes:
        blocks: One struct per block.
        ropes: The distinct ropes, in the order in which the structs index the rotary tables.
        weights: The weights of each block.
        tensors: All tensors that the structs point into.
        addresses: The addresses of these tensors.
        memory: Other objects that the structs point to.
        parts: The mixers with a recurrence, with `places_of` each.
    """

    blocks: Any
    ropes: tuple[Rope, ...]
    weights: tuple[WeightsLike, ...]
    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    memory: tuple[Any, ...]
    parts: tuple[tuple[RecurrentLike, tuple[tuple[Any, ...], ...]], ...] = ()

    @property
    def keeps_parts(self) -> bool:
        """Whether the mixers with a recurrence still have the same tensors."""
        return all(places_of(part) == places for part, places in self.parts)


def prepare(blocks: Sequence[BlockLike]) -> Prepared:
    """Make the structs of blocks that `refuse_block` accepts."""
    ropes = tuple(dict.fromkeys(block.spec.rope for block in blocks if block.spec.rope is not None))
    memory: list[Any] = []
    structs = (abi.Block * len(blocks))(*(_struct(block, ropes, memory) for block in blocks))
    tensors: list[Tensor] = []
    for block in blocks:
        masks = (block.mask.alibi, block.mask.sinks)
        matrices = (t for w in block.weights.matrices.values() for t in (*w.planes, w.bias))
        vectors = (t for v in block.weights.vectors.values() for t in (v.weight, v.bias))
        tensors += [t for t in (*masks, *matrices, *vectors) if t is not None]
    parts = tuple(
        (block.part, places_of(block.part)) for block in blocks if block.spec.recurrence and block.part
    )
    tensors += [t for part, _ in parts for t in tensors_of_recurrence(part)]
    places = tuple(t.data_ptr() for t in tensors)
    weights = tuple(block.weights for block in blocks)
    return Prepared(structs, ropes, weights, tuple(tensors), places, tuple(memory), parts)


def places_of(part: RecurrentLike) -> tuple[tuple[Any, ...], ...]:
    """Return what tells a mixer's current tensors, which user code may replace, from those described.

    These are their addresses and shapes, and of matrices also how they are unpacked and whether an adapter,
    which is refused, is active.
    """
    weights = (*part.projections, *part.inner, part.last)
    kinds = ((weight.format, weight.rounding, weight.beside is None) for weight in weights)
    return (*((t.data_ptr(), *t.shape) for t in tensors_of_recurrence(part)), *kinds)


def biased(blocks: Any, relative: Tensor) -> Any:
    """Return copies of the structs of blocks that add a bias by distance.

    Args:
        blocks: An array of structs.
        relative: `(H, 2 * S - 1)` float32 contiguous; must be kept alive.
    """
    structs = type(blocks).from_buffer_copy(blocks)
    for struct in structs:
        struct.mask.relative, struct.mask.reach = relative.data_ptr(), relative.shape[1]
        struct.mask.zero = relative.shape[1] // 2
    return structs


def _struct(block: BlockLike, ropes: tuple[Rope, ...], memory: list[Any]) -> abi.Block:
    spec, vectors = block.spec, block.weights.vectors
    struct = abi.Block(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        post=int(spec.place == "post"),
        parallel=int(spec.parallel and spec.place != "post"),
        residual_from_norm=int(spec.residual_from == "norm"),
        gated=int(spec.gated),
        activation=KINDS[spec.activation],
        table=-1 if spec.rope is None else ropes.index(spec.rope),
        rope_interleaved=int(spec.rope is not None and spec.rope.interleaved),
        residual_scale=spec.residual_scale,
        clip=spec.clip_qkv or 0.0,
        causal=int(spec.causal),
        gate=0 if spec.gate is None else GATES[spec.gate.activation],
        gates_heads=int(spec.gate is not None and spec.gate.per == "head"),
        branches=BRANCHES[spec.branches],
        mask=mask_of(block.mask),
    )
    for role, name in _MATRICES.items():
        if role in block.weights.matrices:
            setattr(struct, name, kept_matrix(block.weights.matrices[role], memory))
    if spec.recurrence is not None and block.part is not None:
        describe_recurrence(block.part, spec, struct, memory)
    if not spec.attends:
        struct.gate, struct.clip, struct.table = 0, 0.0, -1
    _describe_parts(struct, block, memory)
    for role, name in _SCALES.items():
        vector = vectors.get(role)
        if vector is not None and vector.weight is not None:
            setattr(struct, name, abi.Scale(address(vector.weight), DTYPES[vector.weight.dtype]))
    for role, name in _NORMS.items():
        setattr(struct, name, norm_of(vectors.get(role), spec.norm))
    if spec.branches == "feed_forward":
        struct.mlp_norm = struct.attn_norm
    if spec.qk_norm is not None and spec.attends:
        struct.qk_norm = 1 if spec.qk_norm.over == "head" else 2
        struct.qk_norm_after_rope = int(spec.qk_norm.after_rope)
        for role, name in _QK_NORMS.items():
            setattr(struct, name, norm_of(vectors.get(role), spec.qk_norm.norm))
    return struct


def _describe_parts(struct: abi.Block, block: BlockLike, memory: list[Any]) -> None:
    """Describe what only some blocks have; `memory` receives what the struct points to."""
    spec = block.spec
    if spec.multipliers is not None:
        struct.multipliers = ctypes.pointer(multipliers_of(spec.multipliers, gated=spec.gated))
    keys_values = "borrows" if spec.sharing == "borrows" else spec.values
    struct.keys_values = KEYS_VALUES[keys_values]
    if spec.value_norm and keys_values != "borrows":
        struct.v_norm = abi.Norm(eps=spec.norm.eps, kind=1)
    if (growth := spec.growth) is not None:
        struct.growth, struct.growth_period = growth.slope, growth.period
        struct.growth_offset = growth.offset
    if spec.sparsity:
        struct.sparse = 1
        struct.cutoff = deviations_at(spec.sparsity, block.weights.matrices[Role.MLP_IN].computes_in)
    if spec.streams is not None:
        struct.streams = ctypes.pointer(streams_of(spec.streams, block, memory))
    if spec.inputs:
        struct.inputs = ctypes.pointer(inputs_of(block, memory))
    if spec.latent is not None:
        struct.qkv = kept_matrix(block.weights.matrices[Role.Q_UP], memory)
        struct.latent = ctypes.pointer(latent_of(spec.latent, block, memory))
    if spec.moe is not None and spec.branches != "attention":
        struct.moe = ctypes.pointer(mixture_of(spec.moe, block, memory))

"""The whole run of blocks in one native call: the structs are made once per engine, a step is one call.

Shapes: T packed tokens, C hidden, P cache blocks, Z tokens per cache block, K kv heads, D head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, SCORINGS, StackCall, address
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.kernels.cpu.paged_attention import cache_dtype, cache_of, mask_of, readable, serves, step_of
from slipstream.ops.activation import KINDS
from slipstream.ops.bind import Bound
from slipstream.ops.kv_cache import CachePart
from slipstream.ops.linear import Weight
from slipstream.ops.step import AttentionMask, Step
from slipstream.spec import BlockSpec, MoE, Norm, Role, Rope

__all__ = ["NativeStack", "Prepared", "bind_stack", "norm_of", "refuse_block", "serves_caches"]

_MOST_TOKENS = 1 << 20
"""Packed tokens of a step up to which the layers are slower one by one: none has more."""

_MOST_TOKENS_OF_EXPERTS = 64
"""The same where there are experts: what each of them says of each token is kept until it is summed."""

_MOST_TOKENS_BESIDE_AMX = 64
"""The same in bfloat16 where torch multiplies by AMX, and the library is told not to."""

_MATRICES = {Role.QKV: "qkv", Role.ATTN_OUT: "attn_out", Role.MLP_IN: "mlp_in", Role.MLP_OUT: "mlp_out"}
_SHARED = {
    Role.ROUTER: "router",
    Role.SHARED_IN: "shared_in",
    Role.SHARED_OUT: "shared_out",
    Role.SHARED_GATE: "shared_gate",
}
_EXPERTS = {Role.EXPERTS_IN: "experts_in", Role.EXPERTS_OUT: "experts_out"}
_NORMS = {
    Role.ATTN_NORM: "attn_norm",
    Role.ATTN_POST_NORM: "attn_post_norm",
    Role.MLP_NORM: "mlp_norm",
    Role.MLP_POST_NORM: "mlp_post_norm",
}
_QK_NORMS = {Role.Q_NORM: "q_norm", Role.K_NORM: "k_norm"}

Caches = Sequence[tuple[CachePart, CachePart]]
Tables = dict[Rope, tuple[Tensor, Tensor]]
Run = Callable[[Any, Tensor, Step, Caches, Tables], Tensor]
"""The signature of `model.frame.run_stack`."""


class VectorLike(Protocol):
    """A norm's weight and bias."""

    @property
    def weight(self) -> Tensor | None: ...  # noqa: D102
    @property
    def bias(self) -> Tensor | None: ...  # noqa: D102


class WeightsLike(Protocol):
    """A block's tensors by role."""

    @property
    def matrices(self) -> Mapping[Role, Weight]: ...  # noqa: D102
    @property
    def vectors(self) -> Mapping[Role, VectorLike]: ...  # noqa: D102


class BlockLike(Protocol):
    """What the stack needs of `model.block.Block`, which stands above this room."""

    spec: BlockSpec
    mask: AttentionMask

    @property
    def weights(self) -> WeightsLike: ...  # noqa: D102


def refuse_block(block: BlockLike) -> str | None:
    """Why the library cannot run a block, or None where it can."""
    spec = block.spec
    if not spec.causal:
        return "it is causal"
    if spec.cross is not None or spec.relative is not None:
        return "attention across, and biases by relative position, are not in it"
    if spec.activation not in KINDS or (spec.activation == "swiglu_oai" and not spec.gated):
        return f"the activation {spec.activation!r} is not in it"
    for role, weight in block.weights.matrices.items():
        matrix = matrix_of(weight, 0 if len(weight.shape) == 3 else None)
        if isinstance(matrix, str):
            return f"{role}: {matrix}"
    if spec.latent is not None:
        return "latent attention is not in it"
    if spec.moe is not None and not spec.moe.is_plain:
        return "a router that scores by sigmoid, in groups, by a factor or in float32 is not in it"
    for role, vector in block.weights.vectors.items():
        if role in (Role.ATTN_SCALE, Role.MLP_SCALE, Role.ROUTER_BIAS):
            return f"{role}: it is not in it"
        for tensor in (vector.weight, vector.bias):
            if tensor is not None and (tensor.dtype not in DTYPES or not tensor.is_contiguous()):
                return f"{role}: a vector in {tensor.dtype} is not read"
    for slopes in (block.mask.alibi, block.mask.sinks):
        if slopes is not None and slopes.numel() != spec.heads:
            return f"{slopes.numel()} slopes or sinks do not fit {spec.heads} heads"
    return None


def bind_stack(blocks: Sequence[BlockLike], otherwise: Run) -> Bound:
    """Choose what runs all blocks: one native call, or `otherwise`.

    Args:
        blocks: The layers in order.
        otherwise: `model.frame.run_stack`, which also takes the steps that torch runs faster.
    """
    refused: dict[str, str] = {}
    for isa in ISAS:
        name = f"cpu-{isa}"
        library = load(isa) if (reason := refuse(isa)) is None else None
        reason = reason or next((why for block in blocks if (why := refuse_block(block))), None)
        if library is not None and reason is None and blocks:
            return Bound("stack", name, NativeStack(blocks, library, otherwise), refused)
        refused[name] = reason or "there are no blocks"
    return Bound("stack", "reference", otherwise, refused)


@dataclass(frozen=True)
class Prepared:
    """The structs of some blocks, valid while every tensor stays where it is.

    Attributes:
        blocks: One struct each.
        ropes: In the order of the tables that the structs name.
        weights: What they were made of.
        tensors: All tensors that they point into.
        addresses: Where those were.
        memory: What the structs point to beside tensors.
    """

    blocks: Any
    ropes: tuple[Rope, ...]
    weights: tuple[WeightsLike, ...]
    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    memory: tuple[Any, ...]


class NativeStack:
    """Runs every layer over packed tokens and the paged cache, as `model.frame.run_stack` does.

    Weights are read where the model has them. What is moved, cast or replaced later shows in its address.

    Attributes:
        name: What the report calls it.
        most_tokens: Steps of more tokens go to the stack it was given.
        library: For one instruction set.
        blocks: The layers in order.
    """

    def __init__(self, blocks: Sequence[BlockLike], library: Library, otherwise: Run) -> None:
        """Describe the blocks to the library.

        Args:
            blocks: Accepted by `refuse_block`.
            library: For one instruction set.
            otherwise: For steps of many tokens, and for blocks that are no longer accepted.
        """
        self.name = f"cpu-{library.isa}"
        weight = blocks[0].weights.matrices[Role.QKV]
        dtype = weight.planes[0].dtype if weight.dtype is None else weight.dtype
        beside_amx = (
            dtype == torch.bfloat16
            and torch.cpu._is_amx_tile_supported()
            and not library.isa.startswith("amx")
        )
        self.most_tokens = _MOST_TOKENS_BESIDE_AMX if beside_amx else _MOST_TOKENS
        if any(block.spec.moe is not None for block in blocks):
            self.most_tokens = min(self.most_tokens, _MOST_TOKENS_OF_EXPERTS)
        self.library, self._otherwise = library, otherwise
        self.blocks = tuple(blocks)
        self._place = {id(block): index for index, block in enumerate(blocks)}
        self._prepared: Prepared | None = _prepare(self.blocks)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy describes its own blocks: addresses do not travel."""
        return _restore, (self.blocks, self.library.isa, self._otherwise, self.most_tokens)

    def __call__(
        self, blocks: Sequence[Any], x: Tensor, step: Step, caches: Caches, tables: Tables
    ) -> Tensor:
        """Run some layers that follow each other.

        Args:
            blocks: All of the engine's, or some in a row.
            x: `(T, C)`; not changed.
            step: Lengths, slots and block table.
            caches: `(k, v)` of each of the blocks, `(P, Z, K, D)`; updated in place.
            tables: Angles by rope, `(T, R / 2)`.

        Returns:
            `(T, C)`, what leaves the last of them.

        Raises:
            DeviceError: The step points outside of the cache.
        """
        prepared = self.ready()
        first = self._place.get(id(blocks[0])) if len(blocks) else None
        if (
            prepared is None
            or first is None
            or not 0 < x.shape[0] <= self.most_tokens
            or x.shape != (step.slots.shape[0], self.blocks[0].spec.hidden)
            or any(t.shape[0] != x.shape[0] for rope in prepared.ropes for t in tables[rope])
            or not self._serves(blocks, first, x, step, caches)
        ):
            return self._otherwise(blocks, x, step, caches, tables)
        return self._run(prepared, slice(first, first + len(blocks)), x, step, caches, tables)

    def ready(self) -> Prepared | None:
        """The structs, made anew where a tensor has moved; None where the blocks are no longer accepted."""
        prepared = self._prepared
        if (
            prepared is not None
            and all(b.weights is w for b, w in zip(self.blocks, prepared.weights, strict=True))
            and all(t.data_ptr() == p for t, p in zip(prepared.tensors, prepared.addresses, strict=True))
        ):
            return prepared
        accepted = all(refuse_block(block) is None for block in self.blocks)
        self._prepared = _prepare(self.blocks) if accepted else None
        return self._prepared

    def _serves(self, blocks: Sequence[Any], first: int, x: Tensor, step: Step, caches: Caches) -> bool:
        ours = self.blocks[first : first + len(blocks)]
        return (
            len(ours) == len(blocks) == len(caches)
            and all(a is b for a, b in zip(ours, blocks, strict=True))
            and x.dtype in DTYPES
            and x.device.type == "cpu"
            and serves(step)
            and serves_caches(ours, caches)
        )

    def _run(
        self, prepared: Prepared, which: slice, x: Tensor, step: Step, caches: Caches, tables: Tables
    ) -> Tensor:
        count = which.stop - which.start
        x = x.contiguous()
        out = torch.empty_like(x)
        # The angles are kept until the call is over: the structs only point to them.
        angles = [tuple(t.float().contiguous() for t in tables[rope]) for rope in prepared.ropes]
        rows = (abi.Table * len(angles))(
            *(abi.Table(c.data_ptr(), s.data_ptr(), *c.shape) for c, s in angles)
        )
        size = ctypes.sizeof(abi.Block) * which.start
        call = StackCall(
            x=x.data_ptr(),
            out=out.data_ptr(),
            blocks=ctypes.pointer(abi.Block.from_buffer(prepared.blocks, size)),
            num_blocks=count,
            caches=(abi.Cache * count)(*(cache_of(k, v) for k, v in caches)),
            tables=rows,
            num_tables=len(rows),
            dtype=DTYPES[x.dtype],
            cache_dtype=cache_dtype(caches[0][0]),
            step=step_of(step, caches[0][0].shape),
        )
        self.library.run("stack", call)
        return out


def serves_caches(blocks: Sequence[BlockLike], caches: Caches) -> bool:
    """Whether caches `(P, Z, K, D)`, one pair per block, lie as the library reads and writes them."""
    return all(
        readable(t)
        and t.dtype == caches[0][0].dtype
        and t.shape[:2] == caches[0][0].shape[:2]
        and t.shape[2:] == (block.spec.kv_heads, block.spec.head_dim)
        for block, pair in zip(blocks, caches, strict=True)
        for t in pair
    )


def _restore(blocks: Sequence[BlockLike], isa: str, otherwise: Run, most_tokens: int) -> NativeStack | Run:
    library = load(isa)
    if library is None:
        return otherwise
    stack = NativeStack(blocks, library, otherwise)
    stack.most_tokens = most_tokens
    return stack


def _prepare(blocks: Sequence[BlockLike]) -> Prepared:
    ropes = tuple(dict.fromkeys(block.spec.rope for block in blocks if block.spec.rope is not None))
    memory: list[Any] = []
    structs = (abi.Block * len(blocks))(*(_struct(block, ropes, memory) for block in blocks))
    tensors: list[Tensor] = []
    for block in blocks:
        masks = (block.mask.alibi, block.mask.sinks)
        matrices = (t for w in block.weights.matrices.values() for t in (*w.planes, w.bias))
        vectors = (t for v in block.weights.vectors.values() for t in (v.weight, v.bias))
        tensors += [t for t in (*masks, *matrices, *vectors) if t is not None]
    places = tuple(t.data_ptr() for t in tensors)
    weights = tuple(block.weights for block in blocks)
    return Prepared(structs, ropes, weights, tuple(tensors), places, tuple(memory))


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
        mask=mask_of(block.mask),
    )
    for role, name in _MATRICES.items():
        if role in block.weights.matrices:
            setattr(struct, name, _matrix(block.weights.matrices[role], memory))
    if spec.moe is not None:
        struct.moe = ctypes.pointer(_moe(spec.moe, block.weights.matrices, memory))
    for role, name in _NORMS.items():
        setattr(struct, name, norm_of(vectors.get(role), spec.norm))
    if spec.qk_norm is not None:
        struct.qk_norm = 1 if spec.qk_norm.over == "head" else 2
        struct.qk_norm_after_rope = int(spec.qk_norm.after_rope)
        for role, name in _QK_NORMS.items():
            setattr(struct, name, norm_of(vectors.get(role), spec.qk_norm.norm))
    return struct


def _moe(moe: MoE, matrices: Mapping[Role, Weight], memory: list[Any]) -> abi.Moe:
    struct = abi.Moe(
        experts=moe.experts,
        top_k=moe.top_k,
        shared=moe.shared,
        jitter=moe.jitter,
        scoring=SCORINGS[moe.scoring],
        normalize=int(moe.normalize),
    )
    for role, name in _SHARED.items():
        if role in matrices:
            setattr(struct, name, _matrix(matrices[role], memory))
    for role, name in _EXPERTS.items():
        each = (_matrix(matrices[role], memory, expert) for expert in range(moe.experts))
        memory.append((abi.Matrix * moe.experts)(*each))
        setattr(struct, name, ctypes.addressof(memory[-1]))
    memory.append(struct)
    return struct


def _matrix(weight: Weight, memory: list[Any], expert: int | None = None) -> abi.Matrix:
    matrix = matrix_of(weight, expert)
    if isinstance(matrix, str):
        raise AssertionError("a block is described only once refuse_block has accepted it")
    memory.append(matrix.memory)
    return matrix


def norm_of(vector: VectorLike | None, norm: Norm) -> abi.Norm:
    """Describe a norm to the library; its tensors must be kept alive."""
    if vector is None:
        return abi.Norm()
    weight, bias = vector.weight, vector.bias
    some = weight if weight is not None else bias
    return abi.Norm(
        weight=address(weight),
        bias=address(bias),
        count=0 if some is None else some.numel(),
        eps=norm.eps,
        offset=norm.offset,
        kind=1 if norm.kind == "rms" else 2,
        weight_dtype=0 if weight is None else DTYPES[weight.dtype],
        bias_dtype=0 if bias is None else DTYPES[bias.dtype],
    )

"""Describes parts of blocks to the native library: cross-attention, inputs of their own, latents, streams."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.matrix import kept_matrix
from slipstream.kernels.cpu.norm import norm_of
from slipstream.kernels.requirements import BlockLike
from slipstream.spec import Latent, Role, Streams

__all__ = ["across_of", "inputs_of", "latent_of", "refuse_latent", "refuse_streams", "streams_of"]

_MOST_APART = 512
"""Rotated dims of latent attention whose pairs the library can put apart."""

_MOST_STREAMS = 8
"""Streams of states that the library supports."""


def refuse_latent(block: BlockLike) -> str | None:
    """Return why the library cannot run a block's latent attention, or None if it can."""
    spec, up = block.spec, block.weights.matrices[Role.KV_UP]
    others = (spec.gate, spec.qk_norm, spec.clip_qkv, spec.window, spec.softcap, spec.cross)
    masks = (block.mask.alibi, block.mask.sinks)
    if any(other is not None for other in (*others, *masks)) or spec.parallel or spec.place == "post":
        return "latent attention with a gate, norms of heads, a window or biases of scores is not supported"
    if up.format != "plain" or len(up.planes) != 1 or up.bias is not None:
        return f"{Role.KV_UP}: only one dense matrix without a bias is supported"
    latent = spec.latent
    if latent is None or latent.value_dim > spec.head_dim:
        return "latent attention whose values are wider than its keys is not supported"
    if latent.interleaved and (latent.rope_dim % 2 or latent.rope_dim > _MOST_APART):
        return f"{latent.rope_dim} rotated dims, which are put apart, are more than {_MOST_APART} or odd"
    return None


def refuse_streams(block: BlockLike) -> str | None:
    """Return why the library cannot run a block of several streams, or None if it can."""
    spec, streams, matrices = block.spec, block.spec.streams, block.weights.matrices
    other = (spec.mixer, spec.cross, spec.multipliers, spec.moe)
    unlike = spec.residual_from != "input" or spec.residual_scale != 1.0 or spec.branches != "both"
    if streams is None or not spec.inputs or any(one is not None for one in other) or unlike:
        return "streams of layers without inputs of their own, or with mixers or experts, are not supported"
    if not 2 <= streams.count <= _MOST_STREAMS:
        return f"{streams.count} streams are not supported, at most {_MOST_STREAMS} are"
    for role in (Role.STREAM_ROUTER, Role.STREAM_PREDICT, Role.STREAM_CORRECT):
        weight = matrices[role]
        if weight.format != "plain" or weight.bias is not None or weight.planes[0].stride(-1) != 1:
            return f"{role}: only a dense matrix without a bias is supported"
    return None


def across_of(block: BlockLike, memory: list[Any]) -> abi.Across:
    """Describe a block's cross-attention to the library, without the encoder's keys and values.

    Args:
        block: Accepted by `refuse_block`.
        memory: Receives the objects, other than tensors, that the struct points to.
    """
    spec, vectors, matrices = block.spec, block.weights.vectors, block.weights.matrices
    return abi.Across(
        norm=norm_of(vectors.get(Role.CROSS_NORM), spec.norm),
        post_norm=norm_of(vectors.get(Role.CROSS_POST_NORM), spec.norm),
        q=kept_matrix(matrices[Role.CROSS_Q], memory),
        out=kept_matrix(matrices[Role.CROSS_OUT], memory),
        mask=abi.Mask(scale=spec.scale, softcap=spec.softcap or 0.0),
    )


def inputs_of(block: BlockLike, memory: list[Any]) -> abi.Inputs:
    """Describe the branch of a block's inputs to the library; `memory` receives what the struct points to."""
    matrices, vectors = block.weights.matrices, block.weights.vectors
    struct = abi.Inputs(
        width=block.spec.inputs,
        gate=kept_matrix(matrices[Role.INPUT_GATE], memory),
        out=kept_matrix(matrices[Role.INPUT_OUT], memory),
        norm=norm_of(vectors.get(Role.INPUT_NORM), block.spec.norm),
    )
    memory.append(struct)
    return struct


def latent_of(latent: Latent, block: BlockLike, memory: list[Any]) -> abi.Latent:
    """Describe a block's latent attention to the library; `memory` receives what the struct points to."""
    matrices, vectors = block.weights.matrices, block.weights.vectors
    struct = abi.Latent(
        rank=latent.rank,
        plain=latent.plain_dim,
        rotated=latent.rope_dim,
        value=latent.value_dim,
        query_scale=latent.query_scale,
        latent_scale=latent.latent_scale,
        apart=int(latent.interleaved),
        query_norm=norm_of(vectors.get(Role.Q_DOWN_NORM), latent.norm),
        norm=norm_of(vectors.get(Role.KV_DOWN_NORM), latent.norm),
        down=kept_matrix(matrices[Role.KV_DOWN], memory),
        up=kept_matrix(matrices[Role.KV_UP], memory),
    )
    if latent.query_rank is not None:
        struct.query_down = kept_matrix(matrices[Role.Q_DOWN], memory)
    up = matrices[Role.KV_UP]
    both = up.planes[0].unflatten(0, (-1, latent.plain_dim + latent.value_dim))
    keys, values = both.split((latent.plain_dim, latent.value_dim), dim=1)
    for name, heads in (("keys", keys.mT), ("values", values)):
        shape = tuple(heads.shape[1:])
        each = (kept_matrix(replace(up, shape=shape, planes=(head,)), memory) for head in heads.unbind(0))
        memory.append((abi.Matrix * len(heads))(*each))
        setattr(struct, name, ctypes.addressof(memory[-1]))
    memory.append(struct)
    return struct


def streams_of(streams: Streams, block: BlockLike, memory: list[Any]) -> abi.Streams:
    """Describe a block's streams to the library; `memory` receives what the struct points to."""
    matrices, vectors, norm = block.weights.matrices, block.weights.vectors, block.spec.norm
    scale = vectors.get(Role.STREAM_SCALE)
    struct = abi.Streams(
        count=streams.count,
        active=streams.active,
        rank=streams.rank,
        router_norm=norm_of(vectors.get(Role.STREAM_NORM), norm),
        narrow_norm=norm_of(vectors.get(Role.NARROW_NORM), norm),
        router=kept_matrix(matrices[Role.STREAM_ROUTER], memory),
        predict=kept_matrix(matrices[Role.STREAM_PREDICT], memory),
        correct=kept_matrix(matrices[Role.STREAM_CORRECT], memory),
        narrow_in=kept_matrix(matrices[Role.NARROW_IN], memory),
        narrow_out=kept_matrix(matrices[Role.NARROW_OUT], memory),
    )
    if streams.scaled and scale is not None and scale.weight is not None:
        struct.scale = abi.Scale(address(scale.weight), DTYPES[scale.weight.dtype])
    memory.append(struct)
    return struct

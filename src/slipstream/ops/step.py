"""The arguments that flow from `generate` down to attention: what one step computes, and which keys count.

Shapes: T packed tokens, N sequences, H heads, Z tokens per cache block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionMask", "Packed", "Step"]


@dataclass(frozen=True)
class Step:
    """What one run of the model computes: packed tokens, their places in the cache, which rows need logits.

    Every tensor is on the engine's device and may be a static buffer of a captured graph; the plain integers
    bound what the tensors hold, so that nothing has to be read back.

    Attributes:
        token_ids: `(T,)` int64.
        positions: `(T,)` int64, from 0 within each sequence.
        query_starts: `(N + 1,)` int32; sequence `i` owns tokens `query_starts[i] : query_starts[i + 1]`.
        kv_lens: `(N,)` int32, tokens of each sequence after this step.
        block_table: `(N, blocks)` int32, blocks of each sequence in order; unused entries are 0.
        slots: `(T,)` int64, `block * Z + offset` where a token's key and value are written.
        logit_rows: `(R,)` int64, tokens whose logits are wanted, in ascending order.
        max_query_len: Most tokens that a sequence has in this step.
        max_kv_len: Most tokens that a sequence has after this step, or all that its row of the block table
            has room for: lengths grow within a captured step, and this does not.
        static: Whether the tensors get other values where a captured step is replayed, so that nothing may be
            read back and laid out by it. A step of one token for each sequence never asks for that.
        beyond: How far a position may lie beyond the tokens of its sequence, where it goes on from another
            number than theirs (after pictures).
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    kv_lens: Tensor
    block_table: Tensor
    slots: Tensor
    logit_rows: Tensor
    max_query_len: int
    max_kv_len: int
    static: bool = False
    beyond: int = 0


@dataclass(frozen=True)
class Packed:
    """Sequences side by side that are complete: there is no cache.

    Attributes:
        query_starts: `(N + 1,)` int32; sequence `i` owns tokens `query_starts[i] : query_starts[i + 1]`.
        kv_lens: `(N,)` int32; so many of its first tokens are keys, the others only look at those.
        positions: `(T,)` int64, the row of each token in the tables of angles.
    """

    query_starts: Tensor
    kv_lens: Tensor
    positions: Tensor


Older = tuple[Tensor | None, Tensor | None]
"""Keys and values that a layer has of earlier tokens, `(B, K, L, D)` each; None where there are none."""


@dataclass(frozen=True)
class AttentionMask:
    """What, beside causality, decides which keys count and how much.

    Attributes:
        scale: Multiplies the scores.
        window: A token sees at most this many tokens, itself among them.
        softcap: Bounds the scores.
        alibi: `(H,)` float32 slopes; `slope * key_position` is added to the scores.
        sinks: `(H,)` logits that take part in the softmax and carry no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None

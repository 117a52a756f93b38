"""The arguments passed from `generate` down to attention: what a step computes, and which keys are visible.

Shapes: T packed tokens, N sequences, H heads, Z tokens per cache block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttentionMask", "Packed", "Step", "piece_of"]


@dataclass(frozen=True)
class Step:
    """What one run of the model computes: packed tokens, their slots in the cache, which rows need logits.

    Every tensor is on the engine's device and may be a static buffer of a captured graph; the plain integers
    bound the values of the tensors, so that nothing has to be read back.

    Attributes:
        token_ids: `(T,)` int64.
        positions: `(T,)` int64, from 0 within each sequence.
        query_starts: `(N + 1,)` int32; sequence `i` owns tokens `query_starts[i] : query_starts[i + 1]`.
        kv_lens: `(N,)` int32, tokens of each sequence after this step.
        block_table: `(N, blocks)` int32, blocks of each sequence in order; unused entries are 0.
        slots: `(T,)` int64, `block * Z + offset` where a token's key and value are written.
        logit_rows: `(R,)` int64, indices of the tokens whose logits are needed, in ascending order.
        max_query_len: Maximum number of tokens of a sequence in this step.
        max_kv_len: Maximum number of tokens of a sequence after this step, or the capacity of its row of the
            block table: lengths grow when a captured step is replayed, and this integer does not.
        static: Whether replays of a captured step change the values of the tensors, so that no layout may
            depend on values that were read back. Not needed for a step of one token per sequence.
        states: `(N,)` int32, ascending: each sequence's row in the states of layers with a recurrence; None
            where no layer has one.
        beyond: By how much a position may exceed the token count of its sequence, where positions continue
            from another number (after images).
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
    states: Tensor | None = None


@dataclass(frozen=True)
class Packed:
    """Packed complete sequences, without a cache.

    Attributes:
        query_starts: `(N + 1,)` int32; sequence `i` owns tokens `query_starts[i] : query_starts[i + 1]`.
        kv_lens: `(N,)` int32, how many of a sequence's first tokens are keys; the other tokens only attend.
        positions: `(T,)` int64, the row of each token in the tables of angles.
    """

    query_starts: Tensor
    kv_lens: Tensor
    positions: Tensor


Older = tuple[Tensor | None, Tensor | None]
"""Keys and values of earlier tokens in one layer, `(B, K, L, D)` each; None if there are none."""


@dataclass(frozen=True)
class AttentionMask:
    """Scaling, masking and biasing of the scores, in addition to causality.

    Attributes:
        scale: Multiplies the scores.
        window: A token sees at most this many tokens, including itself.
        chunk: A token sees no token of an earlier chunk of so many positions.
        softcap: Bounds the scores.
        alibi: `(H,)` float32 slopes; `slope * key_position` is added to the scores.
        sinks: `(H,)` logits that take part in the softmax and carry no value.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None


def piece_of(inputs: Tensor | None, index: int) -> Tensor | None:
    """Return the inputs of one layer, `(T, 1, P)`, from those of all, `(T, layers, P)`; None for None."""
    return None if inputs is None else inputs[:, index : index + 1]

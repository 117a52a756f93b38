"""A text encoder's embeddings, norm and pooler, and the tokens of a call, to run the encoder as a whole.

Shapes: T packed tokens, N sequences, V rows of a table, E width of the tables, C hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.ops.linear import Weight
from slipstream.ops.step import Packed

__all__ = ["TextFrame", "TextRows"]


@dataclass(frozen=True)
class TextFrame:
    """What surrounds a text encoder's layers.

    The layers' input is `norm(words[id] + types[type] + places[place])`, projected by `project_in`; the
    pooled output is `tanh(pooler x)` for one token of each sequence.

    Attributes:
        words: `(V, E)`, embeddings by token id.
        types: `(V, E)`, embeddings by token type, or None.
        places: `(V, E)`, embeddings by position in the sequence.
        norm_weight: `(E,)` or None.
        norm_bias: `(E,)` or None.
        eps: Epsilon of the layer norm.
        project_in: `(C, E)`, or None if E is C.
        pooler: `(O, C)`, or None.
    """

    words: Tensor
    types: Tensor | None
    places: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    eps: float
    project_in: Weight | None
    pooler: Weight | None


@dataclass(frozen=True)
class TextRows:
    """The tokens of a call.

    Attributes:
        ids: `(T,)` int64.
        types: `(T,)` int64; None if all tokens are of type 0.
        places: `(T,)` int64, positions; None if token t is at position `first + t % period`.
        first: The position of a sequence's first token.
        period: The number of tokens of each sequence, if all have the same number.
        pooled: `(N,)` int64, the token of each sequence that is pooled, -1 for zeros; None for the first one.
        packed: Where the sequences begin and end.
    """

    ids: Tensor
    types: Tensor | None
    places: Tensor | None
    first: int
    period: int
    pooled: Tensor | None
    packed: Packed

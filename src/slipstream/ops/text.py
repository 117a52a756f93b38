"""What stands around the layers of an encoder of text, and the tokens of a call, for those who run it whole.

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
    """`norm(words[id] + types[type] + places[place])`, `project_in`, the layers; `tanh(pooler x)` of some.

    Attributes:
        words: `(V, E)`, by token.
        types: `(V, E)`, by token type, or None.
        places: `(V, E)`, by the place in the sequence.
        norm_weight: `(E,)` or None.
        norm_bias: `(E,)` or None.
        eps: Of that layer norm.
        project_in: `(C, E)`, or None where E is C.
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
        types: `(T,)` int64, or None: all of type 0.
        places: `(T,)` int64; or None: token t is at `first + t % period`.
        first: The place of a sequence's first token.
        period: The tokens of each sequence, where all have as many.
        pooled: `(N,)` int64, the token of each sequence that is pooled, -1 for zeros; None for its first.
        packed: Where the sequences begin and end.
    """

    ids: Tensor
    types: Tensor | None
    places: Tensor | None
    first: int
    period: int
    pooled: Tensor | None
    packed: Packed

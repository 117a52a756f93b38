"""Learns from a layer's own answer how to answer for it.

Shapes: B batch, S sequence, C hidden, H heads, L keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["returns_of"]


def returns_of(output: Any, *, biases: bool = False, own: bool = False) -> Callable[..., Any] | None:
    """Learn from a layer's own answer how to answer for it.

    Attention maps returned unasked become None: a forward that asks for them runs the original code. So does
    a cache that is handed back: it is the one that the model handed in.

    Args:
        output: What the original layer returned to a batch of more than one.
        biases: The layer also returns biases by relative position, for the layers after it.
        own: Whatever tensors it returns are its own attention's to make.

    Returns:
        A function from what `run_block` returns to the same kind of answer, or None where the answer holds
        more than that.
    """
    if isinstance(output, Tensor):
        return lambda hidden: hidden
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        kind, parts = type(output), list(output[1:])
        tensors = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        places = [i for i in tensors if own or biases and _is_bias(parts[i], output[0])]
        gone = [i for i, part in enumerate(parts) if _is_map(part, output[0]) or _is_cache(part)]
        rest = [None if i in (*places, *gone) else part for i, part in enumerate(parts)]
        if not all(part is None or isinstance(part, tuple) and not part for part in rest):
            return None

        def answer(hidden: Tensor, *made: Tensor) -> Any:
            filled = list(rest)
            for place, bias in zip(places, made, strict=False):
                filled[place] = bias
            return kind((hidden, *filled))

        return answer
    return None


def _is_bias(part: Any, hidden: Tensor) -> bool:
    """Whether a part of an answer is a bias upon the scores, `(1, H, S, L)`."""
    shape = part.shape if isinstance(part, Tensor) and part.dim() == 4 else (0, 0, 0)
    return (shape[0], shape[2]) == (1, hidden.shape[1])


def _is_map(part: Any, hidden: Tensor) -> bool:
    """Whether a part of an answer is the attention of `(B, S, C)`, `(B, H, S, L)`."""
    return isinstance(part, Tensor) and part.dim() == 4 and (part.shape[0], part.shape[2]) == hidden.shape[:2]


def _is_cache(part: Any) -> bool:
    """Whether a part of an answer is a transformers cache."""
    return hasattr(part, "get_seq_length") and hasattr(part, "update")

"""Derives the form of a layer's return value from an output of the original layer.

Shapes: B batch, S sequence, C hidden, H heads, L keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["returns_of"]


def returns_of(output: Any, *, biases: bool = False, own: bool = False) -> Callable[..., Any] | None:
    """Derive the form of a layer's return value from an output of the original layer.

    Attention maps that are returned without a request become None: a forward that requests them runs the
    original code. A returned cache becomes None too: it is the one that the model passed in.

    Args:
        output: Output of the original layer for a batch of more than one.
        biases: The layer also returns relative position biases, for the layers after it.
        own: All further tensors that it returns are made by the family's own attention or course.

    Returns:
        A function from the results of `run_block` to a return value of the same form, or None where the
        output contains anything else.
    """
    if isinstance(output, Tensor):
        return lambda hidden: hidden
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        kind, parts = type(output), list(output[1:])
        tensors = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        places = [i for i in tensors if own or biases and _is_bias(parts[i], output[0])]
        dropped = [i for i, part in enumerate(parts) if _is_map(part, output[0]) or _is_cache(part)]
        rest = [None if i in (*places, *dropped) else part for i, part in enumerate(parts)]
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
    """Whether a part of an output is a bias of the scores, `(1, H, S, L)`."""
    shape = part.shape if isinstance(part, Tensor) and part.dim() == 4 else (0, 0, 0)
    return (shape[0], shape[2]) == (1, hidden.shape[1])


def _is_map(part: Any, hidden: Tensor) -> bool:
    """Whether a part of an output is an attention map `(B, H, S, L)` of hidden states `(B, S, C)`."""
    return isinstance(part, Tensor) and part.dim() == 4 and (part.shape[0], part.shape[2]) == hidden.shape[:2]


def _is_cache(part: Any) -> bool:
    """Whether a part of an output is a transformers cache."""
    return hasattr(part, "get_seq_length") and hasattr(part, "update")

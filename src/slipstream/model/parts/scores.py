"""Deferred scores: a product `q k^T` that records scale, masks and softmax until values are multiplied.

Code that writes attention out makes a tensor of `S x L` numbers per head and reads it four times or more. If
it gets `Scores` instead, its operations on them are recorded, and the product with the values becomes one
call of the attention op. Any other operation on them gets the tensor that the original would have made,
computed by the original's own calls, so nothing is assumed about the code.

Shapes: B batch, H heads, K kv heads, S queries, L keys, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Pending", "Scores", "letters_of", "real", "visible_of"]

_LOWEST = -1e4
"""Filling a score with this or less masks it: exp(-1e4) is 0 in every dtype."""

_HIDES_ROWS = -6e4
"""A query whose largest bias is above this sees some key; masks add float16's lowest number, or less."""


@dataclass
class Pending:
    """The recorded state of scores, shared by all tensors that would share their memory.

    Attributes:
        q: `(B, H, S, D)`.
        k: `(B, K, L, D)`.
        product: Computes the product as the original does.
        attend: Returns the softmax times values, `(B, H, S, D)`; or None where it does not support that.
        dtype: Current dtype of the scores.
        scale: Factor of the product.
        bias: Added after scaling, `(B | 1, H | 1, S | 1, L | 1)`; or None.
        hidden: True where a score was masked, of a shape like `bias`; or None.
        weights: Whether the softmax was taken.
        trail: The original's operations after the product, in order.
        made: The tensor, once it was needed.
    """

    q: Tensor
    k: Tensor
    product: Callable[[], Tensor]
    attend: Callable[[Pending, Tensor], Tensor | None]
    dtype: torch.dtype
    scale: float = 1.0
    bias: Tensor | None = None
    hidden: Tensor | None = None
    weights: bool = False
    trail: tuple[Callable[[Tensor], Tensor], ...] = field(default=())
    made: Tensor | None = None

    def real(self) -> Tensor:
        """Return the tensor that the original would have, in the shape of its product."""
        if self.made is None:
            made = self.product()
            for step in self.trail:
                made = step(made)
            self.made = made
        return self.made

    def wide(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """View a tensor that broadcasts over scores of a shape in four dims; None if that is impossible."""
        full = (self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])
        if tensor.dim() > len(shape):
            return None
        tensor = tensor.view(*(1,) * (len(shape) - tensor.dim()), *tensor.shape)
        if any(n not in (1, m) for n, m in zip(tensor.shape, shape, strict=True)):
            return None
        if len(shape) == 4:
            return tensor
        return tensor.unsqueeze(0) if tensor.shape[0] == 1 else tensor.unflatten(0, full[:2])


class Scores(Tensor):
    """A meta tensor that stands for scores or their softmax; `pending` has the recorded state."""

    pending: Pending

    @staticmethod
    def of(pending: Pending, shape: Sequence[int]) -> Scores:
        """Make scores with the shape of the product, or a view of it."""
        blank = torch.empty(tuple(shape), dtype=pending.dtype, device="meta")
        made: Scores = torch.Tensor._make_subclass(Scores, blank)
        made.pending = pending
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record known operations; run any other on the tensor that the original would have."""
        kwargs = kwargs or {}
        if func in _SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        follow = _FOLLOWED.get(func)
        if follow is not None:
            noted = follow(*args, **kwargs)
            if noted is not None:
                return noted
        return func(*(real(arg) for arg in args), **{name: real(value) for name, value in kwargs.items()})


def real(value: Any) -> Any:
    """Return a nest of values with all scores replaced by the tensors that they stand for."""
    if isinstance(value, Scores):
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(value.shape)
        made = value.pending.real()
        return made if tuple(made.shape) == shape else made.view(shape)
    if type(value) in (tuple, list):
        return type(value)(real(one) for one in value)
    if type(value) is dict:
        return {key: real(one) for key, one in value.items()}
    return value


def visible_of(pending: Pending) -> tuple[Tensor | None, bool] | None:
    """Return the op's mask for scores, and whether they are causal; None if a query may attend to no key.

    For such a query some implementations average all values, and others return NaN.
    """
    hidden, bias = pending.hidden, pending.bias
    queries, keys = pending.q.shape[2], pending.k.shape[2]
    if bias is not None:
        mask = bias.float().masked_fill(hidden, -math.inf) if hidden is not None else bias
        if not bool((mask.amax(-1) > _HIDES_ROWS).all()):
            return None
        return _to_keys(mask, keys), False
    if hidden is None:
        return None, False
    if hidden.shape[:2] == (1, 1) and tuple(hidden.shape[2:]) == (queries, keys) and queries == keys:
        later = torch.ones(queries, keys, dtype=torch.bool, device=hidden.device).triu(1)
        if torch.equal(hidden[0, 0], later):
            return None, True
    if bool(hidden.all(-1).any()):
        return None
    return _to_keys(hidden.logical_not(), keys), False


def _to_keys(mask: Tensor, keys: int) -> Tensor:
    return mask if mask.shape[3] == keys else mask.expand(*mask.shape[:3], keys)


def _number(value: Any) -> float | None:
    """The value of a number or of a tensor without dims; else None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and not isinstance(value, Scores) and value.dim() == 0:
        return None if value.requires_grad or value.device.type == "meta" else float(value)
    return None


def _shape(scores: Scores) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(scores.shape)


def _next(scores: Scores, step: Callable[[Tensor], Tensor], **changes: Any) -> Scores | None:
    """Return the scores after a recorded step; None where the tensor was computed already."""
    pending, shape = scores.pending, _shape(scores)
    if pending.made is not None:
        return None

    def done(tensor: Tensor) -> Tensor:
        return step(tensor if tuple(tensor.shape) == shape else tensor.view(shape))

    return Scores.of(replace(pending, trail=(*pending.trail, done), **changes), shape)


def _times(func: Any, over: bool, scores: Any, other: Any, **options: Any) -> Scores | None:
    if not isinstance(scores, Scores):
        scores, other = other, scores
        if over:
            return None
    number, pending = _number(other), scores.pending
    open_to = pending.bias is None and pending.hidden is None and not pending.weights
    if number is None or options or not open_to or (over and number == 0):
        return None
    factor = 1 / number if over else number
    return _next(scores, lambda t: func(t, other), scale=pending.scale * factor)


def _plus(func: Any, sign: int, scores: Any, other: Any, **options: Any) -> Scores | None:
    if not isinstance(scores, Scores):
        scores, other = other, scores
        if sign < 0:
            return None
    pending = scores.pending
    if options or pending.weights or not isinstance(other, Tensor) or isinstance(other, Scores):
        return None
    if not other.is_floating_point() or other.device != pending.q.device or _needs_gradient(other):
        return None
    added = pending.wide(other, _shape(scores))
    if added is None:
        return None
    added = added if sign > 0 else -added
    bias = added if pending.bias is None else pending.bias + added
    dtype = torch.promote_types(other.dtype, pending.dtype) if other.dim() else pending.dtype
    return _next(scores, lambda t: func(t, other), bias=bias, dtype=dtype)


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _hide(scores: Scores, where: Any, value: Any, step: Callable[[Tensor], Tensor]) -> Scores | None:
    pending, number = scores.pending, _number(value)
    if pending.weights or number is None or not number <= _LOWEST:
        return None
    if not isinstance(where, Tensor) or where.dtype != torch.bool or where.device != pending.q.device:
        return None
    hidden = pending.wide(where, _shape(scores))
    if hidden is None:
        return None
    return _next(scores, step, hidden=hidden if pending.hidden is None else hidden | pending.hidden)


def _masked_fill(scores: Any, mask: Any, value: Any) -> Scores | None:
    if not isinstance(scores, Scores):
        return None
    return _hide(scores, mask, value, lambda t: t.masked_fill(mask, value))


def _where(condition: Any, scores: Any = None, other: Any = None) -> Scores | None:
    if not isinstance(condition, Tensor) or isinstance(condition, Scores) or condition.dtype != torch.bool:
        return None
    if isinstance(scores, Scores) and not isinstance(other, Scores):
        return _hide(scores, ~condition, other, lambda t: torch.where(condition, t, other))
    if isinstance(other, Scores) and not isinstance(scores, Scores):
        return _hide(other, condition, scores, lambda t: torch.where(condition, scores, t))
    return None


def _softmax(
    scores: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Scores | None:
    if not isinstance(scores, Scores) or scores.pending.weights or dim not in (-1, len(_shape(scores)) - 1):
        return None
    kind = dtype or scores.pending.dtype
    return _next(scores, lambda t: F.softmax(t, dim=-1, dtype=dtype), weights=True, dtype=kind)


def _softmax_of_torch(scores: Any, dim: Any = None, dtype: torch.dtype | None = None) -> Scores | None:
    return _softmax(scores, dim, 3, dtype)


def _dropout(scores: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return scores if not training or p == 0 else None


def _cast(scores: Any, *args: Any, **options: Any) -> Scores | None:
    if not isinstance(scores, Scores) or options or len(args) != 1:
        return None
    kind = args[0]
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        return None
    return scores if kind == scores.pending.dtype else _next(scores, lambda t: t.to(kind), dtype=kind)


def _type_as(scores: Any, other: Any) -> Scores | None:
    return _cast(scores, other.dtype) if isinstance(other, Tensor) else None


def _same(scores: Any, **options: Any) -> Any:
    return None if options or scores.pending.made is not None else scores


def _device(scores: Scores) -> torch.device:
    return scores.pending.q.device


def _view(scores: Any, *sizes: Any) -> Scores | None:
    """Views that split heads from the batch or merge them with it; all views share the recorded state."""
    if not isinstance(scores, Scores):
        return None
    pending, shape = scores.pending, _shape(scores)
    wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size) else sizes
    if pending.made is not None or not all(isinstance(size, int) for size in wanted):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        wanted = tuple(torch.empty(shape, dtype=torch.float32, device="meta").view(*wanted).shape)
    batch, heads = pending.q.shape[:2]
    if wanted == shape or wanted in ((batch, heads, *shape[-2:]), (batch * heads, *shape[-2:])):
        return Scores.of(pending, wanted)
    plain = pending.bias is None and pending.hidden is None
    if batch != 1 or len(wanted) != 4 or wanted[2:] != shape[-2:] or not plain or pending.k.shape[1] != heads:
        return None
    # Earlier views stay valid: they have the heads merged with the batch.
    pending.q, pending.k = (t[0].unflatten(0, wanted[:2]) for t in (pending.q, pending.k))
    return Scores.of(pending, wanted)


def _multiply(scores: Any, values: Any) -> Tensor | None:
    return _attend(scores, values) if isinstance(scores, Scores) else None


def _attend(scores: Scores, values: Any) -> Tensor | None:
    """Multiply the softmax with values by `Pending.attend`; None where that is not supported."""
    if not isinstance(values, Tensor) or isinstance(values, Scores):
        return None
    pending, shape = scores.pending, _shape(scores)
    if pending.made is not None or not pending.weights or values.dim() != len(shape):
        return None
    batch, heads, queries, dim = pending.q.shape
    if values.shape[:-2] != shape[:-2] or values.shape[-2] != shape[-1] or values.dtype != pending.dtype:
        return None
    v = values if values.dim() == 4 else values.unflatten(0, (batch, heads))
    out = pending.attend(pending, v)
    return None if out is None else out.contiguous().view(*shape[:-2], queries, dim)


def _einsum(equation: Any, *operands: Any) -> Tensor | None:
    """`weights v` as an einsum: `...sl, ...ld -> ...sd`, with the dims of values and output in any order."""
    letters = letters_of(equation)
    if letters is None or len(operands) != 2 or not isinstance(operands[0], Scores):
        return None
    (weights, values), out = letters
    scores, given = operands
    if not isinstance(given, Tensor) or isinstance(given, Scores) or given.dim() != len(values):
        return None
    if len(weights) != 4 or len(_shape(scores)) != 4:
        return None
    b, h, s, key = tuple(weights)
    d = next((letter for letter in values if letter not in weights), "")
    if sorted(values) != sorted((b, h, key, d)) or sorted(out) != sorted((b, h, s, d)) or not d:
        return None
    made = _attend(scores, given.permute(*(values.index(letter) for letter in (b, h, key, d))))
    return None if made is None else made.permute(*((b, h, s, d).index(letter) for letter in out))


def letters_of(equation: Any) -> tuple[tuple[str, str], str] | None:
    """Return an einsum's letters of two operands and of their product; None for any other form."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, out = equation.replace(" ", "").split("->")
    parts = given.split(",")
    if len(parts) != 2 or any(len(set(part)) != len(part) for part in (*parts, out)):
        return None
    return (parts[0], parts[1]), out


def _in_place(follow: Callable[..., Scores | None]) -> Callable[..., Scores | None]:
    """Make the in-place variant of a recorded operation: it updates the state that all views share."""

    def noted(scores: Any, *args: Any, **options: Any) -> Scores | None:
        if not isinstance(scores, Scores):
            return None
        made = follow(scores, *args, **options)
        if made is None or made.pending.dtype != scores.pending.dtype:
            return None
        vars(scores.pending).update(vars(made.pending))
        return scores

    return noted


_PROPERTIES: Any = Tensor
_SHAPES = frozenset(
    getattr(_PROPERTIES, name).__get__ for name in ("shape", "ndim", "dtype", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel}

_MUL, _DIV, _ADD, _SUB = (
    functools.partial(_times, torch.mul, False),
    functools.partial(_times, torch.div, True),
    functools.partial(_plus, torch.add, 1),
    functools.partial(_plus, torch.sub, -1),
)

_FOLLOWED: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _MUL),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide), _DIV),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _ADD),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _SUB),
    **dict.fromkeys((Tensor.mul_, Tensor.__imul__), _in_place(_MUL)),
    **dict.fromkeys((Tensor.div_, Tensor.__itruediv__), _in_place(_DIV)),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), _in_place(_ADD)),
    **dict.fromkeys((Tensor.masked_fill, torch.masked_fill), _masked_fill),
    Tensor.masked_fill_: _in_place(_masked_fill),
    **dict.fromkeys((torch.where,), _where),
    F.softmax: _softmax,
    **dict.fromkeys((torch.softmax, Tensor.softmax), _softmax_of_torch),
    F.dropout: _dropout,
    **dict.fromkeys((Tensor.to, Tensor.type), _cast),
    Tensor.float: lambda scores: _cast(scores, torch.float32),
    Tensor.type_as: _type_as,
    Tensor.contiguous: _same,
    _PROPERTIES.device.__get__: _device,
    **dict.fromkeys((Tensor.view, Tensor.reshape), _view),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _multiply),
    torch.functional.einsum: _einsum,
}

"""Runs the bound op for attention within a module's forward, whether by torch's function or written out.

A torch function mode intercepts every function call of a forward. `scaled_dot_product_attention` runs the op;
a product of queries and keys becomes `Scores`, which are deferred until they are multiplied with the values.
The first call of each sort is computed both ways on the same tensors: if the two disagree, the module runs
its own code from then on.

Shapes: B batch, H heads, K kv heads, S queries, L keys, D head dim.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream.model.parts.scores import Pending, Scores, letters_of, real, visible_of
from slipstream.model.selfcheck.proof import disagreement
from slipstream.model.subclass import namesake
from slipstream.model.values import wants_operations
from slipstream.ops.attention import scores_to_output

__all__ = ["Attending", "Attends", "is_attending", "let_attend"]

_STATE = "_slipstream_attends"

_WORK = {
    torch.float32: (2**24, 2**25, 2**22),
    torch.bfloat16: (2**24, 2**26, 2**20),
    torch.float16: (2**24, 2**26, 2**20),
}
"""Minimum `B * H * S * L * D` at which the op beats torch's attention, written-out attention, and either of
them for one query. By itself the op takes 0.1 to 0.5 of their time at a tenth of these sizes. But while
torch's threads still spin after a product of theirs, the op's threads wait: 0.25 ms on two cores, which the
op has to save first."""

_ENTRIES = {torch.float32: (2**16, 2**13), torch.bfloat16: (2**16, 2**12), torch.float16: (2**16, 2**12)}
"""Minimum number of elements in a module's input, for several tokens and for one, at which its function calls
are intercepted; that costs 1 us per call."""

_MOST_PROVED = 2**26
"""Maximum number of scores for computing a call both ways, since that writes them out in float32."""

_RIGHT = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
"""Maximum error of the original compared with float32, relative to the output's size, for the op to count as
computing the same thing."""


@dataclass
class Attends:
    """The op that a module's attention runs, and the state of its proof.

    Attributes:
        run: An implementation of `ops.attention`.
        always: Use the op for calls of any size, as during the proof.
        proved: Sorts of calls that were computed both ways and agreed.
        refused: Why the module runs its own code after all; empty as long as it does not.
        served: Number of calls that the op computed.
    """

    run: Callable[..., Tensor]
    always: bool = False
    proved: set[tuple[Any, ...]] = field(default_factory=set)
    refused: str = ""
    served: int = 0

    def is_worth(self, q: Tensor, keys: int, *, written_out: bool) -> bool:
        """Whether a call is large enough for the op."""
        if q.dtype not in _WORK:
            return False
        least = _WORK[q.dtype][2 if q.shape[2] == 1 else written_out]
        return self.always or q.numel() * keys >= least


class Attending(TorchFunctionMode):
    """Mode in which attention of this thread runs the op."""

    def __init__(self, attends: Attends) -> None:
        super().__init__()
        self.attends = attends
        self._waiting: list[weakref.ref[Scores]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run attention by the op; pass on all other functions unchanged."""
        read = _PRODUCTS.get(func)
        if read is not None and not kwargs:
            found = read(*args)
            if found is not None:
                waiting = self._wait(functools.partial(func, *args), *found)
                if waiting is not None:
                    return waiting
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out = self._serve(dict(zip(_ARGUMENTS, args, strict=False)) | kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)

    def settle(self) -> None:
        """Compute the tensors of all scores that are still referenced; call it when the forward is over."""
        for held in self._waiting:
            scores = held()
            if scores is not None:
                real(scores)

    def noted(self, pending: Pending | None) -> None:
        """Count a call that the op computed; `pending` is None for a call of torch's own attention."""
        self.attends.served += 1

    def _wait(self, product: Callable[[], Tensor], q: Tensor, k: Tensor, shape: Sequence[int]) -> Any:
        if q.dtype != k.dtype or q.device.type != "cpu" or k.device != q.device:
            return None
        if not self.attends.is_worth(q, k.shape[2], written_out=True) or not k.numel() or _learns(q, k):
            return None
        scores = Scores.of(Pending(q, k, product, self._attend, q.dtype), shape)
        self._waiting.append(weakref.ref(scores))
        return scores

    def _attend(self, pending: Pending, v: Tensor) -> Tensor | None:
        """Return `softmax(scores) v`, or None where the op does not support it."""
        attends, q, k = self.attends, pending.q, pending.k
        if attends.refused or v.shape != k.shape or v.dtype != q.dtype or _learns(v):
            return None
        seen = visible_of(pending)
        if seen is None:
            return None
        mask, causal = seen
        given = {"mask": mask, "causal": causal, "scale": pending.scale}
        sort = (q.dtype, len(pending.trail), pending.dtype, _sort_of(mask), causal, q.shape[1] == k.shape[1])
        own = None if sort in attends.proved else functools.partial(_written_out, pending, v)
        out = self._prove(sort, q, k, v, given, own)
        if out is not None:
            self.noted(pending)
        return out

    def _serve(self, given: Mapping[str, Any]) -> Tensor | None:
        """Compute a call of torch's own attention; None where the op would not give torch's result."""
        attends = self.attends
        taken = _taken(given)
        if attends.refused or taken is None:
            return None
        q, k, v, mask = taken
        if not attends.is_worth(q, k.shape[2], written_out=False) or _learns(q, k, v):
            return None
        blind = None
        if mask is not None:
            sees = mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) > torch.finfo(mask.dtype).min
            if not bool(sees.all()):
                if mask.dtype != torch.bool:
                    return None
                blind = ~sees[..., None]
        scale, causal = given.get("scale"), bool(given.get("is_causal", False))
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        sort = ("torch", q.dtype, _sort_of(mask), blind is None, causal, q.shape[1] == k.shape[1])
        own = functools.partial(F.scaled_dot_product_attention, q, k, v, mask, 0.0, causal)
        own = functools.partial(own, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        options = {"mask": mask, "causal": causal, "scale": scale}
        proved = sort in attends.proved
        out = self._prove(sort, q, k, v, options, None if proved else own, blind)
        if out is None:
            return None
        self.noted(None)
        laid = torch.empty_like(q)  # torch's result has these strides, and later views rely on them
        out = out if laid.stride() == out.stride() else laid.copy_(out)
        return out if given["query"].dim() == 4 else out[0]

    def _prove(
        self,
        sort: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        given: Mapping[str, Any],
        own: Callable[[], Tensor] | None,
        blind: Tensor | None = None,
    ) -> Tensor | None:
        """Return the op's output `(B, H, S, D)`, compared with that of `own` if given.

        None if the two disagree, or if the call is too large to be computed both ways.
        """
        if own is not None and q.numel() // q.shape[3] * k.shape[2] > _MOST_PROVED:
            return None
        out = self.attends.run(q, k, v, **given).transpose(1, 2)
        if blind is not None:
            out = out.masked_fill(blind, 0)  # torch's result for queries that attend to no key
        if own is None:
            return out
        theirs = own()
        if not _agree(theirs, out, functools.partial(_exactly, q, k, v, given, blind)):
            self.attends.refused = "the result of the op differs"
            return None
        self.attends.proved.add(sort)
        return out


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _taken(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """q, k, v and mask in four dimensions; None where the op would not compute the same as torch."""
    given = {"is_causal": False, **given}
    q, k, v, mask = (cast(Any, given.get(name)) for name in _ARGUMENTS[:4])
    if not (_is_plain(q) and _is_plain(k) and _is_plain(v)) or given.get("dropout_p", 0.0):
        return None
    if q.dim() == k.dim() == v.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return None
    if q.device.type != "cpu" or k.shape != v.shape or q.shape[0] != k.shape[0] or not k.numel():
        return None
    if q.shape[-1] != k.shape[-1] or (given["is_causal"] and q.shape[2] != k.shape[2]):
        return None
    if q.shape[1] != k.shape[1] and (not given.get("enable_gqa", False) or q.shape[1] % k.shape[1]):
        return None
    if mask is None:
        return q, k, v, None
    full = (*q.shape[:3], k.shape[2])
    if not _is_plain(mask) or not 2 <= mask.dim() <= 4 or mask.device != q.device or _learns(mask):
        return None
    mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape)
    fits = all(n in (1, m) for n, m in zip(mask.shape, full, strict=True))
    kinds = (torch.bool, q.dtype)
    if not fits or mask.dtype not in kinds or given["is_causal"]:
        return None
    return q, k, v, mask.expand(*mask.shape[:3], full[3])


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _sort_of(mask: Tensor | None) -> tuple[Any, ...] | None:
    return None if mask is None else (mask.dtype, *(n == 1 for n in mask.shape))


def _product(q: Any, k: Any) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
    """Read `(..., S, D) @ (..., D, L)` as queries, keys and the product's shape; None if it cannot be."""
    if not (_is_plain(q) and _is_plain(k)) or not 3 <= q.dim() == k.dim() <= 4 or q.shape[-1] != k.shape[-2]:
        return None
    shape: tuple[int, ...] = (*q.shape[:-1], k.shape[-1])
    k = k.transpose(-1, -2)
    if q.dim() == 3:
        q, k = q[None], k[None]
    shared = k.shape[:2] == q.shape[:2] or (k.shape[0] == q.shape[0] and k.shape[1] == 1)
    return (q, k, shape) if shared else None


def _by_letters(equation: Any, *operands: Any) -> tuple[Tensor, Tensor, tuple[int, ...]] | None:
    """As `_product`, for an einsum `...sd, ...ld -> ...sl` with the dims of queries and keys in any order."""
    letters = letters_of(equation)
    if letters is None or len(operands) != 2 or not all(_is_plain(t) for t in operands):
        return None
    (first, second), out = letters
    if [len(first), len(second), len(out)] != [4, 4, 4] or [t.dim() for t in operands] != [4, 4]:
        return None
    b, h, s, key = tuple(out)
    d = next((letter for letter in first if letter not in out), "")
    if not d or sorted(first) != sorted((b, h, s, d)) or sorted(second) != sorted((b, h, key, d)):
        return None
    q = operands[0].permute(*(first.index(letter) for letter in (b, h, s, d)))
    k = operands[1].permute(*(second.index(letter) for letter in (b, h, key, d)))
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return None
    return q, k, (*q.shape[:3], k.shape[2])


_PRODUCTS: Mapping[Any, Callable[..., tuple[Tensor, Tensor, tuple[int, ...]] | None]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _product),
    torch.functional.einsum: _by_letters,
}


def _written_out(pending: Pending, v: Tensor) -> Tensor:
    """Compute the original's result by its own calls."""
    weights = pending.real()
    return weights.reshape(*pending.q.shape[:3], pending.k.shape[2]) @ v


def _exactly(q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], blind: Tensor | None) -> Tensor:
    """Compute attention in float32, with the scores written out."""
    mask = given["mask"]
    if given["causal"]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    wide = (t.float() for t in (q, k, v))
    out = scores_to_output(*wide, mask=mask, scale=given["scale"], softcap=None, sinks=None).transpose(1, 2)
    return out if blind is None else out.masked_fill(blind, 0)


def _agree(theirs: Tensor, ours: Tensor, exact: Callable[[], Tensor]) -> bool:
    """Whether two outputs differ by rounding alone, or the op's is about as near to float32."""
    if disagreement(theirs, ours) is not None:
        return True
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    truth = exact()
    size = float(truth.square().mean().sqrt())
    error, ours_off = (float((t.float() - truth).square().mean().sqrt()) for t in (theirs, ours))
    return error <= _RIGHT[ours.dtype] * size and ours_off <= max(1.5 * error, 1e-5 * size)  # False for NaN


def let_attend(module: nn.Module, attends: Attends) -> None:
    """Make the attention within a module's forward run the op; the module's class becomes a subclass."""
    module.__dict__[_STATE] = attends
    module.__class__ = _attending_class(type(module))  # type: ignore[arg-type]


def is_attending(module: nn.Module) -> bool:
    """Whether the attention within a module's forward runs a bound op."""
    return _STATE in module.__dict__


@functools.cache
def _attending_class(original: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attends: Attends = self.__dict__[_STATE]
        if self.training or attends.refused or not _is_worth_it(attends, args, kwargs):
            return original.forward(self, *args, **kwargs)
        mode = Attending(attends)
        with mode:
            out = original.forward(self, *args, **kwargs)
        mode.settle()
        return real(out)

    functools.update_wrapper(forward, original.forward)  # some read its signature
    return namesake(original, {"forward": forward})


def _is_worth_it(attends: Attends, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is large enough to gain, and is not traced, compiled or under autocast."""
    x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    if x is None or x.device.type != "cpu" or x.dtype not in _ENTRIES:
        return False
    if not attends.always and x.numel() < _ENTRIES[x.dtype][x.dim() == 3 and x.shape[1] == 1]:
        return False
    if torch.compiler.is_compiling() or wants_operations():
        return False
    return not torch.is_autocast_enabled("cpu")

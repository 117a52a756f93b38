"""The self-check: compares each kind of fused layer, as it will run, with the layer that it replaces.

A kind is a layer class with a spec. The model is run on a few random tokens until every kind was called once;
the calls are recorded as transformers makes them (masks, positions, biases, cache), but with random hidden
states, and the forward is cut short. Each recorded call is then replayed on a copy of the layer in the
engine's dtype, original and fused; where the model already has that dtype, its recorded output is used.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import InjectionError
from slipstream.model.layers import Found
from slipstream.model.selfcheck.probe import BATCH, LENGTH, PADDING, runs_of
from slipstream.model.selfcheck.untouched import left_as_it_was
from slipstream.parallel.shard import Share

__all__ = [
    "MODEL_ERRORS",
    "MOST_TOKENS",
    "MOST_TOKENS_APART",
    "TOLERANCE",
    "RecordedCall",
    "bring",
    "call_alone",
    "compare",
    "real_rows",
    "record_calls",
    "run_part",
    "wider",
]

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
    torch.float64: 1e-8,
}
"""Bound on every element's error, relative to the root mean square of the original's output or, if larger, to
the element itself. One layer rounds several times, by 2^-24, 2^-11 and 2^-8 per operation in float32, float16
and bfloat16; a wrong formula is off by the size of its result."""

MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's own code may raise when it runs on unsuitable input."""

_STEPS, MOST_TOKENS, MOST_TOKENS_APART = 5e-2, 3e-3, 1e-1
"""Where rows are rounded to 8 bits: lower bounds of the tolerance for each token, and for the median token.
Two correct implementations differ in the last bit of a number, which may then be rounded one step apart:
1/127 of a row's largest element. This affects few tokens, some in more than one product: 0.033 was seen. Rows
that are rounded in another way affect all tokens: by 2e-2. Ranks round their parts apart: 0.06 was seen."""

_ROUNDS_AS_WELL = 1.5
"""Maximum error in lower precision, as a multiple of the original's error in that precision; Slipstream as a
whole promises this bound."""


@dataclass(frozen=True)
class RecordedCall:
    """A call of a layer as transformers made it, with the cache as it was before the call.

    Attributes:
        args: Positional arguments; hidden states, here or in `kwargs`, are standard normal numbers.
        kwargs: Keyword arguments.
        output: The result of the layer's forward, before hooks on the layer.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class _EnoughError(Exception):
    """Cuts a forward short once every kind of layer was called."""


def record_calls(
    root: nn.Module, layers: Sequence[Found], runs: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, list[RecordedCall]]:
    """Run the model on random input and record how it calls some of its layers.

    Args:
        root: The model that owns the layers.
        layers: One layer per kind, in the order of the model.
        runs: Keyword arguments of each run; None uses `runs_of`.

    Returns:
        Calls by layer name, one for each run; empty if there are no runs. The model may raise `MODEL_ERRORS`.
    """
    runs = runs_of(root, layers) if runs is None else runs
    if not runs:
        return {}
    calls: dict[str, list[RecordedCall]] = {found.name: [] for found in layers}
    pending: set[str] = set()
    handles = [hook for found in layers for hook in _recording_hooks(found, calls, pending)]
    try:
        with left_as_it_was(root):
            for inputs in runs:
                _run(root, pending, calls, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _run(root: nn.Module, pending: set[str], calls: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Run a model until every layer of `calls` was called."""
    pending.clear()
    pending |= set(calls)
    try:
        with torch.no_grad():
            root(**inputs)
    except _EnoughError:
        pass


def call_alone(found: Found, width: int) -> list[RecordedCall]:
    """Call a layer by itself on random hidden states, if its forward needs nothing else.

    Args:
        found: The layer.
        width: Width of its hidden states.

    Returns:
        The call; empty if the layer cannot be called like this.
    """
    parameters = inspect.signature(found.layer.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variable]
    if len(needed) != 1 or needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return []
    like = next(found.layer.parameters())
    hidden = torch.randn(
        BATCH, LENGTH, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    hidden = hidden.to(like.device, like.dtype)
    try:
        with torch.no_grad():
            return [RecordedCall((hidden,), {}, found.layer.forward(hidden))]
    except MODEL_ERRORS:
        return []


def _recording_hooks(found: Found, calls: dict[str, list[RecordedCall]], pending: set[str]) -> list[Any]:
    """Register hooks that record a call inside the layer's own hooks, as those run around the block too."""
    before: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if found.name not in pending:
            return None
        args, kwargs = _with_random_states(args, kwargs, seed=len(calls[found.name]))
        before.append(copy.deepcopy((args, kwargs)))
        return args, kwargs

    def answer(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if found.name in pending:
            # A later hook may change the output in place.
            calls[found.name].append(RecordedCall(*before.pop(), copy.deepcopy(output)))
            pending.discard(found.name)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not pending:
            raise _EnoughError

    return [
        found.layer.register_forward_pre_hook(enter, with_kwargs=True),
        found.layer.register_forward_hook(answer, with_kwargs=True, prepend=True),
        found.layer.register_forward_hook(leave, with_kwargs=True),
    ]


def _with_random_states(args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int) -> Any:
    """Replace the hidden states by random ones, as embeddings may be too small to show an error."""
    name = "hidden_states" if "hidden_states" in kwargs else "hidden_state"
    given = args[0] if args else kwargs[name]
    hidden = torch.randn(
        given.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
    ).to(given)
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {name: hidden})


def run_part(run: Callable[..., Any], share: Share | None, *args: Any, **kwargs: Any) -> Any:
    """Run a rank's part of a fused layer on a call of the whole layer, after cutting the cache in place.

    A layer's own mixer is whole on every rank, and so is its state.
    """
    if share is not None and share.whole.mixer is None:
        for value in (*args, *kwargs.values()):
            pair = (getattr(value, f"{kind}_attention_cache", None) for kind in ("self", "cross"))
            for cache in (value, *pair):
                _cut_cache(cache, share)
    return run(*args, **kwargs)


def _cut_cache(cache: Any, share: Share) -> None:
    heads = share.heads if share.whole.cache_repeated else share.kv_heads
    for layer in getattr(cache, "layers", ()):
        for part in ("keys", "values"):
            tensor = getattr(layer, part, None)
            if isinstance(tensor, Tensor) and tensor.dim() == 4:
                setattr(layer, part, tensor[:, heads.start : heads.stop])


def replay(call: RecordedCall, run: Callable[..., Any], *, like: Tensor) -> Tensor:
    """Repeat a call on a fresh copy of its cache.

    Args:
        call: The recorded call.
        run: The layer's forward, original or fused.
        like: Has the dtype and the device that arguments are converted to; masks are clamped to the dtype's
            range.

    Returns:
        The hidden states that `run` returned, in float32.
    """
    args, kwargs = bring(copy.deepcopy((call.args, call.kwargs)), like)
    with torch.no_grad():
        return _states(run(*args, **kwargs))


def _states(output: Any) -> Tensor:
    states: Tensor = output[0] if isinstance(output, tuple | list) else output
    return states if states.dtype == torch.float64 else states.float()


def bring(value: Any, like: Tensor) -> Any:
    """Convert nested arguments to the dtype and device of `like`; caches are changed in place."""
    if isinstance(value, Tensor) and value.is_floating_point():
        lowest = max(torch.finfo(dtype).min for dtype in (value.dtype, like.dtype))
        return value.clamp(min=lowest).to(like)
    if isinstance(value, Tensor):
        return value.to(like.device)
    if isinstance(value, tuple | list):
        return type(value)(bring(v, like) for v in value)
    if isinstance(value, UserDict):
        value.data = bring(value.data, like)
        return value
    if isinstance(value, dict):
        return {key: bring(v, like) for key, v in value.items()}
    for inner in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(value, inner):
            bring(getattr(value, inner), like)
    if isinstance(getattr(value, "linear_cache", None), list):
        value.linear_cache = bring(value.linear_cache, like)
    for layer in getattr(value, "layers", ()):
        for part, tensor in tuple(vars(layer).items()):  # some cache more than keys and values
            if isinstance(tensor, Tensor):
                setattr(layer, part, bring(tensor, like))
        for part in ("conv_states", "recurrent_states"):
            states = getattr(layer, part, None)
            if isinstance(states, dict):
                states.update({key: bring(state, like) for key, state in states.items()})
    return value


def compare(
    name: str,
    calls: Sequence[RecordedCall],
    original: Callable[..., Any] | None,
    fused: Callable[..., Any],
    like: Tensor,
    *,
    ties: float = 0.0,
    most: float | None = None,
    exact: Callable[[], Callable[..., Any]] | None = None,
) -> float:
    """Replay every call on the original and the fused layer, and return the largest absolute error.

    Args:
        name: Name of the layer, for the message.
        calls: The recorded calls.
        original: The original's forward; None uses the recorded outputs instead.
        fused: The fused layer's forward.
        like: Has the engine's dtype and device.
        ties: Share of the tokens that may be off by any amount: those whose experts are decided by rounding.
        most: Where linears round their input rows to 8 bits, the bound of the median token's error.
        exact: Creates the original's forward in a wider dtype, on the same weights. Some layers (squared
            activations) have rounding errors far beyond `TOLERANCE`; this tells whether the original has too.

    Raises:
        InjectionError: An error exceeds `TOLERANCE`, and the original in this dtype is nearer to `exact`; or
            an output is not finite.
    """
    expected, got = _answers(name, calls, original, fused, like)
    size = max(min(float(part.square().mean().sqrt()) for part in expected), 1e-3)
    whole = torch.cat(expected)
    errors = (torch.cat(got) - whole).abs()
    # The rounding error of an element that is far larger than the others is proportional to itself.
    shares = (errors / whole.abs().clamp(min=size)).amax(dim=-1)
    worst = shares.sort().values[len(shares) - 1 - int(ties * len(shares))]
    error, dtype = float(errors[shares <= worst].max()) if worst.isfinite() else math.nan, like.dtype
    if not whole.isfinite().all():
        raise InjectionError(
            f"{name}: on random input of size 1 the original layer returns NaN or infinity in "
            f"{str(dtype).removeprefix('torch.')}; use a wider dtype, or fix the weights and buffers"
        )
    allowed = TOLERANCE[dtype] if most is None else max(TOLERANCE[dtype], _STEPS, most)
    right = bool(shares.isfinite().all()) and float(worst) <= allowed
    if right and most is not None and not (right := float(shares.median()) <= max(TOLERANCE[dtype], most)):
        allowed, error = most, float(shares.median()) * size
    if not right and exact is not None and (truth := _exactly(calls, exact, like)) is not None:
        ours, theirs = (float((torch.cat(part) - truth).square().mean()) for part in (got, expected))
        right = ours <= _ROUNDS_AS_WELL**2 * theirs  # false for NaN
    if not right:
        raise InjectionError(
            f"{name}: the fused block is off by {error:.3g} where the original's outputs are of size "
            f"{size:.3g} (allowed {allowed:g} of that, in {str(dtype).removeprefix('torch.')}); the "
            'layer differs from what its family describes. Use injection_check="fallback" to run its own code'
        )
    return error


def _answers(
    name: str,
    calls: Sequence[RecordedCall],
    original: Callable[..., Any] | None,
    fused: Callable[..., Any],
    like: Tensor,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of original and fused layer for every call, without padded rows."""
    expected, got = [], []
    for call in calls:
        theirs = _states(call.output) if original is None else _original(name, call, original, like)
        try:
            ours = replay(call, fused, like=like)
        except MODEL_ERRORS as failure:
            raise InjectionError(
                f"{name}: the fused block fails where the original layer runs ({type(failure).__name__}: "
                f"{str(failure).partition(chr(10))[0]}); the family's spec does not fit the layer. Use "
                'injection_check="fallback" to run its own code'
            ) from failure
        if ours.shape != theirs.shape:
            raise InjectionError(
                f"{name}: the fused block returns {tuple(ours.shape)}, the original {tuple(theirs.shape)}"
            )
        rows = real_rows(call, theirs)
        expected.append(theirs[rows])
        got.append(ours[rows])
    return expected, got


def _original(name: str, call: RecordedCall, run: Callable[..., Any], like: Tensor) -> Tensor:
    try:
        return replay(call, run, like=like)
    except MODEL_ERRORS as failure:
        raise InjectionError(
            f"{name}: the original layer cannot run in {str(like.dtype).removeprefix('torch.')} "
            f"({type(failure).__name__}: {str(failure).partition(chr(10))[0]}); "
            "use a dtype that it supports"
        ) from failure


def _exactly(
    calls: Sequence[RecordedCall], exact: Callable[[], Callable[..., Any]], like: Tensor
) -> Tensor | None:
    """Run the calls in the wider dtype, on arguments rounded to that of `like`; return the real rows.

    None if the layer's code does not run in that dtype.
    """
    outputs, wide = [], wider(like.dtype)
    try:
        run = exact()
        for call in calls:
            args, kwargs = bring(copy.deepcopy((call.args, call.kwargs)), like)
            states = replay(RecordedCall(args, kwargs, None), run, like=like.to(wide))
            outputs.append(states[real_rows(call, states)])
    except MODEL_ERRORS:
        return None
    return torch.cat(outputs)


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that judges rounding errors in `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def real_rows(call: RecordedCall, output: Tensor) -> Tensor:
    """Return which rows are not padding: in the padded prompt, the first sequence starts with padding."""
    rows = torch.ones(output.shape[:-1], dtype=torch.bool, device=output.device)
    if output.dim() in (3, 4) and output.shape[-2] == LENGTH:
        rows[..., 0, :PADDING] = False
    return rows

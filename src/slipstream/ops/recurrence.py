"""Mixers whose state per sequence has a fixed size: short convolutions, gated delta rules, state spaces.

This is the definition, in plain torch; `kernels/cpu/native/recurrence.h` and `selective.h` compute the same.

Shapes: T packed tokens, N sequences, W width of a projected row, S numbers of a state, K key heads, V value
heads, D key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.branches import Norm, Place, Recurrence
from slipstream.ops.linear import Weight
from slipstream.ops.step import Step

__all__ = ["RecurrentLike", "Vectors", "convolved", "final_state", "inputs_of", "recur"]

_LEAST_LENGTH = 1e-6
"""Added to the squared length of queries and keys before the delta rule normalises them."""


@dataclass(frozen=True)
class Vectors:
    """The tensors of a recurrence besides its projections.

    Attributes:
        kernel: The convolution's weight, `(channels, width)`.
        kernel_bias: `(channels,)`, or None.
        speed: `(V,)`: the logarithm of a head's rate of decay; `(channels, D)` of a selective state space;
            None without a rule.
        shift: `(V,)`: added to the decay's input; None without a rule, or of a selective state space.
        skip: `(V,)`, or `(channels,)`: multiplies the values, which are added to the output; or None.
        norm: Weight of the norm, or None.
        step_norm: Weight of the norm of a selective state space's inputs of steps, or None.
        key_norm: Likewise of its keys.
        query_norm: Likewise of its queries.
    """

    kernel: Tensor
    kernel_bias: Tensor | None = None
    speed: Tensor | None = None
    shift: Tensor | None = None
    skip: Tensor | None = None
    norm: Tensor | None = None
    step_norm: Tensor | None = None
    key_norm: Tensor | None = None
    query_norm: Tensor | None = None


Inner = tuple[Callable[[Tensor], Tensor], ...]
"""The products with the matrices of a selective state space's values and of its steps' inputs."""


class RecurrentLike(Protocol):
    """A mixer with its tensors: `model.frame.recurrent.RecurrentPart`."""

    @property
    def spec(self) -> Recurrence: ...  # noqa: D102
    @property
    def projections(self) -> tuple[Weight, ...]: ...  # noqa: D102
    @property
    def inner(self) -> tuple[Weight, ...]: ...  # noqa: D102
    @property
    def last(self) -> Weight: ...  # noqa: D102
    @property
    def vectors(self) -> Vectors: ...  # noqa: D102
    def refuses(self) -> str | None: ...  # noqa: D102
    def projected(self, x: Tensor, linear: Callable[..., Tensor]) -> Tensor: ...  # noqa: D102
    def __call__(  # noqa: D102
        self, x: Tensor, step: Step, states: Tensor, linear: Callable[..., Tensor]
    ) -> Tensor: ...


def recur(
    rows: Tensor, vectors: Vectors, step: Step, states: Tensor, spec: Recurrence, inner: Inner = ()
) -> Tensor:
    """Compute a mixer's output, before its last projection, of packed tokens, and update the states.

    Args:
        rows: The projected tokens, `(T, W)`.
        vectors: The other tensors.
        step: Where sequences begin, their lengths, and their rows in `states`.
        states: `(rows, S)` float32, updated in place; not read at the start of a sequence.
        spec: The mixer in numbers.
        inner: The products within a selective state space.

    Returns:
        `(T, spec.outputs)` in the dtype of `rows`; computed in float32.
    """
    if step.states is None:
        raise AssertionError("a step of layers with a recurrence has no rows of states")
    out = rows.new_empty(rows.shape[0], spec.outputs)
    starts, lens = step.query_starts.tolist(), step.kv_lens.tolist()
    for n, place in enumerate(step.states.tolist()):
        tokens = slice(starts[n], starts[n + 1])
        state, count = states[place], tokens.stop - tokens.start
        if lens[n] == count:
            state.zero_()
        own = spec if count > 1 or lens[n] == 1 else replace(spec, least_step=0.0)
        if count:
            out[tokens] = _sequence(rows[tokens].float(), vectors, state, own, inner).to(out.dtype)
    return out


def convolved(rows: Tensor, spec: Recurrence) -> Tensor:
    """Return what the convolution reads of projected tokens `(L, W)`: `(L, channels)`."""
    if spec.rule == "none":
        q, v = (rows[:, p.start : p.start + spec.channels] for p in (spec.q, spec.v))
        return q * v
    if spec.rule == "selective":
        return rows[:, spec.v.start : spec.v.start + spec.channels]
    sizes = _sizes(spec)
    return torch.cat([_part(rows, getattr(spec, name), spec, sizes[name]) for name in _order(spec)], dim=1)


def inputs_of(states: Tensor, spec: Recurrence) -> Tensor:
    """Return the inputs of the convolution that states `(N, S)` keep, `(N, channels, width)`.

    The first of each channel has left the convolution's reach, and is zero.
    """
    kept = states[:, : (spec.width - 1) * spec.channels].view(-1, spec.width - 1, spec.channels)
    return torch.nn.functional.pad(kept.mT, (1, 0))


def final_state(states: Tensor, spec: Recurrence) -> Tensor | None:
    """Return what a rule keeps of states `(N, S)`: `(N, V, D, E)` or `(N, D, channels)`; None without one."""
    if spec.rule == "none":
        return None
    kept = states[:, (spec.width - 1) * spec.channels :]
    if spec.rule == "selective":
        return kept.view(-1, spec.key_dim, spec.channels)
    return kept.view(-1, spec.value_heads, spec.key_dim, spec.value_dim)


def _sizes(spec: Recurrence) -> dict[str, int]:
    """Return how many numbers each key head has of what is convolved."""
    each = spec.value_heads // spec.key_heads
    return {"q": spec.key_dim, "k": spec.key_dim, "v": each * spec.value_dim}


def _order(spec: Recurrence) -> list[str]:
    return sorted(_sizes(spec), key=lambda name: int(getattr(spec, name).channel))


def _part(rows: Tensor, place: Place, spec: Recurrence, size: int) -> Tensor:
    """Gather an input of all key heads, `(L, K * size)`."""
    begins = (place.start + head * place.step for head in range(spec.key_heads))
    gathered = torch.cat([rows[:, begin : begin + size] for begin in begins], dim=1)
    return gathered if place.scale == 1.0 else gathered * place.scale


def _sequence(rows: Tensor, vectors: Vectors, state: Tensor, spec: Recurrence, inner: Inner) -> Tensor:
    """Compute the output `(L, outputs)` of some tokens of one sequence, and update its state."""
    older = spec.width - 1
    past = state[: older * spec.channels].view(older, spec.channels)
    mixed = _convolve(convolved(rows, spec), vectors, past)
    if spec.rule == "none":
        return rows[:, spec.gate.start : spec.gate.start + spec.channels] * mixed
    final, mixed = final_state(state[None], spec), F.silu(mixed)
    if final is None:
        raise AssertionError("a rule keeps a state")
    if spec.rule == "selective":
        gate = rows[:, spec.gate.start : spec.gate.start + spec.channels]
        return _selective(mixed, vectors, final[0], spec, inner) * F.silu(gate)
    each, sizes, order = spec.value_heads // spec.key_heads, _sizes(spec), _order(spec)
    widths = [spec.key_heads * sizes[name] for name in order]
    heads = dict(zip(order, mixed.split(widths, dim=1), strict=True))
    q, k = (heads[name].unflatten(1, (spec.key_heads, -1)).repeat_interleave(each, dim=1) for name in "qk")
    v = heads["v"].unflatten(1, (spec.value_heads, -1))
    rate, decay = (_part(rows, place, spec, each) for place in (spec.rate, spec.decay))
    out = _rule(q, k, v, rate, decay, vectors, final[0], spec).flatten(1)
    gate = F.silu(_part(rows, spec.gate, spec, each * spec.value_dim))
    return _normed(out * gate, vectors, spec) if spec.gate_first else _normed(out, vectors, spec) * gate


def _convolve(x: Tensor, vectors: Vectors, past: Tensor) -> Tensor:
    """Convolve `(L, channels)` after the inputs `past`, `(width - 1, channels)`, which are updated."""
    inputs = torch.cat((past, x))
    past.copy_(inputs[len(inputs) - len(past) :])
    bias = None if vectors.kernel_bias is None else vectors.kernel_bias.float()
    kernel = vectors.kernel.float()[:, None]
    return F.conv1d(inputs.mT[None], kernel, bias, groups=len(kernel))[0].mT


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    decay: Tensor,
    vectors: Vectors,
    state: Tensor,
    spec: Recurrence,
) -> Tensor:
    """Take a state `(V, D, E)` through L tokens: q and k `(L, V, D)`, v `(L, V, E)`, others `(L, V)`."""
    if vectors.speed is None or vectors.shift is None:
        raise AssertionError("a recurrence with a rule has a speed and a shift")
    step = F.softplus(decay + vectors.shift.float())
    if spec.rule == "space":
        rate = step = step.clamp(min=spec.least_step)
    else:
        rate = spec.rate_scale * rate.sigmoid()
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _LEAST_LENGTH) for t in (q, k))
        q = q * spec.key_dim**-0.5
    kept = torch.exp(-vectors.speed.float().exp() * step)
    out = torch.empty_like(v)
    for t in range(len(v)):
        state.mul_(kept[t, :, None, None])
        change = v[t]
        if spec.rule == "delta":
            change = change - (state * k[t, :, :, None]).sum(1)
        state.add_(k[t, :, :, None] * (change * rate[t, :, None])[:, None])
        out[t] = (state * q[t, :, :, None]).sum(1)
    return out if vectors.skip is None else out + v * vectors.skip.float()[:, None]


def _selective(v: Tensor, vectors: Vectors, state: Tensor, spec: Recurrence, inner: Inner) -> Tensor:
    """Take a state `(D, channels)` through the values `(L, channels)` of L tokens."""
    if vectors.speed is None:
        raise AssertionError("a selective state space has a speed")
    mixed, steps = inner
    parts = mixed(v).float().split((spec.rank, spec.key_dim, spec.key_dim), dim=1)
    norms = (vectors.step_norm, vectors.key_norm, vectors.query_norm)
    low, k, q = (_inner_normed(*pair, spec.inner_norm) for pair in zip(parts, norms, strict=True))
    step = F.softplus(steps(low).float())
    speed, out = vectors.speed.float().exp().mT, torch.empty_like(v)
    for t in range(len(v)):
        state.mul_(torch.exp(-speed * step[t])).add_(k[t, :, None] * (step[t] * v[t]))
        out[t] = (state * q[t, :, None]).sum(0)
    return out if vectors.skip is None else out + v * vectors.skip.float()


def _inner_normed(x: Tensor, weight: Tensor | None, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return x if weight is None else x * weight.float()


def _normed(x: Tensor, vectors: Vectors, spec: Recurrence) -> Tensor:
    if spec.norm is None:
        return x
    groups = x.unflatten(1, (-1, spec.norm_width))
    normed: Tensor = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + spec.norm.eps)).flatten(1)
    if vectors.norm is None:
        return normed
    return normed * vectors.norm.float().repeat(x.shape[1] // vectors.norm.numel())

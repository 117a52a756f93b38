"""`draw` and `sample` on the CPU: sampling a token without sorting the vocabulary.

torch makes the noise of a vocabulary of 49152 in 1.4 ms on a Zen 3, where a step of a 135-million model in
int4 takes 6 to 7 ms, and transformers' warpers sort all scores twice. The library continues the sequence of
torch's generator, and computes noise only for the few tokens that may have the largest `chance / noise`.

Shapes: as in `ops.draw`; B batch, V vocabulary.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.kernels.cpu import abi_model
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.abi_model import DrawCall
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.ops import draw as op
from slipstream.ops import sample as sample_op
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.draw import Warp
from slipstream.ops.next_step import Following
from slipstream.ops.noise import RowNoise, exponential
from slipstream.ops.penalty import RowPenalty

__all__ = ["KERNELS", "Drawing", "check", "noise_is_torchs", "native_draw"]

_MOST_NOISE = 1 << 22
"""Maximum count of noise values that are made ahead where torch makes the noise."""

_LEAST = 1 << 18
"""Number of scores below which one thread finishes sooner than another one wakes up."""


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child would wait forever for a thread that exists only in its parent
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Held:
    """The state of torch's generator, taken over by the library for the duration of a call.

    Meanwhile the generator itself has another sequence, so that what other threads draw, or callbacks that
    receive a step's tokens, is independent.

    Attributes:
        state: Advanced by the library.
    """

    def __init__(self, first: Callable[[], Tensor]) -> None:
        """Take over the state of the generator, or an earlier one.

        Args:
            first: Returns the state to begin with.
        """
        with _lock:
            start = first()
            seed = int(start.view(torch.int64).sum())  # of the words, and of how many have been used
            self._other = torch.Generator("cpu").manual_seed(seed).get_state()
            torch.set_rng_state(self._other)
        self.state = start.clone()

    def end(self) -> None:
        """Let the generator continue where the library has stopped, unless others have drawn from it."""
        with _lock:
            if torch.equal(torch.get_rng_state(), self._other):
                torch.set_rng_state(self.state)


class Drawing:
    """How a call of several steps chooses tokens: by sampling, or the best ones under a penalty.

    Attributes:
        steps: Maximum number of steps.
        struct: The description for the native call.
    """

    def __init__(
        self, numbers: Tensor, noise: RowNoise | None, steps: int, penalty: RowPenalty | None = None
    ) -> None:
        """Let the library make the noise, or make it ahead, for as many steps as `_MOST_NOISE` allows.

        Args:
            numbers: The sampling parameters, from `ops.draw.Warp.numbers`.
            noise: For the rows of the call; None to take the best tokens.
            steps: Maximum number of steps.
            penalty: For the rows of the call; None for no penalty.
        """
        rows = penalty if noise is None else noise
        if rows is None:
            raise AssertionError("neither drawn nor penalised")
        places = None if rows.is_whole else torch.tensor(list(rows.rows), dtype=torch.int64, device="cpu")
        self.struct = abi_model.Draw(numbers=address(numbers), places=address(places), rows=rows.batch)
        self.steps, self._kept, self._states = steps, [numbers, places], list[Tensor]()
        self._held: _Held | None = None
        if penalty is not None:
            self._kept.append(penalty.whole.seen)
            self.struct.seen, self.struct.penalty = address(penalty.whole.seen), penalty.whole.factor
        if noise is None:
            self.struct.best = 1
        elif noise_is_torchs():
            self._held = _Held(noise.whole.start)
            self.struct.generator = address(self._held.state)
        else:
            self._make(noise)

    def _make(self, noise: RowNoise) -> None:
        whole = noise.whole
        self.steps = max(1, min(self.steps, _MOST_NOISE // (whole.shape[0] * whole.shape[1])))
        made = [whole.first()]
        for _ in range(1, self.steps):
            self._states.append(torch.get_rng_state())
            made.append(whole.another())
        self._states.append(torch.get_rng_state())
        self._kept.append(torch.stack(made) if len(made) > 1 else made[0])
        self.struct.noise = address(self._kept[-1])

    def end(self, steps: int) -> None:
        """Put torch's generator into its state after `steps` steps, unless others have drawn from it."""
        if self._held is not None:
            self._held.end()
        elif self._states and torch.equal(torch.get_rng_state(), self._states[-1]):
            torch.set_rng_state(self._states[steps - 1])


def check(tokens: Tensor) -> None:
    """Raise an error if the library could not draw a token for some row.

    Args:
        tokens: `(R,)`; negative where no token could be drawn.

    Raises:
        RequestError: There was nothing to draw from in some row.
    """
    if int(tokens.min()) < 0:
        row = int(tokens.argmin())
        raise RequestError(
            f"row {row}: no token can be drawn: its logits are NaN or infinite, or all tokens are masked; "
            "float16 may overflow where bfloat16 and float32 do not"
        )


def native_draw(scores: Tensor, noise: Tensor | None, numbers: Tensor, *, library: Library) -> Tensor:
    """Compute `ops.draw.draw` with the library.

    Args:
        scores: `(N, V)` contiguous, in float32, bfloat16 or float16.
        noise: `(N, V)` float32 contiguous, or None.
        numbers: `(4,)` float32.
        library: For one instruction set.

    Raises:
        RequestError: Scores are NaN or infinite, or none may be drawn.
        ValueError: A tensor has another shape or dtype, or is not contiguous.
    """
    rows, vocabulary = scores.shape
    wanted = {"scores": (scores, scores.shape), "noise": (noise, scores.shape), "numbers": (numbers, (4,))}
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        fits = tensor.dtype in DTYPES and (name == "scores" or tensor.dtype == torch.float32)
        if not fits or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, where "
                f"{tuple(shape)} is needed"
            )
    out = torch.empty(rows, dtype=torch.int64, device="cpu")
    if not rows:
        return out
    held = _Held(torch.get_rng_state) if noise is None and noise_is_torchs() else None
    if noise is None and held is None:
        noise = exponential(scores.shape, scores.device)
    try:
        _call(scores, noise, numbers, None if held is None else held.state, out, library)
    finally:
        if held is not None:
            held.end()
    check(out)
    return out


def _call(
    scores: Tensor, noise: Tensor | None, numbers: Tensor, state: Tensor | None, out: Tensor, library: Library
) -> None:
    rows, vocabulary = scores.shape
    draw = abi_model.Draw(address(numbers), address(noise), address(state), rows=rows)
    call = DrawCall(address(scores), address(out), rows, vocabulary, DTYPES[scores.dtype], 0, draw)
    library.run("draw", call, 1 if scores.numel() < _LEAST else None)


@functools.cache
def noise_is_torchs() -> bool:
    """Whether the library's noise equals torch's, value by value, and leaves the generator in the same state.

    On Intel processors, torch uses another generator for it where it is built with MKL.
    """
    library, generator = load(), torch.Generator("cpu").manual_seed(20)
    if library is None:
        return False
    for count in (3, 40_001, 320):
        state, scores = generator.get_state(), torch.zeros(1, count, dtype=torch.float32, device="cpu")
        made = torch.empty_like(scores).exponential_(generator=generator)
        out = torch.empty(1, dtype=torch.int64, device="cpu")
        _call(scores, None, Warp().numbers(count, scores.device), state, out, library)
        if out.item() != made.argmin() or not torch.equal(state, generator.get_state()):
            return False
    return True


def _run(
    scores: Tensor,
    noise: Tensor | None,
    numbers: Tensor,
    *,
    following: Following | None = None,
    isa: str,
) -> Tensor:
    library, tensors = load(isa), [t for t in (scores, noise, numbers) if t is not None]
    ours = scores.dtype in DTYPES and all(t.device.type == "cpu" for t in tensors) and scores.shape[1] > 0
    if library is None or not ours:
        return op.draw(scores, noise, numbers, following=following)
    # Logits processors may return scores that are not contiguous.
    noise = None if noise is None else noise.contiguous()
    chosen = native_draw(scores.contiguous(), noise, numbers.contiguous(), library=library)
    if following is not None:
        following.take(chosen)
    return chosen


def _sample(scores: Tensor, *, greedy: bool, following: Following | None = None, isa: str) -> Tensor:
    """Compute `ops.sample.sample`; with the library unless the choice is greedy."""
    if greedy or scores.device.type != "cpu":
        return sample_op.sample(scores, greedy=greedy, following=following)
    numbers = Warp().numbers(scores.shape[1], scores.device)
    return _run(scores, None, numbers, following=following, isa=isa)


def _refuse(facts: Facts, *, isa: str) -> str | None:
    # The model's dtype does not matter: `_run` checks the scores themselves.
    return refuse(isa)


def _kernel(name: str, isa: str) -> Kernel:
    run = functools.partial(_run if name == "draw" else _sample, isa=isa)
    return Kernel(name, f"cpu-{isa}", "cpu", functools.partial(_refuse, isa=isa), run)


KERNELS: tuple[Kernel, ...] = tuple(_kernel(name, isa) for name in ("draw", "sample") for isa in ISAS)

"""`draw` and `sample` on the CPU: a token by chance, without sorting the vocabulary.

torch makes the noise of a vocabulary of 49152 in 1.4 ms on a Zen 3, where a step of a 135-million model in
int4 takes 6 to 7, and transformers' warpers sort all scores twice. The library goes on with the generator's
own words, and computes the noise of those few tokens alone that may have the largest `chance / noise`.

Shapes: as in `ops.draw`; B batch, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from slipstream.errors import RequestError
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, DrawCall, address
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.ops import draw as op
from slipstream.ops import sample as sample_op
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.draw import Warp
from slipstream.ops.following import Following
from slipstream.ops.noise import RowNoise

__all__ = ["KERNELS", "Drawing", "native_draw"]

_MOST_NOISE = 1 << 22
"""Numbers that are made ahead where torch makes the noise."""

_LEAST = 1 << 18
"""Scores below which one thread is done sooner than another is woken."""


class Drawing:
    """What a call of several steps draws with.

    Attributes:
        steps: How many there may be.
        struct: For the call.
    """

    def __init__(self, numbers: Tensor, noise: RowNoise, steps: int) -> None:
        """Let the library make the noise, or make it for as many steps as memory is spent on.

        Args:
            numbers: Of `ops.draw.Warp`.
            noise: For the rows of the call.
            steps: How many at most.
        """
        whole = noise.whole
        places = None if noise.is_whole else torch.tensor(list(noise.rows), dtype=torch.int64, device="cpu")
        self.struct = abi.Draw(numbers=address(numbers), places=address(places), rows=whole.shape[0])
        self._kept, self._states = [numbers, places], list[Tensor]()
        if whole.start is not None and is_torchs():
            self.steps, self._state = steps, whole.start.clone()
            self.struct.generator = address(self._state)
            return
        self.steps = max(1, min(steps, _MOST_NOISE // (whole.shape[0] * whole.shape[1])))
        made = [whole.first()]
        for _ in range(1, self.steps):
            self._states.append(torch.get_rng_state())
            made.append(whole.another())
        self._states.append(torch.get_rng_state())
        self._kept.append(torch.stack(made) if len(made) > 1 else made[0])
        self.struct.noise = address(self._kept[-1])

    def end(self, tokens: Tensor) -> None:
        """Leave torch's generator as it is after the steps that were run.

        Args:
            tokens: `(R, steps that were run)`.

        Raises:
            RequestError: There was nothing to draw from.
        """
        torch.set_rng_state(self._states[tokens.shape[1] - 1] if self._states else self._state)
        _check(tokens[:, -1])


def native_draw(scores: Tensor, noise: Tensor | None, numbers: Tensor, *, library: Library) -> Tensor:
    """Return what `ops.draw.draw` does.

    Args:
        scores: `(N, V)` contiguous, in float32, bfloat16 or float16.
        noise: `(N, V)` float32 contiguous, or None.
        numbers: `(4,)` float32.
        library: For one instruction set.

    Raises:
        RequestError: Scores are NaN or infinite, or none may be drawn.
    """
    rows, vocabulary = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device="cpu")
    if not rows:
        return out
    state = torch.get_rng_state() if noise is None and is_torchs() else None
    if noise is None and state is None:
        noise = torch.empty(scores.shape, dtype=torch.float32, device="cpu").exponential_()
    _call(scores, noise, numbers, state, out, library)
    if state is not None:
        torch.set_rng_state(state)
    _check(out)
    return out


def _call(
    scores: Tensor, noise: Tensor | None, numbers: Tensor, state: Tensor | None, out: Tensor, library: Library
) -> None:
    rows, vocabulary = scores.shape
    draw = abi.Draw(address(numbers), address(noise), address(state), None, rows)
    call = DrawCall(address(scores), address(out), rows, vocabulary, DTYPES[scores.dtype], 0, draw)
    library.run("draw", call, 1 if scores.numel() < _LEAST else None)


def _check(tokens: Tensor) -> None:
    if int(tokens.min()) < 0:
        row = int(tokens.argmin())
        raise RequestError(
            f"row {row}: no token can be drawn, for its logits are NaN or infinite, or all of them hidden; "
            "float16 may overflow where bfloat16 and float32 do not"
        )


@functools.cache
def is_torchs() -> bool:
    """Whether the library's noise is torch's, number by number, and leaves the generator as torch does.

    torch takes another generator for it on processors of Intel, where it is built with MKL.
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
    ours = scores.dtype in DTYPES and all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
    if library is None or not ours or not scores.shape[1]:
        return op.draw(scores, noise, numbers, following=following)
    chosen = native_draw(scores, noise, numbers, library=library)
    if following is not None:
        following.take(chosen)
    return chosen


def _sample(scores: Tensor, *, greedy: bool, following: Following | None = None, isa: str) -> Tensor:
    """Return what `ops.sample.sample` does, by the library where chance is in it."""
    if greedy or scores.device.type != "cpu":
        return sample_op.sample(scores, greedy=greedy, following=following)
    numbers = Warp().numbers(scores.shape[1], scores.device)
    return _run(scores.contiguous(), None, numbers, following=following, isa=isa)


def _refuse(facts: Facts, *, isa: str) -> str | None:
    # Scores are float32, whatever the model computes in.
    return refuse(isa)


def _kernel(name: str, isa: str) -> Kernel:
    run = functools.partial(_run if name == "draw" else _sample, isa=isa)
    return Kernel(name, f"cpu-{isa}", "cpu", functools.partial(_refuse, isa=isa), run)


KERNELS: tuple[Kernel, ...] = tuple(_kernel(name, isa) for name in ("draw", "sample") for isa in ISAS)

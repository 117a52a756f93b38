"""The best token of a single sequence without reading the whole vocabulary projection.

Every greedy step reads all of it, a tenth to a half of a model, to find one row. Here a step reads a sketch
in its place, which bounds every score (see `kernels.cpu.sketch`), and computes the rows that may be the best
as ever: the token is the same, whatever the sketch is like.

What it takes is learned from the first rows of greedy generations, and made bit by bit after their calls. A
trial on a sample of the vocabulary says beforehand whether it is worth it: where a model has no direction
that it prefers, as one with random weights, everything is computed as ever.

Anybody may write to the projection's memory. A generation trusts a sketch once it has found there, byte by
byte, what the sketch was made of.

Shapes: V vocabulary, C width.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.library import Library
from slipstream.kernels.cpu.sketch import Making, Screen, SketchFormat, learn, share_of, source_of
from slipstream.ops.linear import Weight

__all__ = ["Screening", "Screens"]

_LEAST_WEIGHTS = 1 << 22
"""A smaller projection is read within a few tenths of a millisecond."""

_LEAST_GAIN = 1.4
"""How many times its sketch a projection must take."""

_SEEN = 64
"""Rows that are learned from, and steps that a screen is judged by."""

_WORTH, _IN_VAIN = 0.3, 0.5
"""Shares of the vocabulary that are computed: the most in a trial, and the most later."""

_FIRST_WAIT, _LAST_WAIT = 256, 1 << 16
"""Steps until another trial: twice as many each time."""

_SHARE, _SECONDS = 0.25, 0.05
"""What may be spent after a call on making a screen: of the call's own time, or in seconds."""

_lock = threading.Lock()


class Screens:
    """The screen of one model, which its generations learn and share."""

    def __init__(self, sketch: SketchFormat, library: Library) -> None:
        """Nothing is learned yet.

        Args:
            sketch: The format of sketches.
            library: For one instruction set.
        """
        self._sketch, self._library = sketch, library
        self.screen: Screen | None = None
        self._seen: deque[tuple[Tensor, int]] = deque(maxlen=_SEEN)
        self._shares: deque[float] = deque(maxlen=_SEEN)
        self._making: tuple[Weight, Making] | None = None
        self._steps, self._wait = 0, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Screens:
        """A copied model has learned nothing yet: its projection lies elsewhere."""
        return Screens(self._sketch, self._library)

    def begin(self, head: Weight, scale: float, softcap: float) -> Screening | None:
        """Take part in a generation; None where every score is computed.

        Args:
            head: The vocabulary projection `(V, C)`.
            scale: Of logits.
            softcap: Of logits, or 0; beneath one different scores may become the same logit.
        """
        tokens, width = head.shape
        layout = self._sketch.layout((tokens, width + self._sketch.group))
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)
        serves = head.rounding is None and head.inside is None and width % self._sketch.group == 0
        pays = tokens * width >= _LEAST_WEIGHTS and sum(p.nbytes for p in head.planes) > _LEAST_GAIN * nbytes
        return Screening(self, head) if serves and pays and scale > 0 and softcap == 0 else None

    def learn(self, head: Weight, rows: Tensor, tokens: Tensor, seconds: float) -> None:
        """Take note of steps without a screen.

        Args:
            head: The projection.
            rows: `(steps, C)` float32 that entered it.
            tokens: `(steps,)` int64, the best ones.
            seconds: That the steps took.
        """
        if not _lock.acquire(blocking=False):
            return
        try:
            self._steps += len(tokens)
            self._seen.extend(zip(rows.unbind(0), tokens.tolist(), strict=True))
            if self.screen is None and len(self._seen) == _SEEN and self._steps >= self._wait:
                # Whatever the caller's own steps are in.
                with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
                    self._go_on(head, max(_SECONDS, _SHARE * seconds))
        finally:
            _lock.release()

    def judge(self, shares: Tensor) -> None:
        """Take note of the shares of the vocabulary that steps with a screen have computed."""
        self._shares.extend(shares.tolist())
        if len(self._shares) == _SEEN and sum(self._shares) > _IN_VAIN * _SEEN:
            self._wait_longer()

    def forget(self, screen: Screen) -> None:
        """Drop a screen whose projection is no longer what it was."""
        if self.screen is screen:
            self.screen = None
            self._seen.clear()

    def _go_on(self, head: Weight, seconds: float) -> None:
        if self._making is None:
            rows, tokens = (torch.stack([row for row, _ in self._seen]), [token for _, token in self._seen])
            basis = learn(head, rows, self._sketch, self._library)
            others = rows[1::2], torch.tensor(tokens[1::2], device="cpu")
            if basis is None or share_of(head, basis, *others, self._sketch, self._library) > _WORTH:
                return self._wait_longer()
            self._making = head, Making(head, basis, self._sketch, self._library)
        of, making = self._making
        if of is not head and [p.data_ptr() for p in of.planes] != [p.data_ptr() for p in head.planes]:
            self._making = None
        elif not making.goes_on(seconds):
            self.screen, self._making = making.screen(), None
            self._shares.clear()
            if self.screen is None:
                self._wait_longer()
        return None

    def _wait_longer(self) -> None:
        self._wait = min(max(2 * self._wait, _FIRST_WAIT), _LAST_WAIT)
        self.screen, self._steps = None, 0
        self._seen.clear()
        self._shares.clear()


class Screening:
    """One generation's part in the screen of its model."""

    def __init__(self, screens: Screens, head: Weight) -> None:
        """Nothing is trusted yet.

        Args:
            screens: Of the model.
            head: The vocabulary projection of this generation.
        """
        self._screens, self._head = screens, head
        self._trusted: Screen | None = None
        self._is_first = True

    def point(self, call: abi.ModelCall, steps: int) -> Tensor:
        """Let a call use the screen, or else write down what enters the projection.

        The first call of a generation, a prompt's, uses none: to look for changes takes as long as a prompt
        of a few tokens.

        Returns:
            What the call writes to: `(steps,)` int64, how many scores were computed, with a screen, and
            `(steps, C)` float32 without.
        """
        screen = None if self._is_first else self._screens.screen
        self._is_first = False
        if screen is not None and screen is not self._trusted:
            if source_of(self._head) != screen.source:
                self._screens.forget(screen)
                screen = None
            self._trusted = screen
        if screen is None:
            told = torch.empty(steps, self._head.shape[1], dtype=torch.float32, device="cpu")
            call.entered = told.data_ptr()
        else:
            told = torch.empty(steps, dtype=torch.int64, device="cpu")
            call.screen, call.looked = ctypes.pointer(screen.struct), told.data_ptr()
        return told

    def end(self, told: Tensor, tokens: Tensor, seconds: float) -> None:
        """Learn from what a call has told.

        Args:
            told: What `point` has returned.
            tokens: `(steps that were run,)` int64.
            seconds: That the call took.
        """
        told = told[: len(tokens)]
        if told.dtype == torch.int64:
            self._screens.judge(told / self._head.shape[0])
        else:
            self._screens.learn(self._head, told, tokens, seconds)

"""Finds the best token of a single sequence without reading the whole vocabulary projection.

A plain greedy step reads all of it, a tenth to a half of a model, to find one row. Here a step reads a sketch
instead, which bounds every score (see `kernels.cpu.sketch`), and computes exactly only the rows that may be
the best: the token is the same, however good the sketch is. A *sketch* is the projection in fewer bits, a
*screen* is a sketch with its bounds, a `Screening` is one generation's use of a screen.

The sketch's directions are learned from rows of prompts and of greedy steps, and it is made after calls. A
trial on a sample of the vocabulary decides beforehand whether it is worthwhile, and a screen that spares too
little later is dropped: where a model's rows prefer no directions, as with random weights, every score is
computed as usual.

The projection's memory may be written to at any time. A generation trusts a sketch only after a digest of all
bytes has shown that the projection is still what the sketch was made of.

Shapes: V vocabulary, C width.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi_model
from slipstream.kernels.cpu.library import Library
from slipstream.kernels.cpu.sketch import Making, Screen, SketchFormat, learn, share_of, source_of
from slipstream.ops.linear import Weight

__all__ = ["Screening", "Screens"]

_LEAST_WEIGHTS = 1 << 22
"""Minimum size of a projection: a smaller one is read within a few tenths of a millisecond."""

_LEAST_SPARED = 0.25
"""Minimum share of the projection's bytes that a sketch must save to be worth making."""

_SEEN, _KNOWN = 64, 8
"""Minimum number of rows to learn from, and of rows with a known best token for a trial."""

_JUDGED = 64
"""Number of recent steps that a screen is judged by."""

_WORTH, _IN_VAIN = 0.5, 0.9
"""Largest accepted share of computed scores in a trial, and later, relative to the break-even share."""

_FIRST_WAIT, _LAST_WAIT = 256, 1 << 16
"""Steps until another trial, first and at most; doubled each time."""

_SHARE, _SECONDS = 0.25, 0.2
"""Time for making a screen after a call: this share of the call's time, or these seconds if that is more."""

_lock = threading.Lock()


class Screens:
    """The screen of one model, which its generations learn and share."""

    def __init__(self, sketch: SketchFormat, library: Library) -> None:
        """Start with nothing learned.

        Args:
            sketch: The format of sketches.
            library: For one instruction set.
        """
        self._sketch, self._library = sketch, library
        self.screen: Screen | None = None
        self._seen: deque[Tensor] = deque(maxlen=2 * _SEEN)
        self._known: deque[tuple[Tensor, int]] = deque(maxlen=2 * _KNOWN)
        self._shares: deque[float] = deque(maxlen=_JUDGED)
        self._making: tuple[Weight, Making] | None = None
        self._steps, self._wait, self._most = 0, 0, 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Screens:
        """Return an empty one for a copied model, whose projection has another address."""
        return Screens(self._sketch, self._library)

    def begin(self, head: Weight, scale: float, softcap: float, *, at_end: bool) -> Screening | None:
        """Start the screening of one generation, or return None if every score must be computed.

        Args:
            head: The vocabulary projection `(V, C)`.
            scale: Multiplier of the logits.
            softcap: Softcap of the logits, or 0; with one, different scores may become the same logit.
            at_end: Whether the output of the final norm enters the projection unchanged.
        """
        tokens, width = head.shape
        layout = self._sketch.layout((tokens, width + self._sketch.group))
        nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)
        lies = head.inside is None and (head.dtype is not None or all(p.stride(1) == 1 for p in head.planes))
        serves = head.rounding is None and lies and width % self._sketch.group == 0
        self._most = _break_even(nbytes, sum(p.nbytes for p in head.planes))
        pays = tokens * width >= _LEAST_WEIGHTS and self._most >= _LEAST_SPARED
        ordered = scale > 0 and softcap == 0
        return Screening(self, head, _SEEN if at_end else 1) if serves and pays and ordered else None

    def spared_bytes(self, head: Weight) -> int:
        """Return how many bytes a step with the screen saves, judging by recent steps; 0 without a screen."""
        screen, shares = self.screen, list(self._shares)
        if screen is None or not shares:
            return 0
        return int(sum(p.nbytes for p in head.planes) * (1 - sum(shares) / len(shares))) - screen.nbytes

    def learn(self, head: Weight, rows: Tensor, tokens: Tensor, seconds: float) -> None:
        """Record steps that ran without a screen, and work on making one.

        Args:
            head: The projection.
            rows: `(R, C)` float32, inputs of the projection, or of prompt tokens that would have been inputs.
            tokens: `(steps,)` int64, the best tokens of the last rows.
            seconds: Duration of the steps.
        """
        if not _lock.acquire(blocking=False):
            return
        try:
            self._steps += len(tokens)
            self._seen.extend(rows.unbind(0))
            self._known.extend(zip(rows[-len(tokens) :].unbind(0), tokens.tolist(), strict=True))
            enough = len(self._seen) >= _SEEN and len(self._known) >= _KNOWN and self._steps >= self._wait
            # Not after a prompt, whose first token should not be delayed.
            if self.screen is None and enough and len(rows) == len(tokens):
                # Independent of the grad and autocast modes of the caller.
                with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
                    self._go_on(head, max(_SECONDS, _SHARE * seconds))
        finally:
            _lock.release()

    def judge(self, shares: Tensor) -> None:
        """Record the shares of the vocabulary that steps computed; drop the screen if they are too large."""
        self._shares.extend(shares.tolist())
        if len(self._shares) == _JUDGED and sum(self._shares) > _IN_VAIN * self._most * _JUDGED:
            self._wait_longer()

    def forget(self, screen: Screen) -> None:
        """Drop a screen whose projection has changed."""
        if self.screen is screen:
            self.screen = None
            self._forget_rows()

    def _go_on(self, head: Weight, seconds: float) -> None:
        if self._making is None:
            basis = learn(head, torch.stack(list(self._seen)), self._sketch, self._library)
            rows, tokens = zip(*self._known, strict=True)
            known, worth = (torch.stack(rows), torch.tensor(tokens, device="cpu")), _WORTH * self._most
            if basis is None or share_of(head, basis, *known, self._sketch, self._library) > worth:
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
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._seen.clear()
        self._known.clear()
        self._shares.clear()


def _break_even(sketch: int, projection: int) -> float:
    """Return the share of the projection's rows that has as many bytes as the sketch saves."""
    return 1 - sketch / projection


class Screening:
    """One generation's use of the screen of its model."""

    def __init__(self, screens: Screens, head: Weight, most: int) -> None:
        """Start with no screen trusted.

        Args:
            screens: The model's.
            head: The vocabulary projection of this generation.
            most: Maximum number of rows per prompt to learn from.
        """
        self._screens, self._head, self._most = screens, head, most
        self._trusted: Screen | None = None
        self._is_first = True

    def point(self, call: abi_model.ModelCall, steps: int) -> Tensor | None:
        """Let a call use the screen, or else record the rows that enter the projection.

        The first call of a generation, the prompt's, uses no screen: checking the projection for changes
        takes as long as a prompt of a few tokens.

        Returns:
            The buffer that the call fills. With a screen: `(steps,)` int64, the number of scores computed in
            each step. Without: `(R, C)` float32, a row for each step, or several rows of a prompt. None if
            the call records nothing.
        """
        screen, is_first = self._screens.screen, self._is_first
        self._is_first = False
        if screen is not None and is_first:
            return None
        if screen is not None and screen is not self._trusted:
            if source_of(self._head) != screen.source:
                self._screens.forget(screen)
                screen = None
            self._trusted = screen
        if screen is None:
            step = call.stack.step
            count = min(step.tokens, self._most) if steps == 1 and step.sequences == 1 else 1
            record = torch.empty(steps * count, self._head.shape[1], dtype=torch.float32, device="cpu")
            call.entered, call.num_entered = record.data_ptr(), count
        else:
            record = torch.empty(steps, dtype=torch.int64, device="cpu")
            call.screen, call.looked = ctypes.pointer(screen.struct), record.data_ptr()
        return record

    def end(self, told: Tensor, tokens: Tensor, seconds: float) -> None:
        """Learn from what a call has recorded.

        Args:
            told: The buffer that `point` returned.
            tokens: `(steps that were run,)` int64.
            seconds: Duration of the call.
        """
        if told.dtype == torch.int64:
            self._screens.judge(told[: len(tokens)] / self._head.shape[0])
        else:
            rows = told if len(tokens) == 1 else told[: len(tokens)]
            self._screens.learn(self._head, rows, tokens, seconds)

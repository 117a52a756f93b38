"""Decode steps captured as graphs: a ladder of batch sizes over one cache at fixed addresses.

A captured step reads its tokens, lengths and cache slots from static tensors and writes those of the next
step there, so the host is not needed between replays, and growing lengths need no new capture. A batch
between two sizes of the ladder is padded with rows that write into a scratch block.

Shapes: B rows of a rung, N sequences, V vocabulary, W blocks per sequence, Z tokens per block.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from slipstream.devices import Device
from slipstream.engine.generation.prompt_graph import CapturedPrompt, rows_of, static_prompt
from slipstream.engine.generation.protocols import OnTokens
from slipstream.engine.generation.runner import Runner
from slipstream.engine.generation.static_angles import StaticAngles
from slipstream.engine.generation.static_step import MOST_AHEAD, blocks_of, least_blocks, static_step
from slipstream.errors import DeviceError
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.ops.draw import Warp
from slipstream.ops.kv_cache import Caches, tensors_of
from slipstream.ops.next_step import Following
from slipstream.ops.noise import RowNoise
from slipstream.ops.step import Step

__all__ = ["LADDER", "MOST_GRAPHS", "Graphs"]

log = logging.getLogger(__name__)

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Batch sizes of the captured steps (the rungs)."""

MOST_GRAPHS = 32
"""Maximum number of captured steps that are kept; the least recently used is dropped first."""


@dataclass(frozen=True)
class _Captured:
    """A captured step of one batch size and one block table width.

    Attributes:
        step: The static tensors that the next replay reads.
        following: Where a replay writes the next step and the chosen tokens: the best, or sampled ones.
        noise: `(B, V)` float32 for the next replay's sampling, or None if it takes the best tokens.
        numbers: `(4,)` float32, as from `ops.draw.Warp.numbers`.
        scratch: The cache block that padding rows write to.
        replay: Runs the step and returns its logits, `(B, V)`, always in the same memory.
    """

    step: Step
    following: Following
    noise: Tensor | None
    numbers: Tensor
    scratch: int
    replay: Callable[[], Tensor]


class Graphs:
    """The captured steps of one engine, and the cache that they point to.

    One generation at a time uses that cache; any concurrent one has a cache of its own and runs no graphs.

    Attributes:
        reason: Why steps are not captured; empty while they are.
    """

    def __init__(self, runner: Runner, device: Device, *, tokens: int) -> None:
        """Store the parts; nothing is captured yet.

        Args:
            runner: Runs the model.
            device: The device that it runs on.
            tokens: The usual maximum number of tokens in a generation.
        """
        self._runner, self._device, self._tokens = runner, device, tokens
        self._usual = blocks_of(tokens)
        self._lock = threading.Lock()
        self._taken = False
        self._cache: PagedCache | None = None
        self._captured: OrderedDict[tuple[int, int, bool], _Captured] = OrderedDict()
        self._prompts: OrderedDict[tuple[int, int], CapturedPrompt | None] = OrderedDict()
        self._met: set[tuple[int, int]] = set()
        self._angles: StaticAngles | None = None
        self._places: tuple[tuple[int, torch.Size], ...] = ()
        self.reason = device.no_graph() or ""
        if not self.reason and runner.frame.angles_share_a_length:
            self.reason = "the model's angles depend on the longest sequence, which is no input of a step"
        if not self.reason and not all(block.spec.keeps_pages_alone for block in runner.blocks):
            self.reason = "some layers keep a state per sequence, or nothing, in place of keys and values"

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        """Return an instance for a copy of the engine; it has captured nothing yet."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._lock, twin._taken, twin._cache, twin._angles = threading.Lock(), False, None, None
        twin._captured, twin._prompts, twin._met = OrderedDict(), OrderedDict(), set()
        twin._runner = copy.deepcopy(self._runner, memo)
        return twin

    def prove(self) -> None:
        """Capture the step of one row, to find out whether steps can be captured; sets `reason` if not."""
        if not self.reason:
            self._reserve(least_blocks(self._tokens))
            self._capture(1, self._usual, draws=False)

    def new_cache(self, blocks: int, rows: int = 1) -> PagedCache:
        """Return a cache for one generation: the one that the graphs point to, unless it is in use."""
        with self._lock:
            if self.reason or self._taken:
                return self._runner.make_cache(blocks, rows)
            lent = self._reserve(blocks).lend(blocks)
            self._taken = True
            weakref.finalize(lent, self._give_back)
            return lent

    def begin(self, caches: Caches, longest: int) -> _Session | None:
        """Begin a generation, or return None if its cache is not the graphs' one.

        Args:
            caches: The generation's cache, by layer.
            longest: Maximum length of a sequence in this generation.
        """
        if self.reason or self._cache is None or caches[0].k is not self._cache.layers[0].k:
            return None
        # `holds` waits for the device, which is idle at this point.
        if self._angles is not None and not self._angles.holds():
            self._forget()
            self._angles = None
        return _Session(self, max(blocks_of(longest), self._usual))

    @property
    def device(self) -> Device:
        """The device that steps are captured on."""
        return self._device

    def rung(self, rows: int, width: int, *, draws: bool) -> _Captured | None:
        """Return the captured step for a batch of `rows`, capturing it if necessary; None if impossible."""
        size = next((size for size in LADDER if size >= rows), None)
        if size is None or self.reason:
            return None
        captured = self._captured.get((size, width, draws)) or self._capture(size, width, draws=draws)
        if captured is not None:
            self._captured.move_to_end((size, width, draws))
            if len(self._captured) > MOST_GRAPHS:
                self._captured.popitem(last=False)
        return captured

    def prompt(self, rows: int, width: int) -> CapturedPrompt | None:
        """Return the captured prompt of a size, capturing it on the second request; None if there is none."""
        key = rows, width
        if self.reason or key not in self._met:
            self._met.add(key)
            return None
        if key not in self._prompts:
            with torch.inference_mode(False), torch.no_grad():
                self._prompts[key] = self._capture_prompt(rows, width)
        self._prompts.move_to_end(key)
        if len(self._prompts) > MOST_GRAPHS:
            self._prompts.popitem(last=False)
        return self._prompts[key]

    def _reserve(self, blocks: int) -> PagedCache:
        """Return the persistent cache, with at least this many blocks plus a scratch block for padding."""
        cache = self._cache
        if cache is None or cache.capacity <= blocks:
            self._forget()
            # The cache outlives the call, and inference-mode tensors cannot be written to outside that mode.
            with torch.inference_mode(False):
                cache = self._cache = self._runner.make_cache(max(blocks, least_blocks(self._tokens)) + 1)
                for tensor in _tensors(cache):
                    tensor[-1].zero_()
            self.forget_what_moved()
        return cache

    def _give_back(self) -> None:
        self._taken = False

    def forget_what_moved(self) -> None:
        """Drop all captures if any tensor that they read has moved."""
        places = tuple((t.data_ptr(), t.shape) for t in self._static())
        if places != self._places:
            self._forget()
            self._places = places

    def _forget(self) -> None:
        self._captured.clear()
        self._prompts.clear()

    def _static(self) -> list[Tensor]:
        """Return every tensor of the model that a step reads."""
        runner, frame = self._runner, self._runner.frame
        tensors: list[Tensor | None] = [frame.pos_table, frame.type_row]
        weights = chain(frame.matrices().values(), *(b.weights.matrices.values() for b in runner.blocks))
        for weight in weights:
            beside = weight.beside
            tensors += [*weight.planes, weight.bias, *(() if beside is None else (beside.a, beside.b))]
        for vector in chain(frame.norms().values(), *(b.weights.vectors.values() for b in runner.blocks)):
            tensors += [vector.weight, vector.bias]
        for block in runner.blocks:
            tensors += [block.mask.alibi, block.mask.sinks]
        tensors += frame.angle_tables()
        return [t for t in tensors if t is not None]

    def _capture(self, rows: int, width: int, *, draws: bool) -> _Captured | None:
        cache = self._cache
        if cache is None:
            raise AssertionError("a step can be captured only with a cache")
        with torch.inference_mode(False), torch.no_grad():
            return self._capture_upon(cache, rows, width, draws=draws)

    def _capture_upon(self, cache: PagedCache, rows: int, width: int, *, draws: bool) -> _Captured | None:
        runner, device = self._runner, _tensors(cache)[0].device
        step, following = static_step(rows, width, cache.capacity - 1, device)
        numbers = Warp().numbers(runner.vocabulary, device)
        noise = torch.ones(rows, runner.vocabulary, device=device, dtype=torch.float32) if draws else None
        given = [numbers] if noise is None else [numbers, noise]
        angles = self._angles_of(step)
        own = [*following.tensors(), step.query_starts, step.logit_rows, *angles.tensors(), *given]

        def run() -> Tensor:
            ops, logits = runner.frame.ops, runner(step, cache, angles.angles)
            if noise is None:
                ops.sample.run(logits, greedy=True, following=following)
            else:
                ops.draw.run(logits, noise, numbers, following=following)
            return logits

        try:
            replay = self._device.capture(run, [*self._static(), *_tensors(cache), *own])
        except DeviceError as error:
            self.reason = str(error)
            log.warning("decode steps run without a graph: %s", error)
            return None
        captured = _Captured(step, following, noise, numbers, cache.capacity - 1, replay)
        self._captured[rows, width, draws] = captured
        return captured

    def _capture_prompt(self, rows: int, width: int) -> CapturedPrompt | None:
        cache, runner = self._cache, self._runner
        if cache is None:
            raise AssertionError("a prompt can be captured only with a cache")
        step = static_prompt(rows, width, cache.capacity - 1, _tensors(cache)[0].device)
        angles = self._angles_of(step)
        own = [t for t in vars(step).values() if isinstance(t, Tensor)] + angles.tensors()
        try:
            replay = self._device.capture(
                lambda: runner(step, cache, angles.angles), [*self._static(), *_tensors(cache), *own]
            )
        except DeviceError as error:
            log.info("prompts of up to %d tokens run without a graph: %s", rows - 1, error)
            return None
        return CapturedPrompt(step, cache.capacity - 1, replay)

    def _angles_of(self, step: Step) -> StaticAngles:
        """Return angle tables for all positions that a captured step may have, made anew if too short."""
        if self._angles is None or not self._angles.reaches(step.max_kv_len):
            ropes = [block.spec.rope for block in self._runner.blocks]
            self._angles = StaticAngles(self._runner.frame, ropes, step.max_kv_len, step.positions.device)
        return self._angles


def _tensors(cache: PagedCache) -> list[Tensor]:
    """Return the tensors of a cache, each with its blocks as the first dimension."""
    return [tensor for layer in cache.layers for part in layer.pages for tensor in tensors_of(part)]


class _Session:
    """Replays the steps of one generation; all but decode steps and single prompts are left to the runner."""

    def __init__(self, graphs: Graphs, width: int) -> None:
        self._graphs, self._width, self._has_looked = graphs, width, False

    def logits(self, step: Step) -> Tensor | None:
        """Return logits `(R, V)` float32 in new memory for a decode step or a single prompt, else None."""
        captured = self._load(step)
        if captured is None:
            return self._prompt(step)
        return captured.replay()[: step.token_ids.shape[0]].to(torch.float32, copy=True)

    def _prompt(self, step: Step) -> Tensor | None:
        """Return logits `(R, V)` float32 in new memory for a prompt whose size is captured, else None."""
        rows = rows_of(step, self._width)
        if rows is None:
            return None
        self._look()
        captured = self._graphs.prompt(rows, self._width)
        return None if captured is None else captured.logits(step)

    def _look(self) -> None:
        if not self._has_looked:
            self._graphs.forget_what_moved()
            self._has_looked = True

    def best(
        self, step: Step, steps: int, ends: Sequence[int], on_tokens: OnTokens | None = None
    ) -> Tensor | None:
        """Return the best tokens of a decode step and of some that follow it, `(N, steps)` int64.

        Args:
            step: One token of every sequence; the cache blocks have room for all steps.
            steps: Maximum number of steps.
            ends: End tokens: the result ends with the first step in which a row's best token is one of them.
            on_tokens: If given, only one step is run, because each step's tokens are awaited.
        """
        captured = self._load(step)
        if captured is None:
            return None
        count = min(steps, MOST_AHEAD) if on_tokens is None else 1
        for _ in range(count):
            captured.replay()
        return _until(ends, captured.following.tokens[: step.token_ids.shape[0], :count].clone())

    def drawn(
        self,
        step: Step,
        numbers: Tensor,
        noise: RowNoise,
        steps: int,
        ends: Sequence[int],
        on_tokens: OnTokens | None = None,
    ) -> Tensor | None:
        """Return tokens sampled in a decode step and in some that follow it, `(N, steps)` int64.

        Args:
            step: As for `best`.
            numbers: From `ops.draw.Warp.numbers`.
            noise: For the step's rows.
            steps: Maximum number of steps.
            ends: As for `best`; torch's generator is reset to its state after the last step in the result.
            on_tokens: As for `best`.
        """
        captured, device = self._load(step, draws=True), self._graphs.device
        if captured is None or captured.noise is None:
            return None
        captured.numbers.copy_(numbers)
        rows, count = step.token_ids.shape[0], min(steps, MOST_AHEAD) if on_tokens is None else 1
        states: list[Tensor] = []
        for _ in range(count):
            states += [device.random_state()] if ends else []
            captured.noise[:rows].copy_(noise())
            captured.replay()
        tokens = _until(ends, captured.following.tokens[:rows, :count].clone())
        if tokens.shape[1] < count:
            device.set_random_state(states[tokens.shape[1]])
        return tokens

    def _load(self, step: Step, *, draws: bool = False) -> _Captured | None:
        rows = step.token_ids.shape[0]
        if step.max_query_len != 1 or step.kv_lens.shape[0] != rows or step.logit_rows.shape[0] != rows:
            return None
        self._look()  # skipped for prompts that are not captured: their launches would wait for this check
        captured = self._graphs.rung(rows, self._width, draws=draws)
        if captured is None:
            return None
        into, scratch = captured.step, captured.scratch
        for part, value in (
            ("token_ids", 0),
            ("positions", 0),
            ("kv_lens", 1),
            ("slots", scratch * BLOCK_SIZE),
        ):
            tensor = getattr(into, part)
            tensor[:rows].copy_(getattr(step, part))
            tensor[rows:].fill_(value)
        into.block_table.fill_(scratch)
        into.block_table[:rows, : step.block_table.shape[1]].copy_(step.block_table[:, : self._width])
        captured.following.counts.zero_()
        return captured


def _until(ends: Sequence[int], tokens: Tensor) -> Tensor:
    """Return the columns of `(N, steps)` up to and including the first that has one of the end tokens."""
    count = tokens.shape[1]
    if ends and count > 1:
        over = torch.isin(tokens, torch.tensor(ends, device=tokens.device)).any(0).tolist()
        count = over.index(True) + 1 if True in over else count
    return tokens[:, :count]

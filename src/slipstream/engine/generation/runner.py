"""Runs one step of the engine road: embed, stack, final norm, head. The same signature eagerly and captured.

Shapes: T packed tokens, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.engine.generation.schedule import Chunk
from slipstream.model.block.block import Block, RopeTable
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.model.frame.frame import Frame, run_stack
from slipstream.ops.kv_cache import CachePart
from slipstream.ops.noise import RowNoise
from slipstream.ops.penalty import RowPenalty
from slipstream.ops.step import Step
from slipstream.spec import Rope

__all__ = ["Runner", "Session", "Stack", "Tell", "make_step"]

Stack = Callable[
    [Sequence[Block], Tensor, Step, Sequence[tuple[CachePart, CachePart]], dict[Rope, RopeTable]], Tensor
]
"""Runs layers that follow each other; `run_stack` is the definition."""


Angles = Callable[[Tensor, Sequence[Rope | None]], dict[Rope, RopeTable]]
"""The signature of `Frame.angles`."""


Tell = Callable[[Tensor], None]
"""Takes the tokens `(R,)` of a step while those that follow it run."""


class WholeSession(Protocol):
    """Runs the steps of one generation in one go each, or returns None for a step that it leaves."""

    def logits(self, step: Step) -> Tensor | None: ...  # noqa: D102
    def best(  # noqa: D102
        self, step: Step, steps: int, ends: Sequence[int], tell: Tell | None
    ) -> Tensor | None: ...


@runtime_checkable
class Draws(Protocol):
    """What can run whole steps that draw their tokens, too."""

    def drawn(  # noqa: D102
        self,
        step: Step,
        numbers: Tensor,
        noise: RowNoise,
        steps: int,
        ends: Sequence[int],
        tell: Tell | None,
    ) -> Tensor | None: ...


@runtime_checkable
class Penalises(Protocol):
    """What can run whole steps in which tokens are penalised that a row has said."""

    def penalised(  # noqa: D102
        self,
        step: Step,
        penalty: RowPenalty,
        numbers: Tensor,
        noise: RowNoise | None,
        steps: int,
        ends: Sequence[int],
        tell: Tell | None,
    ) -> Tensor | None: ...


@runtime_checkable
class Suppresses(Protocol):
    """What can run whole steps that do not choose some of the tokens."""

    def suppress(self, tokens: Tensor | None) -> None: ...  # noqa: D102


class Whole(Protocol):
    """What can run whole steps; None where it cannot run those of this generation."""

    def begin(  # noqa: D102
        self, caches: Sequence[tuple[CachePart, CachePart]], longest: int
    ) -> WholeSession | None: ...


Timer = Callable[[str], AbstractContextManager[None]]
"""Times what runs within its context under a name."""


def no_timer(name: str) -> AbstractContextManager[None]:
    """The timer of an engine that is not profiled."""
    return nullcontext()


class Runner:
    """A causal language model over packed tokens: `runner(step, cache) -> logits`.

    Attributes:
        frame: What stands around the layers.
        blocks: The layers in order.
        names: Their paths, for the profile.
        stack: Runs the layers.
        whole: Runs whole steps, where something can.
        new_cache: Makes the cache of a generation; captured steps have one that stays.
        cache_dtype: What keys and values are kept in; None for the model's dtype.
        timer: Replaced while the engine is profiled.
        takes_over: The language model is a part of the model, whose own forward runs the prompts.
    """

    def __init__(
        self,
        frame: Frame,
        blocks: Sequence[Block],
        names: Sequence[str],
        *,
        stack: Stack = run_stack,
        whole: Whole | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Take the parts as they are."""
        self.frame, self.blocks, self.names = frame, list(blocks), list(names)
        self.stack, self.whole, self.cache_dtype = stack, whole, cache_dtype
        self.new_cache: Callable[[int], PagedCache] = self.make_cache
        self.timer: Timer = no_timer
        self.takes_over = False

    def __call__(self, step: Step, cache: PagedCache, angles: Angles | None = None) -> Tensor:
        """Run one step.

        Args:
            step: Packed tokens and where they go.
            cache: Updated in place.
            angles: In the place of `frame.angles`.

        Returns:
            Logits `(R, V)` of `step.logit_rows`, in the engine's dtype.
        """
        with self.timer(""):
            ropes = [block.spec.rope for block in self.blocks]
            tables = (angles or self.frame.angles)(step.positions, ropes)
            x = self.frame.enter(step.token_ids, step.positions)
            if self.timer is no_timer:
                x = self.stack(self.blocks, x, step, cache.layers, tables)
            else:
                for name, block, pair in zip(self.names, self.blocks, cache.layers, strict=True):
                    with self.timer(name):
                        x = self.stack([block], x, step, [pair], tables)
            all_of_them = step.logit_rows.shape[0] == x.shape[0]
            return self.frame.leave(x if all_of_them else x[step.logit_rows])

    def begin(self, cache: PagedCache, longest: int) -> Session:
        """Begin a generation.

        Args:
            cache: Of this generation alone.
            longest: Positions that it may reach.
        """
        whole = None if self.whole is None else self.whole.begin(cache.layers, longest)
        return Session(self, cache, whole)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's activations."""
        dtype: torch.dtype = self.frame.embed._parameters["weight"].dtype
        return dtype

    @property
    def vocabulary(self) -> int:
        """Logits of a row (V)."""
        return int(self.frame.matrices()["head"].shape[0])

    def make_cache(self, blocks: int) -> PagedCache:
        """A cache of `blocks` blocks per layer, on the model's device."""
        weight = self.frame.embed._parameters["weight"]  # as an attribute, it would be unpacked
        specs = [block.spec for block in self.blocks]
        return PagedCache(specs, blocks, dtype=self.cache_dtype or weight.dtype, device=weight.device)


class Session:
    """The steps of one generation: in one native call where there is one, else `runner(step, cache)`."""

    def __init__(self, runner: Runner, cache: PagedCache, whole: WholeSession | None) -> None:
        """Begun by `Runner.begin`."""
        self._runner, self._cache, self._whole = runner, cache, whole
        self._suppressed: Tensor | None = None
        self._given: Tensor | None = None

    @property
    def has_run(self) -> bool:
        """Whether the next step has run already."""
        return self._given is not None

    def give(self, logits: Tensor) -> None:
        """Let the next step be one that has run already, and has these logits `(R, V)` float32."""
        self._given = logits

    def logits(self, step: Step) -> Tensor:
        """Run one step; new logits `(R, V)` float32."""
        given, self._given = self._given, None
        if given is not None:
            return given
        whole = self._native()
        logits = None if whole is None else whole.logits(step)
        return self._runner(step, self._cache).float() if logits is None else logits

    def suppress(self, tokens: Tensor | None) -> None:
        """Let no token be chosen that is one of these, from now on; the logits are what they are.

        Args:
            tokens: Rising ids `(K,)` int64 on the model's device, fewer than all; None for none.
        """
        self._suppressed = tokens
        if isinstance(self._whole, Suppresses):
            self._whole.suppress(tokens)

    def best(self, step: Step, steps: int = 1, ends: Sequence[int] = (), tell: Tell | None = None) -> Tensor:
        """Run one step, and as many of those that follow it as can be run in the same go.

        Args:
            step: Where `steps` is not 1, one token of every sequence, whose blocks have room for the others.
            steps: How many at most.
            ends: They are over early when one of these tokens is some row's best.
            tell: Called with the tokens `(R,)` of each step but the last as soon as they are known; where
                that is not possible, one step is run.

        Returns:
            The best tokens of each row, `(R, steps that were run)` int64: at least one.
        """
        whole = self._chooses()
        tokens = None if whole is None else whole.best(step, steps, ends, tell)
        if tokens is None:
            tokens = self._runner.frame.ops.sample.run(self._scores(step), greedy=True)[:, None]
        return tokens

    @property
    def draws(self) -> bool:
        """Whether drawing within a step costs less than transformers' own warpers after it."""
        return isinstance(self._whole, Draws) or self._runner.frame.ops.draw.name != "reference"

    def drawn(
        self,
        step: Step,
        numbers: Tensor,
        noise: RowNoise,
        steps: int = 1,
        ends: Sequence[int] = (),
        tell: Tell | None = None,
    ) -> Tensor:
        """As `best`, with tokens that are drawn.

        Args:
            step: As of `best`.
            numbers: Of `ops.draw.Warp`.
            noise: For the step's rows.
            steps: How many at most.
            ends: As of `best`.
            tell: As of `best`.

        Raises:
            RequestError: The logits of a row are NaN or infinite.
        """
        whole = self._chooses()
        tokens = whole.drawn(step, numbers, noise, steps, ends, tell) if isinstance(whole, Draws) else None
        if tokens is None:
            drawn: Tensor = self._runner.frame.ops.draw.run(self._scores(step), noise(), numbers)
            tokens = drawn[:, None]
        return tokens

    def penalised(
        self,
        step: Step,
        penalty: RowPenalty,
        numbers: Tensor,
        noise: RowNoise | None,
        steps: int = 1,
        ends: Sequence[int] = (),
        tell: Tell | None = None,
    ) -> Tensor:
        """As `drawn`, or where there is no noise `best`, once the scores of some tokens are lowered.

        Args:
            step: As of `best`.
            penalty: For the step's rows; may take the tokens of each step.
            numbers: As of `drawn`.
            noise: As of `drawn`; None for the best tokens.
            steps: As of `best`.
            ends: As of `best`.
            tell: As of `best`.

        Raises:
            RequestError: As `drawn`.
        """
        whole, ops, tokens = self._chooses(), self._runner.frame.ops, None
        if isinstance(whole, Penalises):
            tokens = whole.penalised(step, penalty, numbers, noise, steps, ends, tell)
        if tokens is None:
            scores = penalty(self._scores(step))
            chosen: Tensor = (
                ops.sample.run(scores, greedy=True)
                if noise is None
                else ops.draw.run(scores, noise(), numbers)
            )
            tokens = chosen[:, None]
        return tokens

    def _scores(self, step: Step) -> Tensor:
        """Logits, those of tokens that may not be chosen lowered as far as can be."""
        logits = self.logits(step)
        return logits if self._suppressed is None else logits.index_fill_(1, self._suppressed, -torch.inf)

    def _chooses(self) -> WholeSession | None:
        """What runs whole steps and chooses their tokens."""
        return self._native() if self._suppressed is None or isinstance(self._whole, Suppresses) else None

    def _native(self) -> WholeSession | None:
        return self._whole if self._runner.timer is no_timer and not self.has_run else None


def make_step(
    chunks: Sequence[Chunk],
    tokens: Callable[[Chunk], Tensor],
    blocks: Sequence[Sequence[int]],
    device: torch.device,
) -> Step:
    """Lay out what a schedule decided as tensors.

    Args:
        chunks: At least one.
        tokens: The ids of a chunk, `(count,)`.
        blocks: Cache blocks of every sequence, in order, enough for the chunk's last token.
        device: Where the step runs.

    Returns:
        A step whose `logit_rows` are the last tokens of the chunks that want them, in the order of the
        chunks.
    """
    counts, lens = [chunk.count for chunk in chunks], [chunk.start + chunk.count for chunk in chunks]
    width, total = -(-max(lens) // BLOCK_SIZE), sum(counts)
    rows = [blocks[chunk.row][:width] for chunk in chunks]
    table, count, length = (
        _host([[*row, *[0] * (width - len(row))] for row in rows]),
        _host(counts),
        _host(lens),
    )
    ends = count.cumsum(0)
    owner = _host(range(len(chunks))).repeat_interleave(count, output_size=total)
    positions = torch.arange(total, device="cpu") + (length - ends)[owner]
    slots = table[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    logit_rows = ends[_host([row for row, chunk in enumerate(chunks) if chunk.is_last])] - 1
    starts = torch.nn.functional.pad(ends, (1, 0))
    made = (positions, slots, logit_rows, starts.int(), length.int(), table.int())
    positions, slots, logit_rows, starts, length, table = _sent(made, device)
    ids = [tokens(chunk) for chunk in chunks]
    return Step(
        token_ids=(ids[0] if len(ids) == 1 else torch.cat(ids)).to(device),
        positions=positions,
        query_starts=starts,
        kv_lens=length,
        block_table=table,
        slots=slots,
        logit_rows=logit_rows,
        max_query_len=max(counts),
        max_kv_len=max(lens),
    )


def _host(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Some tensors of the host on a device, by one copy: each is a launch, and waits for pageable memory.

    They begin at multiples of 16 bytes, as allocated ones do, for which kernels are compiled.
    """
    padded = [
        torch.nn.functional.pad(t.flatten().view(torch.uint8), (0, -t.nbytes % 16)) if t.numel() else t.byte()
        for t in tensors
    ]
    parts = torch.cat(padded).to(device).split([len(part) for part in padded])
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]

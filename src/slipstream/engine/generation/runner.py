"""Runs one step of the engine road: embedding, stack, final norm, head; eagerly or captured in a graph.

Shapes: T packed tokens, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from slipstream.engine.generation.protocols import (
    Draws,
    OnTokens,
    Penalises,
    Stack,
    Suppresses,
    Whole,
    WholeSession,
)
from slipstream.engine.generation.schedule import Chunk
from slipstream.model.block.block import Block, RopeTable
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.model.frame.frame import Frame
from slipstream.model.frame.run_stack import run_stack
from slipstream.ops.noise import RowNoise
from slipstream.ops.penalty import RowPenalty
from slipstream.ops.step import Step, piece_of
from slipstream.spec import Rope

__all__ = ["Runner", "Session", "make_step"]

Angles = Callable[[Tensor, Sequence[Rope | None]], dict[Rope, RopeTable]]
"""The signature of `Frame.angles`."""


Timer = Callable[[str], AbstractContextManager[None]]
"""Returns a context manager that times its body under a name."""


def no_timer(name: str) -> AbstractContextManager[None]:
    """The timer of an engine that is not profiled."""
    return nullcontext()


class Runner:
    """A causal language model over packed tokens: `runner(step, cache) -> logits`.

    Attributes:
        frame: The parts around the layers: embedding, final norm, head, rotary angles.
        blocks: The layers in order.
        names: The layers' paths, for the profile.
        stack: Runs the layers.
        whole: Runs whole steps; None if nothing can.
        new_cache: Makes the cache of a generation; captured steps share one persistent cache.
        cache_dtype: The dtype of cached keys and values; None for the model's dtype.
        timer: Replaced while the engine is profiled.
        takes_over: The language model is a part of a larger model, whose own forward runs the prompts.
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
        """Store the parts; the attributes describe them."""
        self.frame, self.blocks, self.names = frame, list(blocks), list(names)
        self.stack, self.whole, self.cache_dtype = stack, whole, cache_dtype
        self.new_cache: Callable[..., PagedCache] = self.make_cache
        self.timer: Timer = no_timer
        self.takes_over = False

    def __call__(self, step: Step, cache: PagedCache, angles: Angles | None = None) -> Tensor:
        """Run one step.

        Args:
            step: Packed tokens, with their positions and cache slots.
            cache: Updated in place.
            angles: Used instead of `frame.angles`, if given.

        Returns:
            Logits `(R, V)` of `step.logit_rows`, in the engine's dtype.
        """
        with self.timer(""):
            ropes = [block.spec.rope for block in self.blocks]
            tables = (angles or self.frame.angles)(step.positions, ropes)
            x = self.frame.enter(step.token_ids, step.positions)
            inputs = self.frame.layer_inputs(step.token_ids, x)
            x = self.frame.split(x)
            if self.timer is no_timer:
                x = self.stack(self.blocks, x, step, cache.layers, tables, inputs)
            else:
                for index, (name, block, kept) in enumerate(
                    zip(self.names, self.blocks, cache.layers, strict=True)
                ):
                    with self.timer(name):
                        x = self.stack([block], x, step, [kept], tables, piece_of(inputs, index))
            all_of_them = step.logit_rows.shape[0] == x.shape[0]
            return self.frame.leave(x if all_of_them else x[step.logit_rows])

    def begin(self, cache: PagedCache, longest: int) -> Session:
        """Begin a generation.

        Args:
            cache: A cache that only this generation uses.
            longest: Maximum length of a sequence in this generation.
        """
        whole = None if self.whole is None else self.whole.begin(cache.layers, longest)
        return Session(self, cache, whole)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's activations."""
        dtype: torch.dtype = self.frame.embed._parameters["weight"].dtype
        return dtype

    @property
    def vocabulary(self) -> int:
        """Number of logits per row (V)."""
        return int(self.frame.matrices()["head"].shape[0])

    def make_cache(self, blocks: int, rows: int = 1) -> PagedCache:
        """Return a new cache for `rows` sequences, of `blocks` blocks per layer, on the model's device."""
        weight = self.frame.embed._parameters["weight"]  # attribute access would unpack it
        specs = [block.spec for block in self.blocks]
        dtype = self.cache_dtype or weight.dtype
        return PagedCache(specs, blocks, dtype=dtype, device=weight.device, rows=rows)


class Session:
    """Runs the steps of one generation: as whole-step calls if possible, else by `runner(step, cache)`."""

    def __init__(self, runner: Runner, cache: PagedCache, whole: WholeSession | None) -> None:
        """Store the parts; use `Runner.begin` to make a session."""
        self._runner, self._cache, self._whole = runner, cache, whole
        self._suppressed: Tensor | None = None
        self._given: Tensor | None = None

    @property
    def has_run(self) -> bool:
        """Whether the next step has already been run elsewhere and its logits were given."""
        return self._given is not None

    def give(self, logits: Tensor) -> None:
        """Use these logits, `(R, V)` float32, for the next step instead of running it."""
        self._given = logits

    def logits(self, step: Step) -> Tensor:
        """Run one step and return its logits, `(R, V)` float32, in new memory."""
        given, self._given = self._given, None
        if given is not None:
            return given
        whole = self._native()
        logits = None if whole is None else whole.logits(step)
        return self._runner(step, self._cache).float() if logits is None else logits

    def suppress(self, tokens: Tensor | None) -> None:
        """Exclude tokens from being chosen from now on; `logits` still returns their unchanged scores.

        Args:
            tokens: Ascending ids `(K,)` int64 on the model's device, not the whole vocabulary; None to
                exclude none.
        """
        self._suppressed = tokens
        if isinstance(self._whole, Suppresses):
            self._whole.suppress(tokens)

    def best(
        self, step: Step, steps: int = 1, ends: Sequence[int] = (), on_tokens: OnTokens | None = None
    ) -> Tensor:
        """Run one step, and as many following steps as the same call can run, choosing the best tokens.

        Args:
            step: The first step. If `steps` is above 1, it has one token of every sequence, and the cache
                blocks have room for the tokens of all steps.
            steps: Maximum number of steps.
            ends: End tokens: no step follows one in which any row's best token is one of these.
            on_tokens: Called with the tokens `(R,)` of each step but the last as soon as they are known; if
                that is not possible, only one step is run.

        Returns:
            The best tokens of each row, `(R, number of steps run)` int64, at least one step.
        """
        whole = self._chooses()
        tokens = None if whole is None else whole.best(step, steps, ends, on_tokens)
        if tokens is None:
            tokens = self._runner.frame.ops.sample.run(self._scores(step), greedy=True)[:, None]
        return tokens

    @property
    def draws(self) -> bool:
        """Whether sampling within a step is faster than transformers' own warpers after it."""
        return isinstance(self._whole, Draws) or self._runner.frame.ops.draw.name != "reference"

    def drawn(
        self,
        step: Step,
        numbers: Tensor,
        noise: RowNoise,
        steps: int = 1,
        ends: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Tensor:
        """Run steps like `best`, but sample the tokens.

        Args:
            step: As for `best`.
            numbers: From `ops.draw.Warp.numbers`.
            noise: For the step's rows.
            steps: Maximum number of steps.
            ends: As for `best`.
            on_tokens: As for `best`.

        Raises:
            RequestError: The logits of a row are NaN or infinite.
        """
        whole = self._chooses()
        tokens = (
            whole.drawn(step, numbers, noise, steps, ends, on_tokens) if isinstance(whole, Draws) else None
        )
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
        on_tokens: OnTokens | None = None,
    ) -> Tensor:
        """Run steps with a repetition penalty on the scores, sampling tokens or choosing the best.

        Args:
            step: As for `best`.
            penalty: For the step's rows; each step's tokens may be added to it.
            numbers: As for `drawn`.
            noise: As for `drawn`; None to choose the best tokens.
            steps: As for `best`.
            ends: As for `best`.
            on_tokens: As for `best`.

        Raises:
            RequestError: As for `drawn`.
        """
        whole, ops, tokens = self._chooses(), self._runner.frame.ops, None
        if isinstance(whole, Penalises):
            tokens = whole.penalised(step, penalty, numbers, noise, steps, ends, on_tokens)
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
        """Return the step's logits, with those of suppressed tokens set to minus infinity."""
        logits = self.logits(step)
        return logits if self._suppressed is None else logits.index_fill_(1, self._suppressed, -torch.inf)

    def _chooses(self) -> WholeSession | None:
        """Return the whole-step session if it can choose tokens now, respecting those that are suppressed."""
        return self._native() if self._suppressed is None or isinstance(self._whole, Suppresses) else None

    def _native(self) -> WholeSession | None:
        return self._whole if self._runner.timer is no_timer and not self.has_run else None


def make_step(
    chunks: Sequence[Chunk],
    tokens: Callable[[Chunk], Tensor],
    blocks: Sequence[Sequence[int]],
    device: torch.device,
    logits: int = 1,
) -> Step:
    """Lay out a schedule's chunks as the tensors of a step.

    Args:
        chunks: At least one.
        tokens: Returns the ids of a chunk, `(count,)`.
        blocks: Cache blocks of every sequence, in order, with room for the chunk's last token.
        device: The device that the step runs on.
        logits: For how many tokens of a sequence logits are needed; its last chunk has at least as many.

    Returns:
        A step whose `logit_rows` are the last tokens of the chunks with `is_last`, in the order of the
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
    last = ends[_host([row for row, chunk in enumerate(chunks) if chunk.is_last])]
    logit_rows = (last[:, None] + torch.arange(-logits, 0, device="cpu")).flatten()
    starts = torch.nn.functional.pad(ends, (1, 0))
    rows_of_states = _host([chunk.row for chunk in chunks]).int()
    made = (positions, slots, logit_rows, starts.int(), length.int(), table.int(), rows_of_states)
    positions, slots, logit_rows, starts, length, table, rows_of_states = _sent(made, device)
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
        states=rows_of_states,
    )


def _host(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to a device in one transfer: each copy is a launch, and waits for pageable memory.

    Each result begins at a multiple of 16 bytes, as allocated tensors do: kernels are compiled for that.
    """
    padded = [
        torch.nn.functional.pad(t.flatten().view(torch.uint8), (0, -t.nbytes % 16)) if t.numel() else t.byte()
        for t in tensors
    ]
    parts = torch.cat(padded).to(device).split([len(part) for part in padded])
    return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]

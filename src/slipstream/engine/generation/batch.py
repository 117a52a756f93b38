"""The tokens of one generation, their schedule and their cache.

Shapes: B batch, N running sequences, S prompt (padded), L tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.generation.decode import Decode
from slipstream.engine.generation.export import Rows, append_to, exported, store
from slipstream.engine.generation.fork import followed, forked
from slipstream.engine.generation.multimodal import Begun, Kept, kept_by
from slipstream.engine.generation.protocols import OnTokens
from slipstream.engine.generation.runner import Runner, make_step
from slipstream.engine.generation.schedule import Chunk, Schedule
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.ops.draw import Warp
from slipstream.ops.noise import Noise
from slipstream.ops.penalty import Penalty
from slipstream.ops.step import Step
from slipstream.ops.suppression import Rule, Suppression

__all__ = ["Batch"]


class Batch:
    """The tokens of a generation, their schedule and their cache."""

    def __init__(
        self,
        runner: Runner,
        input_ids: Tensor,
        mask: Tensor | None,
        *,
        max_length: int,
        token_budget: int,
        forks: int = 1,
        hidden: int = 0,
    ) -> None:
        """Admit the prompts and reserve their cache.

        Args:
            runner: Runs the model.
            input_ids: `(B, S)` int64, left-padded.
            mask: `(B, hidden + S)`, zero where a prompt is padded; None for no padding.
            max_length: Maximum number of tokens in a row, padding included.
            token_budget: Maximum number of tokens per step.
            forks: Number of rows into which `fork` will split each row.
            hidden: Number of tokens without ids before the prompts, padding included; `fill` must follow.
        """
        rows, length = input_ids.shape
        # Tokens without ids count as negative padding: a row has more tokens than ids.
        real = [hidden + length] * rows if mask is None else (mask != 0).sum(-1).tolist()
        self._padding, self._hidden = [length - count for count in real], hidden
        # Always int64, as in transformers' loops, where appending a token converts an int32 prompt.
        self._tokens = input_ids.new_empty(rows, max(max_length, length + 1), dtype=torch.long)
        self._tokens[:, :length] = input_ids
        self._length = length
        # If angles depend on the longest sequence, all prompts run in one step, as in the original.
        self._schedule = Schedule(rows * length if runner.frame.angles_share_a_length else token_budget)
        for row, padding in enumerate(self._padding):
            self._schedule.add(row, length - padding)
        needed = [-(-(self._tokens.shape[1] - padding) // BLOCK_SIZE) for padding in self._padding]
        self._cache: PagedCache = runner.new_cache(forks * sum(needed), forks * rows)
        self._runner = runner
        self._blocks = [self._cache.allocate(count) for count in needed]
        self._session = runner.begin(self._cache, hidden + self._tokens.shape[1])
        self._shifts, self._resumed = [0] * rows, 0
        self._decode: Decode | None = None
        self._penalty: Penalty | None = None
        self._suppression: Suppression | None = None

    @property
    def ids(self) -> Tensor:
        """`(B, L)`, padding included; contiguous, as transformers' processors and criteria expect."""
        return self._tokens[:, : self._length].contiguous()

    def shown(self, look: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `look(ids)`; tokens that `look` changes in place are changed in the batch, too."""
        ids = self.ids
        result = look(ids)
        if ids.data_ptr() != self._tokens.data_ptr():
            self._tokens[:, : self._length] = ids
        return result

    @property
    def length(self) -> int:
        """Number of tokens per row so far, padding included (L)."""
        return self._length

    @property
    def room(self) -> int:
        """Maximum number of tokens per row, padding included."""
        return self._tokens.shape[1]

    def hold(self, ids: Tensor) -> None:
        """Hold other tokens, `(B, L)` int64; of those before, only a common beginning need not run again.

        No layer may have a recurrence, whose states cannot be taken back.
        """
        most = min(self._length, ids.shape[1])
        differs = (self._tokens[:, :most] != ids[:, :most]).any(0)
        same = int(differs.int().argmax()) if bool(differs.any()) else most
        self._tokens[:, : ids.shape[1]] = ids
        self._length = ids.shape[1]
        for row in self._schedule.rows:
            padding = self._padding[row]
            self._schedule.hold(row, self._length - padding, max(same - padding, 0))

    def last_logits(self, count: int) -> Tensor:
        """Run all tokens that have not run; return logits of each row's last `count`, which are among them.

        Returns:
            `(B, count, V)` float32.
        """
        if count == 1:
            return self.logits()[:, None]
        device = self._tokens.device
        while self._schedule.behind > self._schedule.token_budget:
            chunks = self._schedule.next(but=count)
            self._session.logits(make_step(chunks, self._ids_of, self._blocks, device))
        step = make_step(self._schedule.next(), self._ids_of, self._blocks, device, logits=count)
        return self._session.logits(step).view(-1, count, self._runner.vocabulary)

    def logits(self) -> Tensor:
        """Run until every running row has logits; return `(B, V)` float32, zeros for finished rows."""
        return self._run(lambda step, *_: self._session.logits(step))

    def best(self, steps: int = 1, ends: Sequence[int] = (), on_tokens: OnTokens | None = None) -> Tensor:
        """Run until every running row has its best next tokens.

        Args:
            steps: Maximum number of steps; above 1 only if no row is finished, or finished rows were dropped.
            ends: End tokens: no step follows one in which any row's best token is one of these.
            on_tokens: Called with the tokens `(B,)` of each step but the last as soon as they are known, with
                zeros for finished rows.

        Returns:
            `(B, number of steps run)` int64, at least one step; zeros for finished rows.
        """
        most = self._most(steps)

        def run(step: Step, rows: list[int], decodes: bool) -> Tensor:
            return self._session.best(
                step, most if decodes else 1, ends, self._for_running_rows(on_tokens, rows)
            )

        return self._run(run)

    @property
    def draws(self) -> bool:
        """Whether `drawn` samples faster than transformers' own warpers would."""
        return self._session.draws

    def drawn(
        self, warp: Warp, steps: int = 1, ends: Sequence[int] = (), on_tokens: OnTokens | None = None
    ) -> Tensor:
        """Run like `best`, but sample with torch's default generator, as `torch.multinomial` does.

        Args:
            warp: Temperature, top-k, top-p and min-p.
            steps: As for `best`.
            ends: As for `best`.
            on_tokens: As for `best`.
        """
        device, vocabulary = self._tokens.device, self._runner.vocabulary
        most = self._most(steps)
        numbers, noise = warp.numbers(vocabulary, device), Noise(self._tokens.shape[0], vocabulary, device)

        def run(step: Step, rows: list[int], decodes: bool) -> Tensor:
            count, for_running_rows = most if decodes else 1, self._for_running_rows(on_tokens, rows)
            return self._session.drawn(step, numbers, noise.of(rows), count, ends, for_running_rows)

        return self._run(run)

    def penalise(self, factor: float) -> Penalty:
        """Return a repetition penalty on the tokens in each row, including those appended from now on.

        Args:
            factor: Above 0.
        """
        self._penalty = Penalty(factor, self.ids, self._runner.vocabulary)
        return self._penalty

    def penalised(
        self,
        penalty: Penalty,
        warp: Warp | None,
        steps: int = 1,
        ends: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Tensor:
        """Run with a repetition penalty on the scores, sampling as `drawn` or choosing as `best`.

        Args:
            penalty: From `penalise`.
            warp: Applied to the penalised scores before sampling; None to choose the best tokens.
            steps: As for `best`.
            ends: As for `best`.
            on_tokens: As for `best`.
        """
        device, vocabulary = self._tokens.device, self._runner.vocabulary
        most = self._most(steps)
        numbers = (warp or Warp()).numbers(vocabulary, device)
        noise = None if warp is None else Noise(self._tokens.shape[0], vocabulary, device)

        def run(step: Step, rows: list[int], decodes: bool) -> Tensor:
            count, for_running_rows = most if decodes else 1, self._for_running_rows(on_tokens, rows)
            own = None if noise is None else noise.of(rows)
            return self._session.penalised(
                step, penalty.of(rows), numbers, own, count, ends, for_running_rows
            )

        return self._run(run)

    def processed(self, processors: Callable[[Tensor, Tensor], Tensor], warp: Warp) -> Tensor:
        """Run one step, apply transformers' own processors to the logits, and sample a token for each row.

        Args:
            processors: Called on `(B, L)` tokens and `(B, V)` float32 logits; returns scores.
            warp: Applied to these scores before sampling.
        """
        logits = self.logits()
        scores = self.shown(lambda ids: processors(ids, logits))
        numbers = warp.numbers(scores.shape[1], scores.device)
        drawn: Tensor = self._runner.frame.ops.draw.run(scores, None, numbers)
        return drawn[:, None]

    def suppress(self, processors: Sequence[Any], others: list[Any], rules: Sequence[Rule]) -> Sequence[Any]:
        """Set rules about tokens that `best`, `drawn` and `penalised` must not choose from now on.

        Args:
            processors: All of transformers' processors, including those that the rules replace.
            others: The processors that the rules do not replace.
            rules: The rules, in order.

        Returns:
            The processors that still have to be called: `others`, or all of them if the rules would suppress
            every token, in which case they are not applied.
        """
        suppression = Suppression(rules, self._runner.vocabulary, self._tokens.device) if rules else None
        if suppression is not None and suppression.is_total:
            return processors
        self._suppression = suppression
        return others

    def _most(self, steps: int) -> int:
        """Return how many steps one call may run, and set the tokens that the session suppresses in them."""
        most = min(steps, self._tokens.shape[1] - self._length)
        if self._suppression is None:
            return most
        tokens, end = self._suppression.at(self._length)
        self._session.suppress(tokens)
        return min(most, end - self._length)

    def _for_running_rows(self, on_tokens: OnTokens | None, rows: Sequence[int]) -> OnTokens | None:
        """Wrap `on_tokens`, which takes tokens of the whole batch, for a step that has only some rows."""
        return None if on_tokens is None else lambda tokens: on_tokens(self._of_all(rows, tokens))

    def _run(self, run: Callable[[Step, list[int], bool], Tensor]) -> Tensor:
        if self._session.has_run:
            rows = self._schedule.rows
            return run(self._last_step(rows), rows, False)
        out: Tensor | None = None
        while True:
            rows = self._schedule.decode()
            decodes = bool(rows)
            if decodes:
                step = self._decode_step(rows)
            elif chunks := self._schedule.next():
                rows = [chunk.row for chunk in chunks if chunk.is_last]
                step = make_step(chunks, self._ids_of, self._blocks, self._tokens.device)
            else:
                break
            result = run(step, rows, decodes)
            if decodes or len(rows) == self._tokens.shape[0]:
                return self._of_all(rows, result)
            if out is None:
                out = self._of_all(rows, result)
            else:
                out[rows] = result
        if out is None:
            raise AssertionError("a step was requested with no sequence left to run")
        return out

    def _last_step(self, rows: Sequence[int]) -> Step:
        """Return a step of the last token of each of these rows, which have already run."""
        held = self._held()
        chunks = [Chunk(row, held[row] - 1, 1, is_last=True) for row in rows]
        return make_step(chunks, self._ids_of, self._blocks, self._tokens.device)

    def _of_all(self, rows: Sequence[int], result: Tensor) -> Tensor:
        """Expand a result for some rows to the whole batch, with zeros for the other rows."""
        if len(rows) == self._tokens.shape[0]:
            return result
        out = result.new_zeros(self._tokens.shape[0], *result.shape[1:])
        out[list(rows)] = result
        return out

    def _decode_step(self, rows: list[int]) -> Step:
        """Return the step that runs the latest token of each of these rows."""
        last = self._length - 1
        if self._decode is None or self._decode.rows != rows:
            starts = [last - self._padding[row] for row in rows]
            blocks = [self._blocks[row] for row in rows]
            shifts = [self._shifts[row] for row in rows]
            self._decode = Decode(rows, starts, blocks, self._tokens.device, shifts)
        return self._decode.step(self._tokens[:, last], last - self._padding[rows[0]])

    def _ids_of(self, chunk: Chunk) -> Tensor:
        start = self._padding[chunk.row] + chunk.start
        return self._tokens[chunk.row, start : start + chunk.count]

    def append(self, tokens: Tensor) -> None:
        """Append the next tokens of every row, `(B, n)`; all but the last column have already run."""
        count = tokens.shape[1]
        if self._length + count > self._tokens.shape[1]:  # a criterion other than the length decides the end
            raise AssertionError("generation went past its own max_length")
        self._tokens[:, self._length : self._length + count] = tokens
        self._length += count
        self._schedule.append(self._schedule.rows, count)
        if self._penalty is not None:
            self._penalty.add(tokens)

    def drop(self, alive: Sequence[bool]) -> None:
        """Remove rows that are not alive from the schedule, and release their cache blocks."""
        for row in self._schedule.rows:
            if not alive[row]:
                self._schedule.finish(row)
                self._cache.release(self._blocks[row])

    def fill(self, begun: Begun) -> None:
        """Store the cache of prompts that ran elsewhere; the first step returns the logits of that run."""
        self._schedule = Schedule(max(self._schedule.token_budget, len(self._padding)))
        self._store(begun.layers, self._length)
        self._shifts = list(begun.shifts)
        self._session.give(begun.logits)

    def resume(self, cache: Any) -> None:
        """Store a transformers cache of the prompts' first tokens, so that only the others run."""
        self._resumed = int(cache.get_seq_length())
        layers = kept_by(cache, self._runner, len(self._padding), self._resumed) if self._resumed else None
        if layers is not None:
            self._store(layers, self._resumed)

    def _store(self, layers: Sequence[Kept], seen: int) -> None:
        """Store what layers keep of the first `seen` tokens, padding included; these need not run."""
        for row, padding in enumerate(self._padding):
            done = max(seen - padding, 0)
            self._schedule.add(row, self._length - padding, done=done)
            store(layers, self._cache, row, self._blocks[row], done)

    def fork(self, times: int) -> None:
        """Replace each row by `times` adjacent copies of itself; all tokens of the rows must have run."""
        self._blocks = forked(self._cache, self._blocks, times, self._held())
        self._cache.follow([row for row in range(len(self._padding)) for _ in range(times)])
        self._tokens = self._tokens.repeat_interleave(times, dim=0)
        self._padding = [padding for padding in self._padding for _ in range(times)]
        self._shifts = [shift for shift in self._shifts for _ in range(times)]
        budget = self._schedule.token_budget
        self._schedule, self._decode = Schedule(max(budget, len(self._padding))), None
        for row, held in enumerate(self._held()):
            self._schedule.add(row, held, done=held)

    def follow(self, sources: Sequence[int]) -> None:
        """Continue each row from another row's tokens, or its own; all tokens of the rows must have run.

        Args:
            sources: For each row, the row to continue from, which has the same number of tokens.
        """
        if list(sources) == list(range(len(sources))):
            return
        self._blocks = followed(self._cache, self._blocks, sources, self._held())
        self._cache.follow(sources)
        self._tokens[:, : self._length] = self._tokens[list(sources), : self._length]
        if self._decode is not None:
            self._decode.place([self._blocks[row] for row in self._decode.rows])

    def _held(self) -> list[int]:
        """Return the number of cached tokens of each row, given that all of its tokens have run."""
        return [self._length - padding for padding in self._padding]

    def export(self, model: Any) -> Any:
        """Return the keys and values so far as a transformers cache, by `exported`."""
        return exported(model, self._runner, self._cache, self._rows(), self._seen())

    def extend(self, cache: Any) -> None:
        """Append what has run since `resume` to the cache that was given there, in place."""
        append_to(cache, self._runner, self._cache, self._rows(), self._resumed, self._seen())

    def _rows(self) -> Rows:
        return tuple((own, self._hidden + n) for own, n in zip(self._blocks, self._padding, strict=True))

    def _seen(self) -> int:
        return self._hidden + self._length - self._schedule.is_behind

"""The engine road of `generate`: greedy search and sampling over a packed batch, within transformers' own.

transformers prepares everything (generation config, processors, stopping criteria) and hands over through
`custom_generate`; whatever this loop cannot honour takes transformers' own loops, over the injected layers.

Shapes: B batch, S prompt (padded), L tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.runner import Runner, make_step
from slipstream.engine.schedule import Chunk, Schedule
from slipstream.model.cache import BLOCK_SIZE, PagedCache

__all__ = ["TOKEN_BUDGET", "Loop"]

TOKEN_BUDGET = 4096
"""Most tokens in one step; longer prompts run in chunks."""


@dataclass(frozen=True)
class Loop:
    """The decoding method handed to transformers' `generate`.

    Attributes:
        runner: The model over packed tokens.
        streamer: The user's, which transformers does not pass on to custom methods.
    """

    runner: Runner
    streamer: Any = None

    def method(self) -> Callable[..., Any]:
        """The loop as a function: transformers reads the signature of what it is handed."""

        def decode(
            model: nn.Module,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            return self(
                model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
            )

        return decode

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Generate.

        Args:
            model: The causal language model.
            input_ids: `(B, S)` int64, left-padded.
            logits_processor: Called on `(B, V)` float32 scores.
            stopping_criteria: Called on the tokens so far.
            generation_config: Complete.
            model_kwargs: What transformers would pass to the model; the attention mask is read, the rest is
                empty.

        Returns:
            `(B, L)` int64, or transformers' `GenerateDecoderOnlyOutput`.
        """
        batch = _Batch(self.runner, input_ids, model_kwargs.get("attention_mask"), generation_config)
        config = generation_config
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        # Rows that are finished cost nothing, unless the caller sees what the model goes on to say.
        keep_finished = (
            config.return_dict_in_generate or not has_eos or self.runner.frame.angles_share_a_length
        )
        pad = config._pad_token_tensor
        unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
        record = _Record(config)
        while True:
            logits = batch.logits()
            scores = logits_processor(batch.ids, logits)
            record.add(scores, logits)
            tokens = self.runner.frame.ops.sample.run(scores, greedy=not config.do_sample)
            if has_eos:
                tokens = tokens * unfinished + pad.to(tokens.device) * (1 - unfinished)
            batch.append(tokens)
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            unfinished = unfinished & ~stopping_criteria(batch.ids, record.scores)
            alive = unfinished.tolist()
            if not any(alive):
                break
            if not keep_finished:
                batch.drop(alive)
        if self.streamer is not None:
            self.streamer.end()
        return record.output(model, batch) if config.return_dict_in_generate else batch.ids.clone()


class _Record:
    """Scores and logits by step, where the caller asked for them."""

    def __init__(self, config: Any) -> None:
        wanted = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None

    def add(self, scores: Tensor, logits: Tensor) -> None:
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def output(self, model: Any, batch: _Batch) -> Any:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        record: dict[str, Any] = {"scores": self.scores, "logits": self.logits}
        cache, sequences = batch.export(model), batch.ids.clone()
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=cache, **record)  # type: ignore[arg-type]


class _Batch:
    """The tokens of a generation, their schedule and their cache."""

    def __init__(self, runner: Runner, input_ids: Tensor, mask: Tensor | None, config: Any) -> None:
        rows, length = input_ids.shape
        self._runner = runner
        self._padding = [0] * rows if mask is None else (length - (mask != 0).sum(-1)).tolist()
        # As transformers' loops, whose first new token makes int64 of a prompt in int32.
        self._tokens = input_ids.new_empty(rows, max(int(config.max_length), length + 1), dtype=torch.long)
        self._tokens[:, :length] = input_ids
        self._length = length
        # Where angles depend on the longest sequence, all prompts run at once, as they do in the original.
        self._schedule = Schedule(rows * length if runner.frame.angles_share_a_length else TOKEN_BUDGET)
        for row, padding in enumerate(self._padding):
            self._schedule.add(row, length - padding)
        needed = [-(-(self._tokens.shape[1] - padding) // BLOCK_SIZE) for padding in self._padding]
        self._cache: PagedCache = runner.new_cache(sum(needed))
        self._blocks = [self._cache.allocate(count) for count in needed]
        self._last: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """`(B, L)`, padding included; contiguous, as processors and criteria know it from transformers."""
        return self._tokens[:, : self._length].contiguous()

    def logits(self) -> Tensor:
        """Run until every running row has logits; `(B, V)` float32, zeros for rows that are finished."""
        out: Tensor | None = None
        while chunks := self._schedule.next():
            step = make_step(chunks, self._ids_of, self._blocks, self._tokens.device)
            logits = self._runner(step, self._cache)
            rows = [chunk.row for chunk in chunks if chunk.is_last]
            if len(rows) == self._tokens.shape[0]:
                return logits.float()
            if out is None:
                out = logits.new_zeros(self._tokens.shape[0], logits.shape[-1], dtype=torch.float32)
            out[rows] = logits.float()
        if out is None:
            raise AssertionError("logits were asked for with nothing left to run")
        return out

    def _ids_of(self, chunk: Chunk) -> Tensor:
        start = self._padding[chunk.row] + chunk.start
        return self._tokens[chunk.row, start : start + chunk.count]

    def append(self, tokens: Tensor) -> None:
        """Take the next token of every row, `(B,)`."""
        if self._length == self._tokens.shape[1]:  # a criterion other than the length decides when to stop
            raise AssertionError("generation went past its own max_length")
        self._tokens[:, self._length] = tokens
        self._length += 1
        self._schedule.append(self._schedule.rows)

    def drop(self, alive: list[int]) -> None:
        """Take finished rows out of the schedule."""
        for row in self._schedule.rows:
            if not alive[row]:
                self._schedule.finish(row)
                self._cache.release(self._blocks[row])

    def export(self, model: Any) -> Any:
        """The keys and values so far as transformers keeps them: `(B, K, L - 1, D)`, padded with zeros."""
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        seen = self._length - 1
        for index, pair in enumerate(self._cache.layers):
            parts = [
                torch.stack([self._row(row, part, seen) for row in range(len(self._padding))])
                for part in pair
            ]
            cache.update(parts[0], parts[1], index)
        return cache

    def _row(self, row: int, part: Tensor, seen: int) -> Tensor:
        padding = self._padding[row]
        real = part[self._blocks[row]].flatten(0, 1)[: seen - padding].transpose(0, 1)
        return torch.nn.functional.pad(real, (0, 0, padding, 0))

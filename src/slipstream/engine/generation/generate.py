"""The engine road of `generate`: greedy search, sampling and beams over a packed batch.

transformers prepares everything (generation config, processors, stopping criteria) and hands over through
`custom_generate`. Calls that this loop does not support run transformers' own loops over the injected layers.

Shapes: B batch, S prompt (padded), L tokens so far, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.generation.assisted import ASSISTED, Assisted, longest_assisted
from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.beams import BEAMS, Searched
from slipstream.engine.generation.draft import Held
from slipstream.engine.generation.encoder_decoder import cross_attends, encoded, with_encoder
from slipstream.engine.generation.multimodal import Begun, begin
from slipstream.engine.generation.processors import may_mix_rows, parted, penalty_of, suppressions_of
from slipstream.engine.generation.refusals import MODES
from slipstream.engine.generation.request import cache_matters, longest
from slipstream.engine.generation.runner import Runner
from slipstream.engine.generation.stopping import Stop
from slipstream.parallel import ALONE, Axis
from slipstream.parallel.agree import agree_on_tokens, any_of

__all__ = ["TOKEN_BUDGET", "Loop"]

TOKEN_BUDGET = 4096
"""Maximum number of tokens per step; longer prompts run in chunks."""


@dataclass(frozen=True)
class Loop:
    """The decoding method handed to transformers' `generate`.

    Attributes:
        runner: Runs the model over packed tokens.
        streamer: The user's streamer, which transformers does not pass to custom methods.
        ranks: The ranks that share the model: each chooses tokens, and they check that they agree.
        begun: The prompts' results if the model's own forward has run them; None otherwise.
        helpers: `assistant_model` and tokenizers of the call, which are not passed to custom methods either.
        held: Where an assistant's tokens are held between its calls; None for any other model.
        cache: The caller's cache, from which the call continues and which it extends; None if it gave none.
    """

    runner: Runner
    streamer: Any = None
    ranks: Axis = ALONE.replica
    begun: Begun | None = None
    helpers: Mapping[str, Any] = field(default_factory=dict)
    held: Held | None = None
    cache: Any = None

    def method(self) -> Callable[..., Any]:
        """Return the loop as a plain function, because transformers inspects the signature."""

        def decode(
            model: nn.Module,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            leaves = cross_attends(self.runner) and self._leaves(generation_config, input_ids, model_kwargs)
            loop = self
            if self.runner.takes_over or model_kwargs.get("inputs_embeds") is not None:
                begun = begin(model, self.runner, input_ids, model_kwargs)
                leaves, loop = begun is None, replace(self, begun=begun)
            mode = generation_config.get_generation_mode(self.helpers.get("assistant_model")).value
            others = {ASSISTED: self._assisted, **dict.fromkeys(BEAMS, self._searched)}
            run = self._original if leaves else others.get(mode, loop)
            return run(
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
        """Generate by greedy search or sampling.

        Args:
            model: The causal language model.
            input_ids: `(B, S)` int64, left-padded.
            logits_processor: Called on `(B, V)` float32 scores.
            stopping_criteria: Called on the tokens so far.
            generation_config: The complete generation config.
            model_kwargs: What transformers would pass to the model. Only the attention mask is read, and
                for cross-attention the encoder's output; there is nothing else unless the model's own
                forward runs the prompt.

        Returns:
            `(B, L)` int64, or transformers' `GenerateDecoderOnlyOutput`.
        """
        config, cross = generation_config, cross_attends(self.runner)
        most = longest(stopping_criteria)
        batch, runner = self._admit(input_ids, int(config.max_length) if most is None else most, model_kwargs)
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        # Finished rows are dropped to save work, unless the caller sees what the model computes for them.
        is_seen = config.return_dict_in_generate or self.cache is not None or may_mix_rows(logits_processor)
        keep_finished = cross or is_seen or not has_eos or runner.frame.angles_share_a_length
        stop, record = Stop(stopping_criteria), _Record(config)
        rows = _Rows(input_ids.shape[0], config._pad_token_tensor if has_eos else None)
        stream = None if self.streamer is None else _Stream(self.streamer, rows)
        choose = None if record.is_kept else self._choose(batch, logits_processor, config, stop.ends, stream)
        # With several ranks, one may have a streamer and the others none: then all run step by step.
        pace = _Pace(can_run_ahead=stop.is_known and (stream is None or self.ranks.size == 1))
        while True:
            if choose is not None:
                tokens = pace.tokens(choose, alone=keep_finished and not all(rows.alive))
            else:
                logits = batch.logits()
                scores = batch.shown(functools.partial(_processed, logits_processor, logits))
                record.add(scores, logits)
                tokens = self.runner.frame.ops.sample.run(scores, greedy=not config.do_sample)[:, None]
            tokens = rows.settle(tokens)
            agree_on_tokens(tokens, self.ranks)
            batch.append(tokens)
            if stream is not None:
                stream.put_rest(tokens)
            done = any_of(stop(batch, tokens[:, -1], record.scores), self.ranks, known=stop.is_known)
            rows.alive = [a and not d for a, d in zip(rows.alive, done, strict=True)]
            if not any(rows.alive):
                break
            if not keep_finished:
                batch.drop(rows.alive)
        return self._ended(model, batch, record if config.return_dict_in_generate else None)

    def _ended(self, model: nn.Module, batch: Batch, record: _Record | None) -> Any:
        """Extend the caller's cache, end its stream, and return the output: tokens, or with a record."""
        if self.cache is not None:
            batch.extend(self.cache)
        if self.streamer is not None:
            self.streamer.end()
        if record is None:
            return batch.ids.clone()
        # A batch that is held continues from its own cache.
        made = batch.export(model) if self.cache is None and self.held is None else None
        return record.output(batch, self.cache if made is None else made)

    def _searched(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Generate by beam search; arguments as of `__call__`, with one row for each beam of each prompt.

        Returns:
            `(B, L)` int64, or transformers' `GenerateBeamDecoderOnlyOutput`.
        """
        beams = 1 if cross_attends(self.runner) else int(generation_config.num_beams)
        inputs = {**model_kwargs}
        if beams > 1 and inputs.get("attention_mask") is not None:
            inputs["attention_mask"] = inputs["attention_mask"][::beams]
        batch, _ = self._admit(input_ids[::beams], int(generation_config.max_length), inputs, beams)
        search = Searched(model, batch, beams).search
        output = search(input_ids, logits_processor, stopping_criteria, generation_config)
        if generation_config.return_dict_in_generate:
            output.past_key_values = batch.export(model)
        agree_on_tokens(output if isinstance(output, Tensor) else output.sequences, self.ranks)
        return output

    def _assisted(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Generate one sequence by assisted decoding; arguments and output as of `__call__`."""
        config = generation_config
        longest = longest_assisted(config, self.runner.frame.max_positions)
        batch, _ = self._admit(input_ids, longest, model_kwargs)
        output = Assisted(model, batch).decode(
            input_ids,
            logits_processor,
            stopping_criteria,
            config,
            inputs=model_kwargs,
            streamer=self.streamer,
            helpers=self.helpers,
        )
        if config.return_dict_in_generate:
            batch.hold(output.sequences)
            output.past_key_values = batch.export(model)
        return output

    def _leaves(self, config: Any, ids: Tensor, inputs: Mapping[str, Any]) -> bool:
        """Whether transformers' own loop must run this call, which a model's own `generate` may have made."""
        most = self.runner.frame.max_positions
        alone = "encoder_outputs" not in inputs  # a decoder that is given states
        mask = inputs.get("attention_mask" if alone else "decoder_attention_mask")
        padded = mask is not None and not bool((mask != 0).all())
        asked = ("return_dict_in_generate", "output_attentions", "output_hidden_states")
        return (
            padded
            or (alone and inputs.get("encoder_hidden_states") is None)
            or cache_matters(config, encoded=True)
            or any(getattr(config, name, None) for name in asked)
            or config.use_cache is False
            or config.get_generation_mode(None).value not in MODES
            or (most is not None and max(int(config.max_length), ids.shape[1]) > most)
        )

    def _original(self, model: Any, *given: Any, **inputs: Any) -> Any:
        """Run transformers' own loop; `given` are its methods' positional arguments, in order."""
        from transformers.generation.utils import GENERATION_MODES_MAPPING

        mode = given[-1].get_generation_mode(None)
        own = getattr(type(model), GENERATION_MODES_MAPPING[mode])
        names = ("input_ids", "logits_processor", "stopping_criteria", "generation_config")
        if self.streamer is not None:
            inputs["streamer"] = self.streamer
        return own(model, **dict(zip(names, given, strict=True)), **inputs)

    def _choose(
        self, batch: Batch, processors: Any, config: Any, ends: Sequence[int], stream: _Stream | None
    ) -> Callable[[int], Tensor] | None:
        """Return a function that runs some steps and chooses their tokens in one go, exposing no logits.

        None where the tokens have to be chosen outside, from the logits of each step.
        """
        on_tokens = None if stream is None else stream.put
        first, warp = parted(processors) if config.do_sample else (processors, None)
        others = batch.suppress(first, *suppressions_of(first, self.runner.vocabulary))
        if warp is None and not others:
            return lambda steps: batch.best(steps, ends, on_tokens)
        # Ranks have to agree on tokens, but each would draw from its own generator.
        if self.ranks.size > 1 or not batch.draws:
            return None
        if (factor := penalty_of(others)) is not None:
            penalty = batch.penalise(factor)
            return lambda steps: batch.penalised(penalty, warp, steps, ends, on_tokens)
        if warp is None:
            return None
        if others:
            return lambda _: batch.processed(type(processors)(first), warp)
        return lambda steps: batch.drawn(warp, steps, ends, on_tokens)

    def _admit(
        self, ids: Tensor, most: int, inputs: Mapping[str, Any], forks: int = 1
    ) -> tuple[Batch, Runner]:
        """Return the batch and its runner; rows have at most `most` tokens, `forks` as of `Batch`."""
        runner, mask, budget = self.runner, inputs.get("attention_mask"), TOKEN_BUDGET
        if self.held is not None:
            return self.held.batch(runner, ids, mask, most, budget), runner
        if cross_attends(runner):
            # The decoder's rows have equal lengths, and all run in each step.
            runner = with_encoder(runner, *encoded(inputs), max(most, ids.shape[1] + 1))
            mask, budget = None, ids.numel()
        embeds = inputs.get("inputs_embeds")  # the first tokens may have no ids
        hidden = 0 if embeds is None else embeds.shape[1] - ids.shape[1]
        batch = Batch(runner, ids, mask, max_length=most, token_budget=budget, forks=forks, hidden=hidden)
        if self.cache is not None:
            batch.resume(self.cache)
        if self.begun is not None:
            batch.fill(self.begun)
        return batch, runner


class _Rows:
    """Tracks which rows are unfinished.

    Attributes:
        alive: Whether each of the B rows is unfinished.
    """

    def __init__(self, count: int, pad: Tensor | None) -> None:
        """Begin with all rows unfinished; `pad` fills finished rows, None where rows cannot finish early."""
        self.alive, self._pad = [True] * count, pad

    def settle(self, tokens: Tensor) -> Tensor:
        """Return tokens `(B, ...)` with finished rows replaced by padding."""
        if self._pad is None or all(self.alive):
            return tokens
        running = torch.tensor(self.alive, device=tokens.device).view(-1, *[1] * (tokens.ndim - 1))
        return torch.where(running, tokens, self._pad.to(tokens.device))


class _Stream:
    """Passes each step's tokens to the user's streamer exactly once, during a run of steps or after it."""

    def __init__(self, streamer: Any, rows: _Rows) -> None:
        self._streamer, self._rows, self._count = streamer, rows, 0

    def put(self, tokens: Tensor) -> None:
        """Pass on the tokens `(B,)` of a step while the next step runs."""
        self._count += 1
        self._streamer.put(self._rows.settle(tokens))

    def put_rest(self, tokens: Tensor) -> None:
        """Pass on those tokens of the last run's n steps, `(B, n)`, that `put` did not."""
        for index in range(self._count, tokens.shape[1]):
            self._streamer.put(tokens[:, index].cpu())
        self._count = 0


class _Pace:
    """Decides how many steps to run per call: each return to Python costs 0.2 ms of cold caches."""

    SECONDS, MOST = 0.1, 64  # bounds of one call: an interrupt is handled only after it

    def __init__(self, *, can_run_ahead: bool) -> None:
        self._steps, self._ahead, self._is_prompt = 1, can_run_ahead, True

    def tokens(self, run: Callable[[int], Tensor], *, alone: bool) -> Tensor:
        """Return the tokens of the next n steps, `(B, n)`; n is 1 if the next step must run alone."""
        start = time.perf_counter()
        tokens = run(1 if alone else self._steps)
        seconds = (time.perf_counter() - start) / tokens.shape[1]
        if self._ahead and not self._is_prompt:
            self._steps = min(max(int(self.SECONDS / seconds), 1), self.MOST)
        self._is_prompt = False
        return tokens


def _processed(processors: Any, logits: Tensor, ids: Tensor) -> Tensor:
    scores: Tensor = processors(ids, logits)
    return scores


class _Record:
    """Collects scores and logits by step, if the caller requested them."""

    def __init__(self, config: Any) -> None:
        wanted = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None

    @property
    def is_kept(self) -> bool:
        return self.scores is not None or self.logits is not None

    def add(self, scores: Tensor, logits: Tensor) -> None:
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)

    def output(self, batch: Batch, cache: Any) -> Any:
        """Return transformers' output, with this cache."""
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        record: dict[str, Any] = {"scores": self.scores, "logits": self.logits}
        return GenerateDecoderOnlyOutput(sequences=batch.ids.clone(), past_key_values=cache, **record)  # type: ignore[arg-type]

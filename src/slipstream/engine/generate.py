"""The engine road of `generate`: greedy search and sampling over a packed batch, inside of transformers' own generate.

transformers prepares everything (generation config, processors, stopping criteria) and hands over through
`custom_generate`; whatever this loop cannot honour takes transformers' own loops, over the injected layers.

Shapes: B batch, S prompt (padded), L tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.engine.runner import Runner, make_step
from slipstream.engine.schedule import Chunk, Schedule
from slipstream.model.cache import BLOCK_SIZE, PagedCache

__all__ = ["TOKEN_BUDGET", "Loop", "move_stop_strings", "new_tokens", "token_prompt", "why_not_packed"]

TOKEN_BUDGET = 4096
"""Most tokens in one step; longer prompts run in chunks."""

_DEFAULT_NEW_TOKENS = 20
_MODES = ("greedy_search", "sample")
_OWN = frozenset({"attention_mask", "input_ids", "inputs", "logits_to_keep", "use_cache"})
_ARGUMENTS = frozenset(
    {
        "assistant_model",
        "custom_generate",
        "inputs",
        "logits_processor",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
        "tokenizer",
        "assistant_tokenizer",
        "trust_remote_code",
    }
)
"""Arguments of transformers' `generate` that are neither generation settings nor inputs of the model."""


def token_prompt(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The prompt of a call of `generate`, `(B, S)` token ids, or None where the call has none."""
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    config = getattr(model, "config", None)
    if not isinstance(prompt, Tensor) or prompt.is_floating_point() or getattr(config, "is_encoder_decoder", False):
        return None
    return prompt if prompt.dim() == 2 else None


def new_tokens(model: nn.Module, length: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many tokens a call of `generate` asks for, by its own arguments and the model's generation config."""
    config = _prepared(model, kwargs.get("generation_config", args[1] if len(args) > 1 else None), kwargs)[0]
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return max(int(config.max_length) - length, 0) if config.max_length is not None else _DEFAULT_NEW_TOKENS


def _prepared(model: nn.Module, generation_config: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The complete generation config of a call, and the arguments that are left for the model."""
    settings = {k: v for k, v in kwargs.items() if k not in _ARGUMENTS and k != "generation_config"}
    prepared: tuple[Any, dict[str, Any]] = model._prepare_generation_config(generation_config, **settings)  # type: ignore[operator]
    return prepared


def move_stop_strings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Turn stop strings into the criterion that transformers makes of them.

    transformers does not pass the tokenizer on where the decoding method is custom, and so cannot do it itself.
    """
    if kwargs.get("stop_strings") is None:
        return dict(kwargs)
    from transformers.generation import StoppingCriteriaList, StopStringCriteria

    moved = {key: value for key, value in kwargs.items() if key != "stop_strings"}
    criterion = StopStringCriteria(tokenizer=kwargs["tokenizer"], stop_strings=kwargs["stop_strings"])
    moved["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    return moved


def why_not_packed(model: nn.Module, generation_config: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call of `generate` cannot take the engine road, or None if it can.

    Args:
        model: The causal language model.
        generation_config: As the user gave it, or None.
        kwargs: The call's keyword arguments, `input_ids` among them.
    """
    for name in ("assistant_model", "custom_generate", "inputs_embeds", "past_key_values", "position_ids"):
        if kwargs.get(name) is not None:
            return f"{name} is given"
    if kwargs.get("synced_gpus"):
        return "synced_gpus is given"
    config, rest = _prepared(model, generation_config, kwargs)
    mode = config.get_generation_mode(None)
    if mode.value not in _MODES:
        return f"the mode is {mode.value}"
    extra = [name for name, value in rest.items() if name not in _OWN and value is not None and value is not False]
    if extra:
        return f"the model takes {', '.join(extra)}"
    for name in ("output_attentions", "output_hidden_states", "cache_implementation", "prefill_chunk_size"):
        if getattr(config, name, None):
            return f"{name} is set"
    if config.use_cache is False or rest.get("use_cache") is False:
        return "use_cache is False"
    if getattr(config, "token_healing", False):
        return "token_healing is set"
    if config.stop_strings is not None and (kwargs.get("tokenizer") is None or kwargs.get("stop_strings") is None):
        return "stop_strings stand in a generation config, or come without a tokenizer"
    mask = kwargs.get("attention_mask")
    if mask is not None and not _is_left_padded(mask):
        return "the attention mask has gaps"
    return None


def _is_left_padded(mask: Tensor) -> bool:
    """Whether every row is zeros, then ones to its end."""
    if mask.dim() != 2:
        return False
    real = mask != 0
    return bool(real[:, -1].all()) and bool((real[:, 1:] | ~real[:, :-1]).all())


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
            return self(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

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
            model_kwargs: What transformers would pass to the model; the attention mask is read, the rest is empty.

        Returns:
            `(B, L)` int64, or transformers' `GenerateDecoderOnlyOutput`.
        """
        batch = _Batch(self.runner, input_ids, model_kwargs.get("attention_mask"), generation_config)
        config = generation_config
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        # Rows that are finished cost nothing, unless the caller sees what the model goes on to say.
        keep_finished = bool(config.return_dict_in_generate) or not has_eos
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

    def output(self, model: nn.Module, batch: _Batch) -> Any:
        from transformers.generation import GenerateDecoderOnlyOutput

        cache = batch.export(model)
        return GenerateDecoderOnlyOutput(
            sequences=batch.ids.clone(), scores=self.scores, logits=self.logits, past_key_values=cache
        )


class _Batch:
    """The tokens of a generation, their schedule and their cache."""

    def __init__(self, runner: Runner, input_ids: Tensor, mask: Tensor | None, config: Any) -> None:
        rows, length = input_ids.shape
        self._runner = runner
        self._padding = [0] * rows if mask is None else (length - (mask != 0).sum(-1)).tolist()
        self._tokens = input_ids.new_empty(rows, max(int(config.max_length), length + 1))
        self._tokens[:, :length] = input_ids
        self._length = length
        self._schedule = Schedule(TOKEN_BUDGET)
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

    def export(self, model: nn.Module) -> Any:
        """The keys and values so far as transformers keeps them: `(B, K, L - 1, D)`, left-padded with zeros."""
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        seen = self._length - 1
        for index, pair in enumerate(self._cache.layers):
            parts = [torch.stack([self._row(row, part, seen) for row in range(len(self._padding))]) for part in pair]
            cache.update(parts[0], parts[1], index)
        return cache

    def _row(self, row: int, part: Tensor, seen: int) -> Tensor:
        padding = self._padding[row]
        real = part[self._blocks[row]].flatten(0, 1)[: seen - padding].transpose(0, 1)
        return torch.nn.functional.pad(real, (0, 0, padding, 0))

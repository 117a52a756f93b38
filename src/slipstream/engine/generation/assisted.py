"""Assisted decoding on the engine road: transformers' own loop over a model whose forwards run a batch.

Something proposes the next tokens: a lookup in the tokens so far, or an assistant model. One step of the
model runs all of them, and those that it would have chosen itself are kept. A step of several tokens reads
the weights once, so that where memory decides, it takes hardly longer than a step of one.

Shapes: S prompt, L tokens so far, n proposed tokens, V vocabulary.

Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.engine.generation.stand_in import StandIn, is_transformers

__all__ = ["ASSISTED", "Assisted", "longest_assisted", "why_not_assisted"]

ASSISTED = "assisted_generation"
"""Transformers' name of the mode."""

_READS_HIDDEN = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
"""Beginnings of the names of assistants that continue from the model's own hidden states and cache."""


def why_not_assisted(model: nn.Module, config: Any, assistant: Any, rows: int) -> str | None:
    """Return why the engine road cannot run an assisted generation, or None if it can.

    Args:
        model: The causal language model.
        config: The complete generation config.
        assistant: The assistant model, or None.
        rows: Sequences in the call.
    """
    if not is_transformers(model, "_assisted_decoding", "_get_candidate_generator"):
        return "the model overrides transformers' assisted decoding"
    if rows * int(config.num_return_sequences or 1) > 1:
        return "assisted decoding takes one sequence"  # transformers raises this error
    for name in ("assistant_early_exit", "use_mtp", "speculation_type"):
        if getattr(config, name, None):
            return f"{name} is set"
    if type(assistant).__name__.startswith(_READS_HIDDEN):
        return "the assistant reads the model's hidden states"
    return None


def longest_assisted(config: Any, most_positions: int | None) -> int:
    """Return the most tokens that a step may see, those proposed beyond the maximum length included."""
    longest = int(config.max_length) + int(config.prompt_lookup_num_tokens or 0)
    return longest if most_positions is None else min(longest, most_positions)


class Assisted(StandIn):
    """Stands in for the model in transformers' assisted decoding, which takes one sequence."""

    def decode(
        self,
        ids: Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        *,
        inputs: Mapping[str, Any],
        streamer: Any,
        helpers: Mapping[str, Any],
    ) -> Any:
        """Run transformers' assisted decoding and return its output, whose cache is a stand-in.

        Args:
            ids: `(1, S)` int64.
            processors: Called on `(1, V)` float32 logits, once for each token that is proposed.
            criteria: Called on the tokens so far.
            config: The complete generation config.
            inputs: What transformers would pass to the model, which an assistant gets, too.
            streamer: The user's, or None.
            helpers: `assistant_model` and the two tokenizers as the call gave them, if it did.
        """
        mode = config.get_generation_mode(helpers.get("assistant_model"))
        self._model._validate_generation_mode(mode, config, dict(helpers))  # type: ignore[operator]
        loop: Callable[..., Any] = self._assisted_decoding
        given = {**inputs, "use_cache": True, "past_key_values": _Cache()}
        with self.released():
            return loop(
                ids, processors, criteria, config, streamer=streamer, inputs_tensor=ids, **helpers, **given
            )

    def __call__(self, input_ids: Tensor, logits_to_keep: int, past_key_values: _Cache, **_: Any) -> Any:
        """Run what is new in `(1, L + n)`; logits `(1, n + 1, V)` float32 with `logits_to_keep` of n + 1."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        self._batch.hold(input_ids)
        logits = self._batch.last_logits(logits_to_keep)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any, **_: Any
    ) -> dict[str, Any]:
        """Return the arguments of the next forward, of which the loop sets `logits_to_keep`."""
        return {"input_ids": input_ids, "past_key_values": past_key_values, "logits_to_keep": 1}

    def _get_candidate_generator(self, **given: Any) -> Any:
        """Return transformers' generator, whose proposals stay within the batch."""
        own: Callable[..., Any] = type(self._model)._get_candidate_generator  # type: ignore[attr-defined]
        generator, room = own(self._model, **given), self._batch.room
        propose, itself = type(generator).get_candidates, weakref.ref(generator)  # a cycle would keep batches

        def within(ids: Tensor, **others: Any) -> tuple[Tensor, Tensor | None]:
            proposed, logits = propose(itself(), ids, **others)
            logits = None if logits is None else logits[:, : room - ids.shape[1]]
            return proposed[:, :room], logits

        generator.get_candidates = within
        return generator


class _Cache:
    """Stands in for the cache in transformers' loop: the batch drops what was not accepted by itself."""

    def activate_past_recording(self) -> None:
        """Do nothing: every token's keys and values are kept."""

    def crop(self, count: int) -> None:
        """Do nothing: `Batch.hold` compares the tokens."""

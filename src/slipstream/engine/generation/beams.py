"""Beam search on the engine road: transformers' own search over a model whose forwards run a packed batch.

Shapes: B batch, W beams of each row, S prompt (padded), L tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.stand_in import StandIn, is_transformers

__all__ = ["BEAMS", "Searched", "samples", "searches"]

BEAMS = ("beam_search", "beam_sample")
"""Transformers' names of the beam modes."""


def searches(model: nn.Module) -> bool:
    """Whether this model's beam search is transformers' own, the only one that the engine road supports."""
    return is_transformers(model, "_beam_search", "_prefill")


def samples(model: nn.Module) -> bool:
    """Whether this model's greedy search and sampling are transformers' own."""
    return is_transformers(model, "_sample")


class Searched(StandIn):
    """Stands in for the model in transformers' beam search."""

    def __init__(self, model: nn.Module, batch: Batch, beams: int) -> None:
        """Stand in for a model.

        Args:
            model: Has transformers' `_beam_search`.
            batch: The prompts, which have not run: B rows, or all B * W rows if `beams` is 1.
            beams: The number of rows into which each row is forked once its prompt has run (W).
        """
        super().__init__(model, batch)
        self._beams, self._begins = beams, True

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        """Run the step after the tokens `(B * W, L)`; the output's logits are `(B * W, 1, V)` float32."""
        from transformers.modeling_outputs import CausalLMOutput

        if not self._begins:
            self._batch.append(input_ids[:, -1:])
        logits = self._batch.logits()
        if self._begins and self._beams > 1:
            self._batch.fork(self._beams)
            logits = logits.repeat_interleave(self._beams, dim=0)
        self._begins = False
        return CausalLMOutput(logits=logits[:, None])

    def search(self, ids: Tensor, processors: Any, criteria: Any, config: Any) -> Any:
        """Run transformers' beam search and return its output, in which the cache is None.

        Args:
            ids: `(B * W, S)` int64.
            processors: Called on `(B * W, V)` float32 log-probabilities.
            criteria: Called on the tokens of all candidates.
            config: The complete generation config.
        """
        search: Callable[..., Any] = self._beam_search
        # The cache is None, but the key must be there: without it the search would not call `_reorder_cache`.
        kept = {"use_cache": True, "past_key_values": None}
        with self.released():
            return search(ids, processors, criteria, config, **kept)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> Mapping[str, Tensor]:
        """Return the arguments of the next forward."""
        return {"input_ids": input_ids}

    def _reorder_cache(self, cache: None, rows: Tensor) -> None:
        """Continue row i from row `rows[i]`, `(B * W,)`."""
        self._batch.follow(rows.tolist())

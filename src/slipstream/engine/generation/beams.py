"""Beam search on the engine road: transformers' own search, whose forwards are steps of a packed batch.

Shapes: B batch, W beams of each row, S prompt (padded), L tokens so far, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from slipstream.engine.generation.batch import Batch

__all__ = ["BEAMS", "Searched", "samples", "searches"]

BEAMS = ("beam_search", "beam_sample")
"""Transformers' names of the modes."""


def searches(model: nn.Module) -> bool:
    """Whether beam search of this model is transformers' own, which is all that the road knows."""
    return _is_transformers(model, "_beam_search", "_prefill")


def samples(model: nn.Module) -> bool:
    """Whether greedy search and sampling of this model are transformers' own."""
    return _is_transformers(model, "_sample")


def _is_transformers(model: nn.Module, *methods: str) -> bool:
    from transformers import GenerationMixin

    return all(getattr(type(model), name, None) is getattr(GenerationMixin, name) for name in methods)


class Searched:
    """A model as transformers' beam search sees it: each forward is the next step of a batch.

    Everything else is the model's, whose methods find this object in its place.
    """

    def __init__(self, model: nn.Module, batch: Batch, beams: int) -> None:
        """Take the place of a model.

        Args:
            model: Has transformers' `_beam_search`.
            batch: Its prompts have not run; of B rows, or of all B * W where `beams` is 1.
            beams: How many rows each row of the batch becomes once its prompt has run (W).
        """
        self._model, self._batch, self._beams, self._begins = model, batch, beams, True

    def __getattr__(self, name: str) -> Any:
        """The model's own; its methods are bound to this object."""
        found = inspect.getattr_static(type(self._model), name, None)
        own = MethodType(found, self) if isinstance(found, FunctionType) else getattr(self._model, name)
        if isinstance(found, FunctionType | staticmethod):
            vars(self)[name] = own  # looking takes longer than most calls
        return own

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        """The scores `(B * W, 1, V)` float32 that follow the tokens `(B * W, L)`."""
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
        """What transformers' beam search returns; in the place of its cache is nothing.

        Args:
            ids: `(B * W, S)` int64.
            processors: Called on `(B * W, V)` float32 log-probabilities.
            criteria: Called on the tokens of all candidates.
            config: Complete.
        """
        search: Callable[..., Any] = self._beam_search
        # There is nothing in the cache's place; that it has a name is what makes the search reorder it.
        kept = {"use_cache": True, "past_key_values": None}
        return search(ids, processors, criteria, config, **kept)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> Mapping[str, Tensor]:
        """What the next forward is given."""
        return {"input_ids": input_ids}

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        """The batch knows what a forward leaves."""
        return model_kwargs

    def _reorder_cache(self, cache: None, rows: Tensor) -> None:
        """Let each row go on as another did, `(B * W,)`."""
        self._batch.follow(rows.tolist())

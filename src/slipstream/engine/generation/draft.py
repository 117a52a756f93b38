"""An engine as the assistant of another model's generation: its tokens are held from one draft to the next.

Shapes: S tokens so far, those of the prompt included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.runner import Runner

__all__ = ["Drafter", "Held", "drafts"]


def drafts(runner: Runner) -> bool:
    """Whether an assistant's tokens can be held: they may be taken back, and states cannot."""
    keeps = all(block.spec.recurrence is None for block in runner.blocks)
    return keeps and not runner.takes_over and not runner.frame.angles_share_a_length


class Held:
    """Holds the batch of an assistant between its drafts, so that only what is new has to run."""

    def __init__(self, longest: int) -> None:
        """Hold nothing.

        Args:
            longest: The expected maximum number of tokens, padding included; more only cost another prompt.
        """
        self._longest = longest
        self._runner: Runner | None = None
        self._batch: Batch | None = None

    def batch(self, runner: Runner, ids: Tensor, mask: Tensor | None, most: int, budget: int) -> Batch:
        """Return a batch of the tokens `ids`, in which all that was in common with the last one has run.

        Args:
            runner: Runs the assistant; it has room for `most` positions.
            ids: `(1, S)` int64.
            mask: `(1, S)`, zero where the prompt is padded; read for a new batch only.
            most: Maximum number of tokens in this draft.
            budget: As of `Batch`.
        """
        if self._batch is not None and self._runner is runner and most <= self._batch.room:
            self._batch.hold(ids)
            return self._batch
        positions = runner.frame.max_positions
        room = max(self._longest, most if self._batch is None else 2 * most)
        room = room if positions is None else min(room, positions)
        self._runner = runner
        self._batch = Batch(runner, ids, mask, max_length=room, token_budget=budget)
        return self._batch


class Drafter:
    """An engine whose `generate` continues its last draft; everything else is the engine's."""

    def __init__(self, engine: Any, generate: Callable[..., Any], longest: int) -> None:
        """Stand in for an engine.

        Args:
            engine: The assistant.
            generate: As the engine's, with keyword arguments; `held` is where tokens are held.
            longest: As of `Held`.
        """
        self._engine, self._generate, self._held = engine, generate, Held(longest)

    def __getattr__(self, name: str) -> Any:
        """Return the engine's attribute."""
        return getattr(self._engine, name)

    def generate(self, **given: Any) -> Any:
        """Draft tokens; the output has no cache.

        Args:
            given: What transformers' candidate generators pass: `input_ids` `(1, S)` among them.
        """
        given.pop("position_ids", None)  # they count the tokens of the mask, as the engine does
        ids, mask = given["input_ids"], given.get("attention_mask")
        if mask is not None and mask.shape[1] != ids.shape[1]:
            # transformers extends the mask along with a cache, and none is returned here.
            more = ids.shape[1] - mask.shape[1]
            given["attention_mask"] = F.pad(mask, (0, more), value=1) if more > 0 else None
        return self._generate(given, self._held)

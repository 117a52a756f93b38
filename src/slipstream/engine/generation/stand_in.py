"""An object that stands in for the model in transformers' own loops.

Shapes: B batch, L tokens so far.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from slipstream.engine.generation.batch import Batch

__all__ = ["StandIn", "is_transformers"]


def is_transformers(model: nn.Module, *methods: str) -> bool:
    """Whether these methods of a model are transformers' own."""
    from transformers import GenerationMixin

    return all(getattr(type(model), name, None) is getattr(GenerationMixin, name) for name in methods)


class StandIn:
    """Stands in for the model in a loop of transformers: each forward runs the next step of a batch.

    All other attributes are the model's; its methods are called with this object as `self`.
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        """Stand in for a model.

        Args:
            model: Has transformers' `generate`.
            batch: The prompts, which have not run.
        """
        self._model, self._batch = model, batch

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute; its methods are bound to this object."""
        method = inspect.getattr_static(type(self._model), name, None)
        own = MethodType(method, self) if isinstance(method, FunctionType) else getattr(self._model, name)
        if isinstance(method, FunctionType | staticmethod):
            vars(self)[name] = own  # the lookup takes longer than most calls
        return own

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the batch at the end: methods bound to this object would keep it until a collection."""
        try:
            yield
        finally:
            vars(self).clear()

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        """Return the arguments unchanged: the batch keeps all state between forwards."""
        return model_kwargs

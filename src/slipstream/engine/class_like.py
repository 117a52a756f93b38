"""The class of a model's engines, which other libraries inspect as they inspect the model's own class."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

__all__ = ["class_like"]

_CONTAINER = ("__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__")
"""Methods that Python looks up on the class: those of `nn.Sequential`, from which whole models derive."""


@functools.cache
def class_like(engine_class: type[Any], model_class: type[nn.Module]) -> type[Any]:
    """Return a subclass of an engine class with a model class's name and the signature of its forward.

    Pipelines recognize supported models by class name. Trainer reads from the signature which columns of a
    dataset are inputs and which are labels, and torch.export the order of arguments.

    Args:
        engine_class: A subclass of `InferenceEngine`.
        model_class: The class of the engine's model.
    """
    own: dict[str, Any] = {"__module__": engine_class.__module__}
    own |= {name: _of_the_model(name) for name in _CONTAINER if hasattr(model_class, name)}
    if not issubclass(model_class, torch.jit.ScriptModule):  # whose class has no signature
        own["forward"] = _forward(engine_class, inspect.signature(model_class.forward))
    subclass = type(model_class.__name__, (engine_class,), own)
    subclass.__qualname__ = f"{engine_class.__qualname__}[{model_class.__qualname__}]"
    return subclass


def _of_the_model(name: str) -> Any:
    """Return a method that calls the model's method of that name."""

    def method(self: Any, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    method.__name__ = name
    return method


def _forward(engine_class: type[Any], signature: inspect.Signature) -> Any:
    """Return the engine class's forward as a function that shows another signature."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return engine_class.forward(self, *args, **kwargs)

    forward.__doc__ = engine_class.forward.__doc__
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward

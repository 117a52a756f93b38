"""Runs a user's model and undoes what the run changed in its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["forward_and_writes", "left_as_it_was"]


@contextmanager
def left_as_it_was(root: nn.Module) -> Iterator[None]:
    """Undo what a forward sets in its modules, such as the maximum length that a dynamic rotary module keeps.

    A module that a forward replaces (BigBird's attention, depending on the prompt's length) is put back, and
    hooks that transformers adds to modules whose outputs are requested are removed; it would add them again.
    A model that writes into its parameters (RWKV divides some of them in its first forward) records in an
    attribute that it has done so: if parameters were written to, attributes are not restored either.
    Embeddings with `max_norm` rescale the rows that they look up; those are put back.
    """
    with _embeddings_as_they_were(root), _modules_as_they_were(root):
        yield


@contextmanager
def _embeddings_as_they_were(root: nn.Module) -> Iterator[None]:
    limited = [module for module in root.modules() if getattr(module, "max_norm", None) is not None]
    tables = [module._parameters.get("weight") for module in limited]
    before = [(table, table.detach().clone()) for table in tables if table is not None and not table.is_meta]
    try:
        yield
    finally:
        for table, values in before:
            table.data.copy_(values)


@contextmanager
def _modules_as_they_were(root: nn.Module) -> Iterator[None]:
    before = [
        (module, dict(vars(module)), dict(module._buffers), dict(module._modules))
        for module in root.modules()
    ]
    hooks = [(module._forward_hooks, dict(module._forward_hooks)) for module in root.modules()]
    versions = _versions(root)
    try:
        yield
    finally:
        for module, own, buffers, parts in before if _versions(root) == versions else ():
            for name in vars(module).keys() - own.keys():
                del vars(module)[name]
            vars(module).update(own)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._modules.clear()
            module._modules.update(parts)
        for now, then in hooks:
            now.clear()
            now.update(then)


def forward_and_writes(module: nn.Module, *args: Tensor) -> tuple[Any, list[str]]:
    """Run a module's forward, without hooks, and undo what it changes.

    Returns:
        The output, and the names of the attributes that the forward set in the module or those inside it.
    """
    before = [(path, part, dict(vars(part))) for path, part in module.named_modules()]
    with left_as_it_was(module):
        output = module.forward(*args)
        written = [
            f"{path}.{name}" if path else name
            for path, part, own in before
            for name, value in vars(part).items()
            if name not in own or own[name] is not value
        ]
    return output, written


def _versions(root: nn.Module) -> list[tuple[int, int]]:
    """Return each parameter's id and version, which counts writes; inference tensors have none."""
    return [(id(p), p._version) for p in root.parameters() if not p.is_inference()]

"""Runs a user's model without a trace, or with all of the traces that belong together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["left_as_it_was"]


@contextmanager
def left_as_it_was(root: nn.Module) -> Iterator[None]:
    """Undo what a forward sets in its modules: a dynamic rotary module keeps the longest length it saw.

    A part that a forward puts in another's place (BigBird's attention, by a prompt's length) goes again.

    transformers puts hooks on parts whose outputs are asked for, and would do so again. A model that writes
    into its parameters (RWKV divides some of them before it answers for the first time) notes elsewhere that
    it has: what is noted stays where what was written does.
    """
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


def _versions(root: nn.Module) -> list[tuple[int, int]]:
    """How often each parameter was written to; those of inference mode do not tell."""
    return [(id(p), p._version) for p in root.parameters() if not p.is_inference()]

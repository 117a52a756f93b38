"""Counts who runs a model's layers: fused blocks, or the original's code."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slipstream.model.block import Block


class Calls:
    """Counts runs of blocks and of the original's layers: more of these means that original code ran."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.blocks = self.layers = 0
        self._original = layers

    def __enter__(self) -> Calls:
        self._call, counter = Block.__call__, self

        def counted(block: Block, *args: Any) -> Tensor:
            counter.blocks += 1
            return counter._call(block, *args)

        def called(*_: Any) -> None:
            counter.layers += 1

        Block.__call__ = counted  # type: ignore[method-assign,assignment]
        self._handles = [layer.register_forward_hook(called) for layer in self._original]
        return self

    def __exit__(self, *_: object) -> None:
        Block.__call__ = self._call  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()

"""Counts who runs a model's layers: fused blocks, or the original's code."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from tests.helpers.models import Ran, blocks_that_run


class Calls:
    """Counts runs of blocks and of the original's layers: more of these means that original code ran."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = 0
        self._original, self._stack = layers, ExitStack()

    @property
    def blocks(self) -> int:
        return len(self._ran.blocks)

    def __enter__(self) -> Calls:
        self._ran: Ran = self._stack.enter_context(blocks_that_run())

        def called(*_: Any) -> None:
            self.layers += 1

        for layer in self._original:
            self._stack.callback(layer.register_forward_hook(called).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

"""Counts how a model's layers run: as fused blocks, or by their original code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from torch import Tensor, nn

from slipstream.kernels.cpu.model import NativeSession
from tests.helpers.models import Ran, blocks_that_run


class Calls:
    """Counts runs of blocks and of the original model's layers.

    If the blocks of an engine ran less often than the original's layers, the engine ran original code.

    Attributes:
        layers: Number of runs of the original's layers.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = self._in_steps = 0
        self._original, self._stack = layers, ExitStack()

    @property
    def blocks(self) -> int:
        """Number of runs of blocks, including those of whole steps in native calls."""
        return len(self._ran.blocks) + self._in_steps

    def __enter__(self) -> Calls:
        self._ran: Ran = self._stack.enter_context(blocks_that_run())

        def called(*_: Any) -> None:
            self.layers += 1

        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, steps_of in (("_tokens", lambda tokens: tokens.shape[1]), ("logits", lambda _: 1)):
            patch.setattr(NativeSession, name, self._counting(getattr(NativeSession, name), steps_of))
        for layer in self._original:
            self._stack.callback(layer.register_forward_hook(called).remove)
        return self

    def _counting(self, run: Callable[..., Tensor | None], steps_of: Callable[[Tensor], int]) -> Any:
        def counted(session: NativeSession, *args: Any) -> Tensor | None:
            out = run(session, *args)
            if out is not None:
                self._in_steps += len(session._stack.blocks) * steps_of(out)
            return out

        return counted

    def __exit__(self, *_: object) -> None:
        self._stack.close()

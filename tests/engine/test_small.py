"""Which forwards keep torch to one thread: those of a few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from slipstream.engine.few_tokens import Small

FEW, MANY = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(3, 11, dtype=torch.int64)


@contextmanager
def alone() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("small", "given", "wanted"),
    [
        (Small(True, alone), {"input_ids": FEW}, True),
        (Small(True, alone), {"0": FEW, "use_cache": True}, True),
        (Small(True, alone), {"input_ids": MANY}, False),
        (Small(True, alone), {"input_ids": FEW[:0]}, False),
        (Small(True, alone), {"input_ids": FEW.float()}, False),
        (Small(True, alone), {"pixel_values": FEW}, False),
        (Small(False, alone), {"input_ids": FEW}, False),
        (Small(), {"input_ids": FEW}, False),
    ],
)
def test_a_forward_keeps_torch_to_one_thread_where_its_threads_gain_nothing(
    small: Small, given: dict[str, Any], wanted: bool
) -> None:
    assert (not isinstance(small.scope(given), nullcontext)) is wanted

"""Pages of mapped files are let go of, unless somebody wrote to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from slipstream.weights.mapped import MappedFiles
from tests.weights.test_finite import mapped_tensor, values_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")


def drop(*tensors: torch.Tensor) -> None:
    mapped = MappedFiles()
    mapped.drop(mapped.holding(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_that_were_read_are_dropped_and_have_the_same_values(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    values = values_of(dtype)
    tensor = mapped_tensor(tmp_path / "weights", values)
    assert torch.equal(tensor, values)
    assert MappedFiles().absent(tensor) is None  # for they are in memory now
    drop(tensor)
    assert MappedFiles().absent(tensor) is not None
    assert torch.equal(tensor, values)


@pytest.mark.parametrize("place", [(0, 0), (500, 77), (-1, -1)])
def test_what_was_written_stays(tmp_path: Path, place: tuple[int, int]) -> None:
    tensor = mapped_tensor(tmp_path / "weights", values_of(torch.float32))
    tensor[place] = 12.5
    written = tensor.clone()
    drop(tensor)
    assert torch.equal(tensor, written)


def test_what_lies_beside_a_tensor_stays(tmp_path: Path) -> None:
    whole = mapped_tensor(tmp_path / "weights", values_of(torch.float32))
    whole[0] = 1.0
    whole[-1] = 2.0
    written = whole.clone()
    drop(whole[20:-20])
    assert MappedFiles().absent(whole[20:-20]) is not None
    assert torch.equal(whole, written)


def test_memory_of_no_file_is_left_alone(tmp_path: Path) -> None:
    tensor = mapped_tensor(tmp_path / "weights", values_of(torch.float32))
    own, empty, meta = torch.ones(1000, 1000), tensor[:0], torch.empty(9, 9, device="meta")
    assert MappedFiles().holding([own, empty, meta, tensor.mT, tensor[:, 3:]]) == []
    drop(own)
    assert bool((own == 1.0).all())

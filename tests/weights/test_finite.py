"""NaN and infinity are found wherever weights lie, and what lies in files does not become resident by it."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.weights.finite import check_finite
from slipstream.weights.mapped import MappedFiles
from slipstream.weights.slot import TensorSource

ROWS, COLUMNS = 1031, 1031  # an odd number of bytes of several chunks and a rest
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")


def mapped_tensor(path: Path, values: Tensor) -> Tensor:
    """The values as transformers has them: memory of a file, of which nothing was read."""
    flat = values.contiguous().view(torch.uint8).numpy()
    path.write_bytes(b"\0" * 64 + flat.tobytes())
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(memory, dtype=values.dtype, offset=64).view(values.shape)


def values_of(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)).to(dtype)


@linux
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mapped_tensor_is_checked_and_stays_in_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = mapped_tensor(tmp_path / "weights", values_of(dtype))
    assert MappedFiles().absent(tensor) is not None
    check_finite(TensorSource({"w": tensor}))
    assert MappedFiles().absent(tensor) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (ROWS - 1, COLUMNS - 1), (500, 77)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_in_a_mapped_file_is_found(
    tmp_path: Path, dtype: torch.dtype, place: tuple[int, int], value: float
) -> None:
    values = values_of(dtype)
    values[place] = value
    with pytest.raises(WeightError, match="w hold NaN or infinity"):
        check_finite(
            TensorSource({"fine": values_of(dtype), "w": mapped_tensor(tmp_path / "weights", values)})
        )


@linux
def test_what_was_written_to_mapped_memory_counts_and_not_the_file(tmp_path: Path) -> None:
    tensor = mapped_tensor(tmp_path / "weights", values_of(torch.float32))
    tensor[700, 3] = float("nan")
    assert MappedFiles().absent(tensor) is None
    with pytest.raises(WeightError, match="w hold NaN"):
        check_finite(TensorSource({"w": tensor}))
    tensor[700, 3] = 0.0
    check_finite(TensorSource({"w": tensor}))


@linux
@pytest.mark.parametrize("replaced", [False, True])
def test_another_file_of_the_same_name_is_not_read(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "weights"
    tensor = mapped_tensor(path, values_of(torch.float32))
    path.unlink()
    if replaced:
        path.write_bytes(b"\xff" * (64 + tensor.nbytes))
    assert MappedFiles().absent(tensor) is None
    check_finite(TensorSource({"w": tensor}))


def test_the_largest_numbers_are_finite_though_their_sum_is_not(tmp_path: Path) -> None:
    for dtype in DTYPES:
        values = torch.full((ROWS, COLUMNS), torch.finfo(dtype).max, dtype=dtype)
        check_finite(TensorSource({"kept": values, "mapped": mapped_tensor(tmp_path / f"{dtype}", values)}))


def test_a_part_of_a_mapped_tensor_is_checked_alone(tmp_path: Path) -> None:
    values = values_of(torch.float32)
    values[10, 10] = float("inf")
    tensor = mapped_tensor(tmp_path / "weights", values)
    check_finite(TensorSource({"below": tensor[11:]}))
    check_finite(TensorSource({"beside": tensor[:, 11:]}))
    with pytest.raises(WeightError, match="hold NaN"):
        check_finite(TensorSource({"above": tensor[:11]}))

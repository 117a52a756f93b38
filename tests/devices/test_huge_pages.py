"""Weights in pages of 2 MB: the same numbers at the same addresses, where the system has such pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.devices import huge_pages
from slipstream.devices.huge_pages import in_huge_pages
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.weights.packed import is_packed, packed_matrices
from tests.helpers.models import make

MB = 1 << 20


def pages_of(tensor: Tensor) -> tuple[int, str]:
    """KB of huge pages in the mapping that a tensor lies in, and the flags of it."""
    found, flags, here = 0, "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and ":" not in first:
            begin, end = (int(number, 16) for number in first.split("-"))
            here = begin <= tensor.data_ptr() + 8 * MB < end
        elif here and first == "AnonHugePages:":
            found = int(line.split()[1])
        elif here and first == "VmFlags:":
            flags = line
    return found, flags


@pytest.mark.skipif(huge_pages._page_size() == 0, reason="this system has no huge pages for who asks")
@pytest.mark.parametrize("new", [False, True])
def test_a_tensor_stays_what_and_where_it_is(new: bool) -> None:
    tensor = torch.empty(32 * MB, dtype=torch.uint8)
    if not new:
        tensor.copy_(torch.arange(32 * MB) % 251)
    place = tensor.data_ptr()
    asked = in_huge_pages([tensor, tensor[5:], tensor.view(2, -1)], new=new)
    assert 30 * MB <= asked <= 34 * MB
    if new:
        tensor.copy_(torch.arange(32 * MB) % 251)
    assert tensor.data_ptr() == place and torch.equal(tensor, (torch.arange(32 * MB) % 251).byte())
    found, flags = pages_of(tensor)
    assert " hg" in flags  # which is all that can be promised: the system may have no such page left
    assert found % 2048 == 0


def test_what_does_not_lie_in_memory_is_left_out() -> None:
    nothing = (torch.empty(0), torch.empty(64 * MB, device="meta"), torch.eye(3).to_sparse())
    assert in_huge_pages(nothing) == 0
    assert in_huge_pages([torch.ones(1000)]) == 0  # a page that is next to empty


def test_what_is_mapped_from_a_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(16 * MB))
    for shared in (False, True):
        mapped = torch.from_file(str(tmp_path / "weights"), shared, 16 * MB, dtype=torch.uint8)
        assert in_huge_pages([mapped]) == 0


def test_a_page_counts_from_one_half_on() -> None:
    half = MB
    covered = {4: 2 * half, 5: half, 6: half - 1, 8: 2 * half, 7: 2 * half}
    assert huge_pages._runs(covered, 2 * half) == [(4, 6), (7, 9)]


@pytest.mark.parametrize(
    ("enabled", "size", "expected"),
    [
        ("always [madvise] never", "2097152", 2 * MB),
        ("[always] madvise never", "2097152", 2 * MB),
        ("always madvise [never]", "2097152", 0),
        ("always [madvise] never", "", 0),
        (None, None, 0),
    ],
)
def test_a_system_that_has_none_or_wants_none_is_not_asked(
    enabled: str | None, size: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if enabled is not None and size is not None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text(size)
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages._page_size() == expected
    if not expected:
        assert in_huge_pages([torch.ones(8 * MB)]) == 0


@pytest.mark.parametrize(
    "settings", [{}, {"quant": "int8"}, {"replace_with_kernel_inject": False, "quant": "int4"}]
)
def test_an_engine_asks_for_all_that_its_weights_are_in(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[int] = set()

    def spy(tensors: Iterable[Tensor]) -> int:
        asked.update(tensor.data_ptr() for tensor in tensors)
        return 0

    monkeypatch.setattr("slipstream.engine.engine.in_huge_pages", spy)
    settings = {"dtype": torch.float32, "replace_with_kernel_inject": True, **settings}
    engine = slipstream.init_inference(make("llama"), **settings)
    blocks = [injected_state(m).block for m in engine.module.modules() if is_injected(m)]
    held = [plane for b in blocks for weight in b.weights.matrices.values() for plane in weight.planes]
    assert bool(held) == settings["replace_with_kernel_inject"]
    assert {tensor.data_ptr() for tensor in held} <= asked
    assert engine.module.model.embed_tokens.weight.data_ptr() in asked
    packed = [packed_matrices(m) for m in engine.module.modules() if is_packed(m)]
    assert {
        plane.data_ptr() for ms in packed for weight, _ in ms.values() for plane in weight.planes
    } <= asked


def test_weights_that_are_streamed_are_left_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.engine.in_huge_pages", lambda _: pytest.fail("asked"))
    slipstream.init_inference(
        make("llama"),
        dtype=torch.float32,
        replace_with_kernel_inject=True,
        zero={"stage": 3, "offload_param": {"device": "cpu"}},
    )

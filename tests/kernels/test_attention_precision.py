"""Attention in bfloat16 is as exact as torch's own, a split cache leaves no trace, a NaN stays one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.attention import NativeAttention, refuse_call
from slipstream.kernels.cpu.library import EMULATED, ISAS, Library, load
from slipstream.kernels.cpu.paged_attention import native_paged_attention
from slipstream.ops.attention import attention
from slipstream.ops.step import AttentionMask, Step
from tests.helpers.libraries import library

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


def heads(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rms(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 3.0], ids=["flat", "peaked"])
def test_bfloat16_is_as_exact_as_torch(isa: str, causal: bool, size: float) -> None:
    q, k, v = (
        heads(2, n, 300, 64, seed=i, size=size if i < 2 else 1.0).bfloat16() for i, n in enumerate((4, 2, 2))
    )
    exact = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch_s = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    ours = NativeAttention(library(isa))(q, k, v, mask=None, causal=causal, scale=64**-0.5)
    assert rms(ours - exact) <= 1.5 * rms(torch_s - exact)


def decode(length: int, threads: int, lib: Library, **mask: Any) -> Tensor:
    pages = -(-length // 32)
    k, v = (heads(pages, 32, 2, 40, seed=seed) for seed in (1, 2))
    step = Step(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([length - 1]),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        slots=torch.tensor([length - 1]),
        logit_rows=torch.tensor([0]),
        max_query_len=1,
        max_kv_len=length,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return native_paged_attention(
            heads(1, 6, 40, seed=3), k, v, step, mask=AttentionMask(40**-0.5, **mask), library=lib
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("length", [255, 256, 257, 1000, 2049])
@pytest.mark.parametrize("mask", ["plain", "window", "sinks"])
def test_a_cache_split_over_threads_gives_the_answer_of_one(isa: str, length: int, mask: str) -> None:
    given = {"plain": {}, "window": {"window": 200}, "sinks": {"sinks": heads(6, seed=4)}}[mask]
    lib = library(isa)
    # float32: what is summed in another order differs by a few roundings.
    torch.testing.assert_close(
        decode(length, 2, lib, **given), decode(length, 1, lib, **given), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_a_nan_is_passed_on(isa: str) -> None:
    for spoiled in range(3):
        tensors = [heads(1, 2, 70, 16, seed=seed) for seed in range(3)]
        tensors[spoiled][0, 0, 40, 3] = torch.nan
        out = NativeAttention(library(isa))(*tensors, mask=None, causal=False, scale=0.25)
        wrong = out[0, 40, 0] if spoiled == 0 else out[0, :, 0]
        assert bool(wrong.isnan().any())
        assert bool(out[0, :, 1].isfinite().all())


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize(
    "sink", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -torch.inf, -1e30]
)
@pytest.mark.parametrize("queries", [4, 64])
def test_the_lowest_sinks_weigh_nothing(queries: int, sink: float, isa: str) -> None:
    q, k, v = (heads(1, 2, count, 32, seed=seed) for seed, count in enumerate((queries, 80, 80)))
    options: dict[str, Any] = {"mask": None, "causal": True, "scale": 0.2}
    got = NativeAttention(library(isa))(q, k, v, **options, sinks=torch.full((2,), sink))
    torch.testing.assert_close(got, attention(q, k, v, **options), atol=1e-5, rtol=1e-5)


def test_a_stride_that_no_index_uses_may_be_of_any_size() -> None:
    q, k, v = (heads(1, 2, 70, 16, seed=seed) for seed in range(3))
    options: dict[str, Any] = {"mask": None, "causal": False, "scale": 0.25}
    own = q.stride()
    far = q.as_strided(q.shape, (1 << 33, *own[1:]))  # of a batch of one
    run = NativeAttention(library("baseline"))
    assert torch.equal(run(far, k, v, **options), run(q, k, v, **options))
    with FakeTensorMode():  # which has no memory
        several = torch.empty(1 << 32).as_strided((2, 2, 70, 16), (1 << 31, 1120, 16, 1))
        assert "a stride of" in str(refuse_call(several, several, several, None, None))
        mask = torch.empty(2, 1, 1 << 16, 1 << 16, dtype=torch.bool)
        short = torch.empty(2, 2, 1 << 16, 16)
        assert "a stride of" in str(refuse_call(short, short, short, mask, None))


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_rows_that_see_nothing_are_as_torch_has_them(isa: str) -> None:
    q, k, v = (heads(2, 2, 20, 16, seed=seed) for seed in range(3))
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    mask[0, :, :, :5] = False
    lowest = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    mixed = lowest.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    for given in (mask, lowest, mixed):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=given, scale=0.25).transpose(1, 2)
        got = NativeAttention(library(isa))(q, k, v, mask=given, causal=False, scale=0.25)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("queries", [1, 40])
def test_masks_that_leave_sequences_of_very_different_lengths(isa: str, queries: int) -> None:
    seen = torch.tensor([1, 130, 1500])
    q, (k, v) = heads(3, 2, queries, 16), (heads(3, 2, 1500, 16, seed=seed) for seed in (1, 2))
    mask = (torch.arange(1500) < seen[:, None])[:, None, None]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = NativeAttention(library(isa))(q, k, v, mask=mask, causal=False, scale=0.25)
    finally:
        torch.set_num_threads(before)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25).transpose(1, 2)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_queries_of_several_large_tiles_meet_all_keys(isa: str, masked: bool) -> None:
    attend = NativeAttention(library(isa))
    for many, shared, queries, keys, dim in ((8, 4, 700, 77, 40), (4, 4, 1030, 65, 160), (9, 3, 513, 3, 24)):
        q = heads(2, many, queries, dim)
        k, v = (heads(2, shared, keys, dim, seed=seed) for seed in (1, 2))
        mask = heads(2, 1, queries, keys, seed=3) if masked else None
        got = attend(q, k, v, mask=mask, causal=False, scale=dim**-0.5).transpose(1, 2)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

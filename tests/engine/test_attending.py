"""Level `module`: attention is recognised by what it computes, and is the op's where that says the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.kernels.cpu import attention as native
from slipstream.model.parts import attention_calls as attending
from slipstream.model.parts.attention_calls import Attending, Attends, is_attending
from slipstream.model.parts.scores import Scores
from slipstream.ops import attention as op
from slipstream.ops.bind import Facts, bind

BATCH, HEADS, LENGTH, DIM = 2, 3, 9, 8
WIDTH = HEADS * DIM
TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
PADDED = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
PADDED[0, ..., -3:] = False
LEFT = PADDED.flip(-1) & TRIANGLE
"""The first queries of the first row see nothing."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Answers of size one, in sums of another order; in 16 bits the original rounds its scores and weights."""


def bound(dtype: torch.dtype) -> Callable[..., Tensor]:
    run = bind(op.OP, Facts(torch.device("cpu"), dtype), native.KERNELS)
    return run.run


def lowest(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


def hiding(q: Tensor, seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, lowest(q))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(DIM), dim=-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * DIM**-0.5
    scores = scores.masked_fill(TRIANGLE[None, None] == 0, float("-inf"))
    # A view, which wants the product's memory to lie as torch's does.
    return torch.matmul(scores.softmax(-1), v).view(BATCH * HEADS, LENGTH, DIM)


def by_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 0.3 * torch.einsum("bhqd,bhkd->bhqk", q, k) + hiding(q, PADDED)
    weights = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), 0.1, training=False)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def in_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.reshape(BATCH * HEADS, LENGTH, DIM) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(BATCH, HEADS, LENGTH, LENGTH) + hiding(q, PADDED)
    return torch.bmm(F.softmax(scores.view(BATCH * HEADS, LENGTH, LENGTH), dim=-1), v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    seen_elsewhere = scores.view(BATCH * HEADS, LENGTH, LENGTH)
    scores *= 0.5
    scores += torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    scores.masked_fill_(~TRIANGLE, lowest(q))
    return torch.softmax(seen_elsewhere.view(BATCH, HEADS, LENGTH, LENGTH), -1) @ v


def by_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(TRIANGLE, q @ k.mT, torch.full([], lowest(q), dtype=q.dtype))
    return scores.softmax(-1) @ v


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k[:, :1].transpose(-1, -2), dim=-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v


def blind_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT + hiding(q, LEFT)).softmax(-1) @ v


def other_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def scaled_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT + hiding(q, PADDED).clamp(min=-20)) * 0.2).softmax(-1) @ v


def weighted_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return (weights @ v) + 2 * (weights.transpose(-1, -2) @ v)


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=PADDED & TRIANGLE)


def by_torch_blind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=LEFT)


def by_torch_biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=0.2)


def by_torch_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # As heads beside each other within a token, and viewed so again.
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)


SERVED = (plain, causal, by_letters, in_rows, in_place, by_where, by_torch)
SERVED += (by_torch_blind, by_torch_biased, by_torch_causal)
PASSED_BY = (one_key_head, capped, blind_rows, other_axis, scaled_late)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("written", [*SERVED, *PASSED_BY, weighted_twice])
def test_attention_is_served_or_left_alone_however_it_is_written(
    written: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator).to(dtype) for _ in range(3))
    attends = Attends(bound(dtype), always=True)
    mode = Attending(attends)
    with torch.no_grad():
        expected = written(q, k, v)
        with mode:
            got = written(q, k, v)
    torch.testing.assert_close(got + 0, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not attends.refused
    assert got.is_contiguous() or got.stride() == expected.stride()
    if written is not weighted_twice:
        assert bool(attends.served) == (written in SERVED)


def test_weights_that_somebody_keeps_are_the_tensor_that_they_were() -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM).unbind()
    attends = Attends(bound(torch.float32), always=True)
    mode = Attending(attends)
    with torch.no_grad(), mode:
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
    assert isinstance(weights, Scores)
    assert (weights.shape, weights.dtype, weights.device) == (
        (BATCH, HEADS, LENGTH, LENGTH),
        q.dtype,
        q.device,
    )
    mode.settle()
    expected = (q @ k.mT).softmax(-1)
    k.zero_()  # a cache goes on being written to
    torch.testing.assert_close(weights + 0, expected)
    torch.testing.assert_close(torch.from_numpy(weights.numpy()), expected)
    torch.testing.assert_close(copy.deepcopy(weights) * 1, expected)
    assert repr(weights) == repr(expected)
    assert attends.served == 1
    torch.testing.assert_close(out, expected @ v)


def test_an_op_that_answers_otherwise_is_found_out_at_the_first_call() -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM).unbind()
    right = bound(torch.float32)

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        return right(*args, **kwargs) * 1.01

    for written in (plain, by_torch):
        attends = Attends(wrong, always=True)
        with torch.no_grad(), Attending(attends):
            got = written(q, k, v)
        torch.testing.assert_close(got + 0, written(q, k, v))
        assert attends.refused
        assert attends.served == 0


def test_a_call_too_large_to_be_made_both_ways_waits_for_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, LENGTH, DIM).unbind()
    attends = Attends(bound(torch.float32), always=True)
    served = []
    for most in (BATCH * HEADS * LENGTH * LENGTH - 1, BATCH * HEADS * LENGTH * LENGTH, 0):
        monkeypatch.setattr(attending, "_MOST_PROVED", most)
        with torch.no_grad(), Attending(attends):
            plain(q, k, v)
            by_torch(q, k, v)
        served.append(attends.served)
    assert served == [0, 2, 4]


class Attention(nn.Module):
    """A decoder's, with a cache and a mask of its own making; its weights are handed on."""

    def __init__(self, *, by_torch: bool) -> None:
        super().__init__()
        self.q, self.kv, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(0.1)
        self.by_torch = by_torch

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Tensor | None = None) -> Any:
        q, *kv = (
            t.view(*x.shape[:2], HEADS, DIM).transpose(1, 2)
            for t in (self.q(x), *self.kv(x).chunk(2, dim=-1))
        )
        k, v = kv if past is None else torch.cat((past, torch.stack(kv)), dim=3).unbind()
        if self.by_torch:
            out, weights = F.scaled_dot_product_attention(q, k, v, attn_mask=mask), None
        else:
            scores = q @ k.transpose(-1, -2) * DIM**-0.5
            weights = self.drop((scores if mask is None else scores.masked_fill(~mask, -1e9)).softmax(dim=-1))
            out = weights @ v
        out = self.out(out.transpose(1, 2).contiguous().view(*x.shape))
        return out, weights, torch.stack((k, v))


class Layer(nn.Module):
    def __init__(self, *, by_torch: bool = False, keeps: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(by_torch=by_torch)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.keeps = keeps

    def forward(self, x: Tensor, mask: Tensor | None = None, past: Tensor | None = None) -> Any:
        out, weights, past = self.attention(self.norm(x), mask, past)
        return x + out + self.mlp(x + out), past, weights if self.keeps else None


class Decoder(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, ids: Tensor, seen: Tensor | None = None, pasts: Any = (None, None)) -> Any:
        x, kept = self.words(ids), []
        total = ids.shape[1] + (0 if pasts[0] is None else pasts[0].shape[3])
        mask = torch.ones(ids.shape[1], total, dtype=torch.bool).tril(total - ids.shape[1])[None, None]
        mask = mask if seen is None else mask & seen[:, None, None]
        maps = []
        for layer, past in zip(self.layers, pasts, strict=True):
            x, past, weights = layer(x, mask, past)
            kept.append(past)
            maps.append(weights)
        return self.head(x), kept, maps


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes from which the op runs are those of real models; these here are small."""
    monkeypatch.setattr(attending, "_WORK", dict.fromkeys(attending._WORK, (0, 0, 0)))
    monkeypatch.setattr(attending, "_ENTRIES", dict.fromkeys(attending._ENTRIES, (0, 0)))


def engine_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> slipstream.InferenceEngine:
    return slipstream.init_inference(model, dtype=dtype, replace_with_kernel_inject=True)


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small")
def test_a_decoder_of_ones_own_attends_by_the_op_with_padding_and_upon_its_cache(
    by_torch: bool, dtype: torch.dtype
) -> None:
    model = Decoder(by_torch=by_torch).eval().to(dtype)
    original = copy.deepcopy(model)
    engine = engine_of(model, dtype)
    row = engine.report().layers[0]
    # The weights leave the module that makes them, and the layer drops them.
    assert row.parts["attention" if by_torch else ""] == "attention"
    assert "attention" in str(engine.report())
    ids = torch.randint(0, 40, (2, 11))
    seen = torch.ones(2, 11, dtype=torch.bool)
    seen[0, -4:] = False
    given = (None, None)
    ours: Any = given
    with torch.no_grad():
        for step in (ids, ids[:, :1], ids[:, 3:5]):
            mask = None if seen is None else seen
            expected, given, _ = original(step, mask, given)
            got, ours, _ = engine(step, mask, ours)
            torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype] * 5, atol=TOLERANCE[dtype] * 5)
            seen = None
    place = model.layers[1] if not by_torch else model.layers[1].attention
    assert is_attending(place)
    assert vars(place)["_slipstream_attends"].served == 3
    assert isinstance(place, Layer | Attention)


@pytest.mark.usefixtures("small")
def test_weights_that_a_layer_hands_on_are_made_by_its_own_code() -> None:
    model = Decoder(keeps=True).eval()
    original = copy.deepcopy(model)
    engine = engine_of(model)
    assert engine.report().layers[0].refused["attention"] == "it returns its attention weights"
    ids = torch.randint(0, 40, (2, 7))
    with torch.no_grad():
        for got, expected in zip(engine(ids)[2], original(ids)[2], strict=True):
            assert type(got) is Tensor
            torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("small")
def test_gradients_go_through_the_layers_own_code() -> None:
    model = Decoder().eval()
    original = copy.deepcopy(model)
    engine_of(model)
    ids = torch.randint(0, 40, (2, 7))
    for one in (model, original):
        one(ids)[0].square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_calls_too_small_to_gain_run_their_own_code() -> None:
    model = Decoder().eval()
    engine = engine_of(model)
    with torch.no_grad():
        engine(torch.randint(0, 40, (2, 7)))
    assert vars(model.layers[0])["_slipstream_attends"].served == 0


@pytest.mark.usefixtures("small")
def test_a_copy_a_hook_and_a_trace_find_the_module_as_it_was() -> None:
    model = Decoder(by_torch=True).eval()
    ids = torch.randint(0, 40, (2, 7))
    with torch.no_grad():
        expected = model(ids)[0]
        engine = engine_of(model)
        copied = copy.deepcopy(model)
        torch.testing.assert_close(copied(ids)[0], expected)
        seen: list[Any] = []
        model.layers[0].attention.register_forward_hook(lambda module, args, out: seen.append(out[0]))
        torch.testing.assert_close(engine(ids)[0], expected)
        assert len(seen) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = Attention.forward(model.layers[0].attention, seen[0])
            torch.testing.assert_close(model.layers[0].attention(seen[0])[0], theirs[0], rtol=0, atol=0)

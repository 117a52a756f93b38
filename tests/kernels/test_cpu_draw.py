"""A token by chance on every instruction set: what may be drawn, torch's own noise, and what is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError, RequestError
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi_model import Draw, DrawCall
from slipstream.kernels.cpu.draw import KERNELS, native_draw, noise_is_torchs
from slipstream.kernels.cpu.library import EMULATED, ISAS, Library, load
from slipstream.ops.bind import Kernel
from slipstream.ops.draw import Warp, draw
from slipstream.ops.penalty import Penalty
from tests.helpers.libraries import library

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)
EACH_ISA = pytest.mark.parametrize("isa", (*ISAS, EMULATED))
HIDDEN = float("-inf")


def of(*shape: int, width: float = 3.0, seed: int = 1) -> Tensor:
    return width * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_drawn(scores: Tensor, warp: Warp, run: Any) -> Tensor:
    """Which tokens `(V,)` are drawn where the noise of each is least by far."""
    count = scores.numel()
    noise = torch.ones(count, count).fill_diagonal_(1e-30)
    found = run(scores.expand(count, -1).contiguous(), noise, warp.numbers(count, scores.device))
    return found == torch.arange(count)


KINDS = {
    "of any size": of(601),
    "of few sizes": of(601).round(),
    "all equal": torch.zeros(333),
    "near each other": of(601, width=1e-4),
    "far apart": of(601, width=60.0),
    "sorted": of(601).sort().values,
    "sorted the other way": of(601).sort(descending=True).values,
    "one that stands out": torch.cat([torch.zeros(300), torch.tensor([40.0]), torch.zeros(37)]),
    "most are hidden": of(601).masked_fill(torch.arange(601) % 7 != 3, HIDDEN),
    "all but one are hidden": torch.full((97,), HIDDEN).index_fill(0, torch.tensor([41]), 2.0),
    "nearly equal": of(601, width=1e-30),
    "further apart than floats reach": torch.tensor([2e38] * 200 + [-2e38] * 401) + of(601) * 1e36,
    "zeros of both signs": torch.tensor([0.0, -0.0]).repeat(50),
}
WARPS = [
    Warp(0.7),
    Warp(1.0, top_k=1),
    Warp(1.7, top_k=13),
    Warp(0.9, top_k=299),
    Warp(1.0, top_p=0.3),
    Warp(2.0, top_p=0.93),
    Warp(0.8, top_p=0.0),
    Warp(1.0, top_k=500, top_p=0.01),
    Warp(1.3, top_k=90, top_p=0.8, min_p=0.05),
    Warp(1.0, min_p=1.0),
]


@EACH_ISA
@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_may_be_drawn_as_by_the_reference(kind: str, warp: Warp, isa: str) -> None:
    loaded = library(isa)
    scores = KINDS[kind]
    expected = all_drawn(scores, warp, draw)
    got = all_drawn(scores, warp, lambda *given: native_draw(*given, library=loaded))
    assert expected.any()
    if warp.top_p == 1:
        assert torch.equal(got, expected)
        return
    # The share of a nucleus is a sum of rounded chances: one token at its edge may be on either side. Which
    # of equal ones go is left to torch's sort, whose order differs between processors; here the first do.
    fewer, more = sorted((scores[got].sort().values, scores[expected].sort().values), key=len)
    assert len(more) - len(fewer) <= 1
    assert torch.equal(fewer, more[len(more) - len(fewer) :])
    edge = (scores == scores[got].min()).nonzero()
    assert got[edge].int().diff(dim=0).ge(0).all()


@EACH_ISA
@pytest.mark.parametrize("used", [0, 1, 7, 623, 624, 625, 5000])
def test_noise_is_what_torch_makes_and_the_generator_goes_on_likewise(isa: str, used: int) -> None:
    loaded = library(isa)
    if not noise_is_torchs():
        pytest.skip("torch makes noise in another way on this machine")
    scores, numbers = of(3, 1009), Warp(1.3, top_k=400).numbers(1009, torch.device("cpu"))
    results = []
    for run in (draw, lambda *given: native_draw(*given, library=loaded)):
        torch.manual_seed(5)
        torch.empty(used, dtype=torch.int32).random_()  # a word each
        tokens = [run(scores, None, numbers) for _ in range(12)]
        results.append((torch.stack(tokens), torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_noise_of_many_rows_is_made_in_parts() -> None:
    loaded = load()
    assert loaded is not None
    rows, vocabulary = 5, 300_000  # three of which have 8 MB of words
    scores, numbers = of(rows, vocabulary, width=0.1), Warp(1.1).numbers(vocabulary, torch.device("cpu"))
    results = []
    for run in (draw, lambda *given: native_draw(*given, library=loaded)):
        torch.manual_seed(6)
        results.append([*(run(scores, None, numbers) for _ in range(2)), torch.get_rng_state()])
    assert all(map(torch.equal, *results))


@EACH_ISA
def test_scores_in_other_dtypes_are_those_numbers(isa: str) -> None:
    loaded = library(isa)
    numbers, noise = Warp(0.8, top_k=20).numbers(300, torch.device("cpu")), torch.rand(2, 300) + 0.1
    for dtype in (torch.bfloat16, torch.float16):
        scores = of(2, 300).to(dtype)
        expected = draw(scores, noise, numbers)
        assert torch.equal(native_draw(scores, noise, numbers, library=loaded), expected)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.op} {kernel.name}")
def test_scores_that_lie_otherwise_take_the_same_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    library(kernel.name.removeprefix("cpu-"))
    wide = of(4, 301)[:, :300]  # as transformers' penalty for repetitions leaves them
    torch.manual_seed(9)
    expected = draw(wide, None, Warp().numbers(300, wide.device))
    monkeypatch.setattr("slipstream.ops.draw.draw", None)
    torch.manual_seed(9)
    if kernel.op == "sample":
        got = kernel.run(wide, greedy=False)
    else:
        got = kernel.run(wide, None, Warp().numbers(300, wide.device))
    assert torch.equal(got, expected)


@EACH_ISA
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_scores_that_nothing_can_be_drawn_from_are_refused(isa: str, value: float | None) -> None:
    loaded = library(isa)
    scores = of(3, 70)
    scores[1, 68 if value is not None else slice(None)] = HIDDEN if value is None else value
    noise, numbers = torch.ones(3, 70), Warp(0.8, top_k=20).numbers(70, scores.device)
    with pytest.raises(RequestError, match=r"row 1: no token can be drawn.*float16 may overflow"):
        native_draw(scores, noise, numbers, library=loaded)


def chosen(
    scores: Tensor, penalty: Penalty, noise: Tensor | None, warp: Warp, loaded: Library, rows: list[int]
) -> Tensor:
    """What the library chooses in one step: drawn, or without noise the best."""
    numbers, out = warp.numbers(scores.shape[1], scores.device), torch.empty(len(rows), dtype=torch.int64)
    struct = Draw(
        numbers=numbers.data_ptr(),
        noise=None if noise is None else noise.data_ptr(),
        places=(places := torch.tensor(rows)).data_ptr(),
        seen=penalty.seen.data_ptr(),
        rows=penalty.seen.shape[0],
        penalty=penalty.factor,
        best=noise is None,
    )
    call = DrawCall(scores.data_ptr(), out.data_ptr(), *scores.shape, 0, 0, struct)
    loaded.run("draw", call)
    assert len(places) == len(out)
    return out


@EACH_ISA
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("vocabulary", [3, 64, 1213])
def test_tokens_that_were_seen_are_penalised(vocabulary: int, greedy: bool, isa: str) -> None:
    loaded, rows, warp = library(isa), [3, 0, 2], Warp(0.9, top_k=min(50, vocabulary))
    ids = torch.randint(0, vocabulary, (4, vocabulary // 3), generator=torch.Generator().manual_seed(2))
    ours, theirs = Penalty(1.7, ids, vocabulary), Penalty(1.7, ids, vocabulary)
    for seed in range(8):
        scores = of(3, vocabulary, seed=seed) + 2 * (seed % 3 - 1)
        noise = torch.rand(4, vocabulary, generator=torch.Generator().manual_seed(seed)) + 0.1
        lowered = theirs.of(rows)(scores)
        expected = (
            lowered.argmax(-1)
            if greedy
            else draw(lowered, noise[rows], warp.numbers(vocabulary, scores.device))
        )
        got = chosen(scores, ours, None if greedy else noise, Warp() if greedy else warp, loaded, rows)
        assert torch.equal(got, expected)
        for row, token in zip(rows, expected.tolist(), strict=True):
            theirs.seen[row, token] = True
        assert torch.equal(ours.seen, theirs.seen)


@EACH_ISA
def test_the_best_of_scores_that_are_no_numbers_is_the_first_of_those(isa: str) -> None:
    loaded = library(isa)
    for places in ([], [700], [1299, 640, 641], [0]):
        scores = of(1, 1300)
        scores[0, places] = float("nan")
        penalty = Penalty(1.2, torch.tensor([[5]]), 1300)
        assert chosen(scores, penalty, None, Warp(), loaded, [0]).item() == scores.argmax().item()


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_no_limit_of_tokens_is_one_that_is_infinite(isa: str) -> None:
    loaded, scores = library(isa), of(2, 5000)
    numbers = Warp().numbers(5000, scores.device)
    expected = native_draw(scores, torch.ones_like(scores), numbers, library=loaded)
    numbers[1] = float("inf")
    assert torch.equal(native_draw(scores, torch.ones_like(scores), numbers, library=loaded), expected)


def refused(loaded: Library, **changes: Any) -> str:
    """What the library says to a call that would be right without the changes."""
    numbers, noise = torch.tensor([1.0, 5, -1, 0]), torch.ones(4, 9)
    scores, out, state = torch.zeros(2, 9), torch.empty(3, dtype=torch.int64), torch.get_rng_state()
    places = torch.tensor([0, 3])
    draws: dict[str, Any] = {"numbers": numbers, "noise": noise, "places": places, "rows": 4}
    draws |= {"seen": None, "penalty": 0.0}
    call: dict[str, Any] = {"scores": scores, "out": out, "rows": 2, "vocabulary": 9}
    if changes.pop("of_words", False):
        draws |= {"noise": None, "generator": state}
        state[8:12] = torch.tensor([changes.pop("left")], dtype=torch.int32).view(torch.uint8)
    for name, value in changes.items():
        (draws if name in draws else call)[name] = value

    def struct(kind: type[ctypes.Structure], values: dict[str, Any]) -> Any:
        found = {k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in values.items()}
        return kind(**found)

    with pytest.raises(DeviceError) as caught:
        loaded.run("draw", struct(DrawCall, {**call, "draw": struct(Draw, draws)}), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"numbers": None}, "a tensor is missing"),
        ({"noise": None}, "a tensor is missing"),
        ({"out": None}, "a tensor is missing"),
        ({"scores": None}, "a tensor is missing"),
        ({"numbers": torch.tensor([0.0, 5, -1, 0])}, "an option is unknown"),
        ({"numbers": torch.tensor([float("nan"), 5, -1, 0])}, "an option is unknown"),
        ({"numbers": torch.tensor([1.0, 0, -1, 0])}, "an option is unknown"),
        ({"numbers": torch.tensor([1.0, 5, 1.5, 0])}, "an option is unknown"),
        ({"numbers": torch.tensor([1.0, 5, -1, 1.5])}, "an option is unknown"),
        ({"places": torch.tensor([0, 4])}, "points outside"),
        ({"places": torch.tensor([-1, 0])}, "points outside"),
        ({"places": None}, "shapes do not fit"),
        ({"rows": 0}, "shapes do not fit"),
        ({"vocabulary": 0}, "shapes do not fit"),
        ({"vocabulary": 1 << 40}, "shapes do not fit"),
        ({"dtype": 7}, "a dtype is unknown"),
        ({"noise": torch.ones(40).view(torch.uint8)[1:]}, "not aligned"),
        ({"seen": torch.ones(4, 9, dtype=torch.bool)}, "an option is unknown"),
        ({"seen": torch.ones(4, 9, dtype=torch.bool), "penalty": float("nan")}, "an option is unknown"),
        ({"of_words": True, "left": 0}, "points outside"),
        ({"of_words": True, "left": 626}, "points outside"),
    ],
    ids=str,
)
def test_calls_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    loaded = load("baseline")
    assert loaded is not None
    assert words in refused(loaded, **changes)

"""A whole step in one native call does what embedding, layers, norm, head and argmax do one after another."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.engine.generation.runner import Runner, make_step
from slipstream.engine.generation.schedule import Chunk
from slipstream.errors import DeviceError, RequestError
from slipstream.families import Family, Tiny
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import draw as draws
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.frames import refuse_frame
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.kernels.cpu.model import NativeModel, NativeSession
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.model.frame.run_stack import run_stack
from slipstream.ops.draw import Warp, draw
from slipstream.ops.noise import Noise, RowNoise
from slipstream.ops.penalty import Penalty
from slipstream.ops.step import Step
from tests.families.sweep import VARIANTS, label
from tests.kernels.test_stack import (
    CHUNK,
    DECODE,
    MANY,
    PREFILL,
    SINGLE,
    Change,
    Rounds,
    accepted,
    refuse_to_run,
)
from tests.kernels.test_stack import TOLERANCE as STACK_TOLERANCE

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
"""Of the largest logit; in bfloat16 the reference rounds after every operation."""

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)
BEST = next((isa for isa in ISAS if load(isa) is not None), "baseline")


class Sessions:
    """One generation run twice: by native steps, and by the parts one after another."""

    def __init__(self, engine: slipstream.InferenceEngine, isa: str = BEST) -> None:
        runner = engine._built.runner
        library = load(isa)
        if library is None:
            pytest.skip(f"this machine has no {isa}")
        assert runner is not None
        self.plain = Runner(runner.frame, runner.blocks, runner.names, stack=run_stack)
        stack = NativeStack(runner.blocks, library, refuse_to_run)
        stack.most_tokens = 10_000
        self.model = NativeModel(runner.frame, stack)
        self.caches = [runner.new_cache(12, 4) for _ in range(2)]
        for kept in (*self.caches[0].layers, *self.caches[1].layers):
            for part in kept.parts:
                part.zero_()  # some tests look at tokens that no step has written
        self.places = [[5, 1, 9], [0, 11, 2], [3, 4, 10], [8, 7, 6]]
        self.session = self.begin()
        self.generator = torch.Generator().manual_seed(4)

    def begin(self) -> NativeSession:
        session = self.model.begin(self.caches[1].layers, 96)
        assert session is not None
        return session

    def step(self, spans: Sequence[tuple[int, int, int]], tokens: Tensor | None = None) -> Step:
        def ids(chunk: Chunk) -> Tensor:
            if tokens is not None:
                return tokens[chunk.row : chunk.row + 1]
            return torch.randint(3, 60, (chunk.count,), generator=self.generator)

        chunks = [Chunk(row, start, count, True) for row, start, count in spans]
        step = make_step(chunks, ids, self.places, torch.device("cpu"))
        table = torch.tensor([self.places[row] for row, _, _ in spans], dtype=torch.int32)
        return replace(step, block_table=table)

    @torch.no_grad()
    def both(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Logits by parts and by the native step."""
        step = self.step(spans)
        states = [kept.states for kept in self.caches[1].layers if kept.states is not None]
        before = [part.clone() for part in states]
        got = self.session.logits(step)
        for part, old in zip(states, before, strict=True):
            part.copy_(old)
        best = self.session.best(step)
        assert got is not None and got.dtype == torch.float32 and best is not None
        # The second run wrote the same keys and values to the same places.
        assert torch.equal(best[:, 0], got.argmax(-1))
        return self.plain(step, self.caches[0]).float(), got

    def error(self, spans: Sequence[tuple[int, int, int]]) -> float:
        expected, got = self.both(spans)
        return float((got - expected).abs().max() / expected.abs().max())


def sessions(name: str, dtype: torch.dtype = torch.float32, isa: str = BEST) -> Sessions:
    variant = next(v for v in VARIANTS if v[0].name == name)
    return Sessions(accepted(variant, dtype), isa)


def hold_every_step(engine: slipstream.InferenceEngine, isa: str) -> None:
    """Check that one call for all layers, and one for a whole step, do what the parts do one by one."""
    rounds, steps = Rounds(engine, isa), Sessions(engine, isa)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY):
        assert rounds.error(spans) <= STACK_TOLERANCE[torch.float32]
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        assert steps.error(spans) <= TOLERANCE[torch.float32]


def refuses_frame(runs: Sessions, change: Change) -> None:
    """Check that the library refuses a changed frame, writes nothing, and runs the unchanged one after it."""
    owner, field, value = change(runs.session._struct)
    before = getattr(owner, field)
    setattr(owner, field, value)
    written = [part.clone() for kept in runs.caches[1].layers for part in kept.parts]
    with pytest.raises(DeviceError, match="refuses its arguments"):
        runs.session.logits(runs.step(PREFILL))
    parts = [part for kept in runs.caches[1].layers for part in kept.parts]
    assert all(torch.equal(a, b) for a, b in zip(parts, written, strict=True))
    setattr(owner, field, before)
    assert runs.error(PREFILL) <= TOLERANCE[torch.float32]


@pytest.fixture
def llama() -> Sessions:
    return sessions("llama")


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_every_family_s_steps(variant: tuple[Family, Tiny]) -> None:
    engine = accepted(variant, torch.float32)
    runs = Sessions(engine)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        if max(s + c for _, s, c in spans) <= getattr(engine.config, "max_position_embeddings", 64):
            assert runs.error(spans) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["llama", "gemma2", "opt", "bloom"])
def test_every_instruction_set(name: str, isa: str, dtype: torch.dtype) -> None:
    runs = sessions(name, dtype, isa)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        assert runs.error(spans) <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_several_steps_at_once_are_the_steps_one_by_one(name: str) -> None:
    runs = sessions(name)
    runs.both(PREFILL)
    # Row 2 goes from the second of its cache blocks into the third.
    first = torch.tensor([9, 8, 7, 6])
    starts = [7, 1, 61, 13] if name == "llama" else [7, 1, 40, 13]
    tokens, expected = first, []
    for i in range(6):
        step = runs.step([(row, start + i, 1) for row, start in enumerate(starts)], tokens)
        got = runs.session.best(step)
        assert got is not None
        tokens = got[:, 0]
        expected.append(tokens)
    step = runs.step([(row, start, 1) for row, start in enumerate(starts)], first)
    before = {name: t.clone() for name, t in vars(step).items() if isinstance(t, Tensor)}
    together = runs.session.best(step, 6)
    assert together is not None and torch.equal(together, torch.stack(expected, dim=1))
    assert all(torch.equal(t, getattr(step, name)) for name, t in before.items())


def test_several_steps_end_after_an_end_token(llama: Sessions) -> None:
    llama.both(PREFILL)
    step = llama.step([(0, 7, 1), (1, 1, 1)])
    tokens = llama.session.best(step, 8)
    assert tokens is not None and tokens.shape == (2, 8)
    # Greedy tokens soon repeat in so small a model: the first place where the end stands is what counts.
    end = int(tokens[1, 4])
    places = [i for i in range(8) if end in tokens[:, i].tolist()]
    short = llama.session.best(step, 8, (62, end))
    assert short is not None and torch.equal(short, tokens[:, : places[0] + 1])


@pytest.mark.parametrize("isa", ISAS)
def test_steps_are_told_of_while_the_next_ones_run(isa: str) -> None:
    runs, others = sessions("llama", isa=isa), sessions("gpt2", isa=isa)
    runs.both(PREFILL)
    inner = others.step(PREFILL)
    alone = others.session.logits(inner)
    step = runs.step([(0, 7, 1), (1, 1, 1)])
    expected = runs.session.best(step, 6)
    told, threads = [], set()

    def tell(tokens: Tensor) -> None:
        told.append(tokens)
        threads.add(threading.get_ident())
        again = others.session.logits(inner)  # a call of the library within a call of it
        assert again is not None and alone is not None and torch.equal(again, alone)

    got = runs.session.best(step, 6, (), tell)
    assert got is not None and expected is not None and torch.equal(got, expected)
    assert threads == {threading.get_ident()}
    assert torch.equal(torch.stack(told, dim=1), expected[:, :5])


def test_what_is_raised_while_steps_run_ends_them(llama: Sessions) -> None:
    llama.both(PREFILL)
    step = llama.step([(0, 7, 1), (1, 1, 1)])
    expected, told = llama.session.best(step, 8), []

    def tell(tokens: Tensor) -> None:
        told.append(tokens)
        if len(told) == 2:
            raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        llama.session.best(step, 8, (), tell)
    assert len(told) == 2, "no step is told of after one whose teller raised"
    again = llama.session.best(step, 8)
    assert again is not None and expected is not None and torch.equal(again, expected)


def test_steps_end_with_a_token_that_has_no_embedding(llama: Sessions) -> None:
    llama.both(PREFILL)
    step = llama.step([(0, 7, 1)], torch.tensor([3, 3, 3, 3]))
    tokens = llama.session.best(step, 8)
    assert tokens is not None
    last = next(i for i, token in enumerate(tokens[0].tolist()) if token >= 4)
    embed = llama.session._struct.embed
    embed.outputs = abi.Run.from_address(embed.runs).rows = 4
    short = llama.session.best(step, 8)
    assert short is not None and torch.equal(short, tokens[:, : last + 1])


def test_steps_whose_angles_are_of_other_positions_are_refused(llama: Sessions) -> None:
    llama.both(PREFILL)
    step = llama.step([(0, 7, 1), (1, 1, 1)])
    assert llama.session.best(step, 2) is not None
    step.positions[1] = 1 << 30  # within what embeds, and in no table
    call, others = llama.session._call, torch.tensor([7, 1])
    call.stack.positions = others.data_ptr()
    with pytest.raises(DeviceError, match="unknown to this library"):
        llama.session._run()


def test_what_a_signal_raises_while_steps_run_is_raised(llama: Sessions) -> None:
    """The interpreter looks for it as the next Python function begins: that is the one that is told."""

    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    llama.both(PREFILL)
    step = llama.step([(0, 7, 1), (1, 1, 1)])
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Stopped):
                for _ in range(1000):
                    llama.session.best(step, 30, (), lambda _: None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


NUMBERS = Warp(1.4, top_k=40, top_p=0.97).numbers(64, torch.device("cpu"))


def noise_of(rows: Sequence[int], vocabulary: int, batch: int = 4) -> RowNoise:
    return Noise(batch, vocabulary, torch.device("cpu")).of(rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_ours", [True, False], ids=["the library's noise", "torch's noise"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]], ids=str)
def test_several_drawn_steps_are_the_steps_one_by_one(
    monkeypatch: pytest.MonkeyPatch, isa: str, is_ours: bool, rows: list[int]
) -> None:
    runs = sessions("llama", isa=isa)
    monkeypatch.setattr(draws, "noise_is_torchs", lambda: is_ours)
    runs.both(PREFILL)
    vocabulary, starts = runs.session._vocabulary, [7, 1, 61, 13]
    spans = [(row, starts[row], 1) for row in rows]
    first = torch.tensor([9, 8, 7, 6])
    torch.manual_seed(3)
    tokens, expected = first.clone(), []
    for i in range(9):
        step = runs.step([(row, start + i, 1) for row, start, _ in spans], tokens)
        logits = runs.session.logits(step)
        assert logits is not None
        drawn = draw(logits, noise_of(rows, vocabulary)(), NUMBERS)
        tokens[rows] = drawn
        expected.append(drawn)
    state = torch.get_rng_state()
    step = runs.step(spans, first)
    torch.manual_seed(3)
    got = runs.session.drawn(step, NUMBERS, noise_of(rows, vocabulary), 9)
    assert got is not None and torch.equal(got, torch.stack(expected, dim=1))
    assert torch.equal(torch.get_rng_state(), state)
    # An end is the last that counts, and leaves the generator as it was then.
    end, told = int(got[-1, 4]), list[Tensor]()
    count = [end in column for column in got.T.tolist()].index(True) + 1
    torch.manual_seed(3)
    short = runs.session.drawn(step, NUMBERS, noise_of(rows, vocabulary), 9, (62, end), told.append)
    assert short is not None and torch.equal(short, got[:, :count])
    assert torch.equal(torch.stack([*told, short[:, -1]], dim=1), short)
    after = torch.rand(3)
    torch.manual_seed(3)
    noise = Noise(4, vocabulary, torch.device("cpu"))
    for _ in range(count):
        noise.another()
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]], ids=str)
def test_several_penalised_steps_are_the_steps_one_by_one(isa: str, greedy: bool, rows: list[int]) -> None:
    runs = sessions("llama", isa=isa)
    runs.both(PREFILL)
    vocabulary, starts = runs.session._vocabulary, [7, 1, 61, 13]
    spans = [(row, starts[row], 1) for row in rows]
    first = torch.tensor([9, 8, 7, 6])
    ours, theirs = (Penalty(3.0, first[:, None], vocabulary) for _ in range(2))
    torch.manual_seed(3)
    tokens, expected = first.clone(), []
    for i in range(9):
        step = runs.step([(row, start + i, 1) for row, start, _ in spans], tokens)
        logits = runs.session.logits(step)
        assert logits is not None
        lowered = theirs.of(rows)(logits)
        best = lowered.argmax(-1) if greedy else draw(lowered, noise_of(rows, vocabulary)(), NUMBERS)
        tokens[rows] = best
        theirs.seen[rows, best] = True
        expected.append(best)
    state, step = torch.get_rng_state(), runs.step(spans, first)
    torch.manual_seed(3)
    numbers = Warp().numbers(vocabulary, first.device) if greedy else NUMBERS
    noise = None if greedy else noise_of(rows, vocabulary)
    got = runs.session.penalised(step, ours.of(rows), numbers, noise, 9)
    assert got is not None and torch.equal(got, torch.stack(expected, dim=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(ours.seen, theirs.seen)
    if greedy:
        assert not torch.equal(got, runs.session.best(step, 9))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("way", ["best", "drawn", "penalised"])
def test_tokens_that_are_suppressed_are_not_chosen(isa: str, way: str) -> None:
    runs = sessions("llama", isa=isa)
    runs.both(PREFILL)
    session, vocabulary, rows = runs.session, runs.session._vocabulary, [0, 2]
    first, factor = torch.tensor([9, 8, 7, 6]), 2.0 if way == "penalised" else 1.0
    ours, theirs = (Penalty(factor, first[:, None], vocabulary) for _ in range(2))
    step = runs.step([(0, 7, 1), (2, 61, 1)], first)

    def several() -> Tensor:
        torch.manual_seed(3)
        if way == "best":
            got = session.best(step, 6)
        elif way == "drawn":
            got = session.drawn(step, NUMBERS, noise_of(rows, vocabulary), 6)
        else:
            got = session.penalised(step, ours.of(rows), Warp().numbers(vocabulary, first.device), None, 6)
        assert got is not None
        return got

    suppressed = several().unique()  # what it would have chosen
    ours.seen.copy_(theirs.seen)
    tokens, expected = first.clone(), []
    torch.manual_seed(3)
    for i in range(6):
        logits = session.logits(runs.step([(0, 7 + i, 1), (2, 61 + i, 1)], tokens))
        assert logits is not None
        scores = theirs.of(rows)(logits).index_fill(1, suppressed, -torch.inf)
        best = draw(scores, noise_of(rows, vocabulary)(), NUMBERS) if way == "drawn" else scores.argmax(-1)
        tokens[rows] = best
        theirs.seen[rows, best] = True
        expected.append(best)
    session.suppress(suppressed)
    got = several()
    assert torch.equal(got, torch.stack(expected, dim=1)) and not torch.isin(got, suppressed).any()
    all_logits = session.logits(step)
    assert all_logits is not None and all_logits.isfinite().all(), "logits are what they are"
    session.suppress(torch.arange(1, vocabulary))
    assert not several().any(), "the one that is left"
    session.suppress(None)
    ours.seen.zero_()
    assert torch.isin(several(), suppressed).any()


@pytest.mark.parametrize(
    "ids",
    [[3, 128], [-1, 3], [5, 4], [4, 4], list(range(128))],
    ids=["beyond", "below", "falling", "twice", "all"],
)
def test_tokens_that_cannot_be_suppressed_are_refused(llama: Sessions, ids: list[int]) -> None:
    assert llama.session._vocabulary == 128
    llama.session.suppress(torch.tensor(ids))
    with pytest.raises(DeviceError):
        llama.session.best(llama.step([(0, 7, 1)]))


def test_what_is_drawn_meanwhile_is_drawn_independently(llama: Sessions) -> None:
    llama.both(PREFILL)
    step, seen = llama.step([(0, 7, 1), (1, 1, 1)]), list[Tensor]()

    def drawn(tell: Any = None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        tokens = llama.session.drawn(step, NUMBERS, noise_of([0, 1], 64, 2), 8, (), tell)
        assert tokens is not None
        return tokens, torch.rand(4)

    expected, after = drawn()
    got, then = drawn(lambda _: seen.append(torch.rand(4)))
    assert torch.equal(got, expected)
    torch.manual_seed(3)
    # Neither the numbers that the tokens were drawn with, nor those that would have come after them.
    theirs = torch.rand(20_000)
    assert not torch.isin(torch.cat([*seen, then]), theirs).any()
    assert torch.isin(after, theirs).all()


def test_rows_that_come_one_by_one_have_their_own_noise(llama: Sessions) -> None:
    vocabulary = llama.session._vocabulary
    for seed in range(5):
        noise = Noise(4, vocabulary, torch.device("cpu"))
        together = llama.session.drawn(llama.step([(1, 0, 3), (3, 0, 2)]), NUMBERS, noise.of([1, 3]))
        state, apart = torch.get_rng_state(), []
        torch.set_rng_state(noise.start())
        llama.generator.manual_seed(seed)
        again = llama.step([(1, 0, 3), (3, 0, 2)])
        expected = llama.session.drawn(again, NUMBERS, noise.of([1, 3]))
        llama.generator.manual_seed(seed)
        for row, count in ((1, 3), (3, 2)):
            token = llama.session.drawn(llama.step([(row, 0, count)]), NUMBERS, noise.of([row]))
            assert token is not None
            apart.append(token)
        assert together is not None and expected is not None
        assert torch.equal(torch.cat(apart), expected)
        assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_logits_that_are_no_numbers_draw_nothing(llama: Sessions) -> None:
    llama.both(PREFILL)
    step = llama.step([(0, 7, 1), (1, 1, 1)])
    noise = noise_of([0, 1], llama.session._vocabulary, 2)
    head = llama.model.frame.head.weight  # type: ignore[attr-defined]
    head[5] = float("nan")
    with pytest.raises(RequestError, match=r"row 0: no token can be drawn"):
        llama.session.drawn(step, NUMBERS, noise, 4)
    head[5] = 0.0
    assert llama.session.drawn(step, NUMBERS, noise, 4) is not None


@torch.no_grad()
def test_a_cap_of_logits_leaves_what_is_no_number(llama: Sessions) -> None:
    llama.model.frame.spec = replace(llama.model.frame.spec, logit_softcap=5.0)
    head = llama.model.frame.head.weight  # type: ignore[attr-defined]
    head[41] = torch.nan
    logits = llama.begin().logits(llama.step(DECODE))
    assert logits is not None
    others = torch.arange(logits.shape[-1]) != 41
    assert bool(logits[:, 41].isnan().all()) and float(logits[:, others].abs().max()) <= 5.0
    noise = noise_of([0, 1], logits.shape[-1], 2)
    with pytest.raises(RequestError, match=r"row 0: no token can be drawn"):
        llama.begin().drawn(llama.step([(0, 7, 1), (1, 1, 1)]), NUMBERS, noise, 4)


@torch.no_grad()
def test_the_first_of_equal_logits_is_the_best(llama: Sessions) -> None:
    head = llama.model.frame.head.weight  # type: ignore[attr-defined]
    step = llama.step(PREFILL)
    best = llama.session.best(step)
    assert best is not None
    top = int(best[2, 0])
    for other in (0, 17, head.shape[0] - 1):
        kept = head[other].clone()
        head[other] = head[top]
        again = llama.begin().best(step)
        assert again is not None and int(again[2, 0]) == min(other, top)
        head[other] = kept


@torch.no_grad()
def test_what_is_no_number_is_the_best_as_in_torch(llama: Sessions) -> None:
    head = llama.model.frame.head.weight  # type: ignore[attr-defined]
    head[41] = torch.nan
    head[50] = torch.nan
    logits, best = llama.session.logits(llama.step(DECODE)), llama.session.best(llama.step(DECODE))
    assert logits is not None and best is not None
    assert logits.argmax(-1).tolist() == [41] * 4 == best[:, 0].tolist()


@torch.no_grad()
def test_all_logits_may_be_minus_infinity(llama: Sessions) -> None:
    spec = llama.model.frame.spec
    llama.model.frame.spec = replace(spec, logit_scale=-torch.inf)
    step = llama.step(SINGLE)
    best, logits = llama.begin().best(step), llama.begin().logits(step)
    assert best is not None and logits is not None and torch.equal(best[:, 0], logits.argmax(-1))


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("token_ids", 10_000, "outside"),
        ("token_ids", -1, "outside"),
        ("positions", 10_000, "outside"),
        ("positions", -1, "outside"),
        ("logit_rows", 61, "outside"),
        ("logit_rows", -1, "outside"),
        ("slots", 384, "outside"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_that_points_outside_is_refused(family: str, name: str, value: int, what: str) -> None:
    runs = sessions(family)
    for kept in runs.caches[1].layers:
        for part in kept.parts:
            part.fill_(torch.nan)
    step = runs.step(PREFILL)
    getattr(step, name).view(-1)[0] = value
    with pytest.raises(DeviceError, match=what):
        runs.session.logits(step)
    assert all(bool(t.isnan().all()) for kept in runs.caches[1].layers for t in kept.parts)


def test_steps_that_would_leave_the_cache_are_refused(llama: Sessions) -> None:
    step = llama.step([(2, 90, 1)])
    assert llama.session.best(step, 6) is not None
    with pytest.raises(DeviceError, match="outside"):
        llama.session.best(step, 7)


@pytest.mark.parametrize("spans", [PREFILL, ((0, 7, 2),)])
def test_only_single_tokens_are_followed(llama: Sessions, spans: Any) -> None:
    with pytest.raises(DeviceError):
        llama.session.best(llama.step(spans), 2)


def test_a_model_that_moves_meanwhile_counts_from_the_next_session_on(llama: Sessions) -> None:
    step = llama.step(PREFILL)
    expected = llama.session.logits(step)
    head = llama.model.frame.head  # type: ignore[attr-defined]
    head.weight = torch.nn.Parameter(head.weight * 2, requires_grad=False)
    for block in llama.plain.blocks:
        block.apply(lambda t: t * 0.5)
    again = llama.session.logits(step)
    assert expected is not None and again is not None and torch.equal(again, expected)
    llama.session = llama.begin()
    assert llama.error(PREFILL) <= TOLERANCE[torch.float32]


def test_a_frame_that_is_no_longer_readable_is_left(llama: Sessions) -> None:
    frame: Any = llama.model.frame
    frame.head.double()
    assert refuse_frame(frame) == "head: a matrix of 2 dimensions in torch.float64 is not supported"
    assert llama.model.begin(llama.caches[1].layers, 96) is None


def test_angles_are_made_once_and_again_when_what_they_are_made_of_changes(llama: Sessions) -> None:
    """Generations share a table; frequencies or factors that were written to count from the next one on."""
    frame: Any = llama.plain.frame
    asked = 0
    rotary: Any = next(frame.rotary.modules())
    frequencies, own = rotary.inv_freq, rotary.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        asked += 1
        return own(*args, **kwargs)

    def begin_and_agree() -> int:
        nonlocal asked
        llama.session = llama.begin()
        asked = 0
        assert llama.error(DECODE) <= TOLERANCE[torch.float32]
        return asked - 1  # the parts ask once per step

    kept = frequencies.clone()
    try:
        rotary.forward = counted
        begin_and_agree()
        assert begin_and_agree() == 0
        frequencies.data.mul_(0.5)
        assert begin_and_agree() == 1
        rotary.attention_scaling = 0.7
        assert begin_and_agree() == 1
        assert begin_and_agree() == 0
    finally:
        rotary.attention_scaling = 1.0
        frequencies.data.copy_(kept)
        del rotary.forward


def test_two_engines_in_two_threads_give_their_own_answers() -> None:
    variants = [next(v for v in VARIANTS if v[0].name == name) for name in ("llama", "gpt2")]
    engines = [accepted(variant, torch.float32) for variant in variants]
    twin = copy.deepcopy(engines[0])
    prompts = [torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    jobs = list(zip((*engines, twin), prompts, strict=True))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = [engine.generate(input_ids=ids, **options) for engine, ids in jobs]
    wrong: list[int] = []

    def work(index: int) -> None:
        engine, ids = jobs[index]
        answers = [engine.generate(input_ids=ids, **options) for _ in range(6)]
        wrong.extend(index for answer in answers if not torch.equal(answer, expected[index]))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong

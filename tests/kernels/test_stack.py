"""The native stack does what `run_stack` does: every family it accepts, prefill, chunk and decode."""

from __future__ import annotations

import copy
import ctypes
import itertools
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.engine.generation.runner import make_step
from slipstream.engine.generation.schedule import Chunk
from slipstream.errors import DeviceError
from slipstream.families import Family, Tiny
from slipstream.formats import FORMATS
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import StackCall
from slipstream.kernels.cpu.blocks import refuse_block
from slipstream.kernels.cpu.leases import Turns
from slipstream.kernels.cpu.library import EMULATED, ISAS, Library, load
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.model.block.block import Block
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.model.frame.run_stack import run_stack
from slipstream.ops.kv_cache import CachePart, Int8Cache, read_cache
from slipstream.ops.step import Packed, Step
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.libraries import library

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 6e-2}
"""Of the largest value; in bfloat16 the reference rounds after every operation."""

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


def engine_of(
    tiny: Tiny, dtype: torch.dtype, quant: str | dict[str, object] | None = None
) -> slipstream.InferenceEngine:
    more = {} if quant is None else {"quant": quant}
    return slipstream.init_inference(peaked_model(tiny), dtype=dtype, replace_with_kernel_inject=True, **more)


def refuse_to_run(*_: object) -> Tensor:
    raise AssertionError("the step was left to the reference")


Change = Callable[[Any], tuple[Any, str, Any]]
"""Returns, of a call's structs, one, the name of a field of it, and the value to set there."""


class Rounds:
    """A few steps of ragged sequences, run by two stacks upon a cache each."""

    def __init__(
        self, engine: slipstream.InferenceEngine, isa: str, cache_dtype: torch.dtype | None = None
    ) -> None:
        self.cache_dtype = cache_dtype
        self.runner = engine._built.runner
        assert self.runner is not None
        lib = library(isa)
        self.blocks: list[Block] = self.runner.blocks
        self.stack = NativeStack(self.blocks, lib, refuse_to_run)
        self.stack.most_tokens = 10_000
        self.caches = [self._cache() for _ in range(2)]
        places = list(range(12))
        random.Random(2).shuffle(places)
        self.places = [places[i : i + 3] for i in range(0, 12, 3)]
        self.generator = torch.Generator().manual_seed(4)

    def _cache(self) -> PagedCache:
        self.runner.cache_dtype = self.cache_dtype
        cache = self.runner.new_cache(12, 4)
        for kept in cache.layers:
            for part in kept.parts:
                (part.scales if isinstance(part, Int8Cache) else part).fill_(torch.nan)
        return cache

    def step(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Step, Tensor]:
        chunks = [Chunk(row, start, count, True) for row, start, count in spans]
        total = sum(count for _, _, count in spans)
        step = make_step(
            chunks,
            lambda c: torch.randint(3, 60, (c.count,), generator=self.generator),
            self.places,
            torch.device("cpu"),
        )
        assert step.slots.shape[0] == total
        return step, self.runner.frame.enter(step.token_ids, step.positions)

    @torch.no_grad()
    def outputs(self, spans: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """What the reference and the native stack make of the next step, in float32."""
        step, x = self.step(spans)
        return self._run(step, x)

    def _run(self, step: Step, x: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.runner.frame.angles(step.positions, [block.spec.rope for block in self.blocks])
        inputs = self.runner.frame.layer_inputs(step.token_ids, x)
        x = self.runner.frame.split(x)
        before = x.clone()
        expected = run_stack(self.blocks, x, step, self.caches[0].layers, tables, inputs)
        got = self.stack(self.blocks, x, step, self.caches[1].layers, tables, inputs)
        assert torch.equal(x, before)
        assert got.dtype == expected.dtype
        return expected.float(), got.float()

    @torch.no_grad()
    def error(self, spans: Sequence[tuple[int, int, int]], ties: float = 0.0) -> float:
        """The largest error of the tokens, but for a share of `ties` among them."""
        step, x = self.step(spans)
        expected, got = self._run(step, x)
        errors = [(got - expected).abs().flatten(1).amax(-1) / expected.abs().max()]
        for ours, theirs in zip(self.caches[1].layers, self.caches[0].layers, strict=True):
            for a, b in zip(ours.parts, theirs.parts, strict=True):
                a, b = (_written(part, step) for part in (a, b))
                errors.append((a - b).abs().amax(-1) / b.abs().max().clamp(min=1.0))
        kept = len(errors[0]) - int(ties * len(errors[0]))
        return max(float(each.sort().values[:kept].max()) for each in errors)


def refuses(rounds: Rounds, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the library refuses a changed call, writes nothing, and runs the unchanged one after it."""
    own = Library.run

    def changed(self: Library, kind: str, call: Any) -> None:
        if kind != "stack":
            return own(self, kind, call)
        owner, field, value = change(call)
        before = bytes(owner)  # a field that is a pointer would be read anew
        setattr(owner, field, value)
        try:
            own(self, kind, call)
        finally:
            ctypes.memmove(ctypes.addressof(owner), before, len(before))

    with monkeypatch.context() as patch:
        patch.setattr(Library, "run", changed)
        with pytest.raises(DeviceError, match="refuses its arguments"):
            rounds.error(PREFILL)
    assert all(bool(t.isnan().all()) for kept in rounds.caches[1].layers for t in kept.parts)
    assert rounds.error(PREFILL) <= TOLERANCE[torch.float32]


def squared_errors(model: torch.nn.Module, dtype: torch.dtype, isa: str) -> tuple[float, float]:
    """How far the native stack and the reference in 16 bits are from the reference in float32, summed."""
    own, exact = (
        Rounds(
            slipstream.init_inference(copy.deepcopy(model), dtype=one, replace_with_kernel_inject=True), isa
        )
        for one in (dtype, torch.float32)
    )
    ours, theirs = 0.0, 0.0
    for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY):
        expected, _ = exact.outputs(spans)
        reference, native = own.outputs(spans)
        ours += float((native - expected).square().mean())
        theirs += float((reference - expected).square().mean())
    return ours, theirs


def _written(part: CachePart, step: Step) -> Tensor:
    """What a step has written into a layer's keys, values or states, `(tokens or sequences, numbers)`."""
    if isinstance(part, Tensor) and part.numel() == 0:  # of a layer without attention
        return torch.zeros(len(step.slots), 1)
    if isinstance(part, Tensor) and part.dim() == 2:
        assert step.states is not None
        return part[step.states.long()]
    return read_cache(part, torch.arange(12), torch.float32).flatten(0, 1)[step.slots].flatten(1)


PREFILL = ((0, 0, 7), (1, 0, 1), (2, 0, 40), (3, 0, 13))
MANY = ((0, 0, 40), (1, 0, 40), (2, 0, 9), (3, 0, 36))  # more than experts hear together
CHUNK = ((0, 7, 5), (1, 1, 20), (2, 40, 1))
DECODE = ((0, 12, 1), (1, 21, 1), (2, 41, 1), (3, 13, 1))
SINGLE = ((2, 42, 1),)


LEFT_OUT = (
    "cross-attention and relative position biases are not supported",
    "a family's own attention is not supported",
    "latent attention with a gate, norms of heads, a window or biases of scores is not supported",
    "the activation 'xielu' is not supported",
    "feeder=",
    "inner_norms=",
    "carry=",
    "course=",
    "mixer=",
)
"""Beginnings of the reasons for which a family's layers may be left to Python; any other one is a defect."""


def accepted(
    variant: tuple[Family, Tiny], dtype: torch.dtype, quant: str | dict[str, object] | None = None
) -> slipstream.InferenceEngine:
    engine = engine_of(variant[1], dtype, quant)
    if reason := refused(engine):
        pytest.skip(reason)
    return engine


def refused(engine: slipstream.InferenceEngine) -> str | None:
    """Why the layers of an engine are left to Python, or None."""
    runner = engine._built.runner
    reason = (
        "has no engine road" if runner is None else next(filter(None, map(refuse_block, runner.blocks)), None)
    )
    assert reason is None or runner is None or reason.startswith(LEFT_OUT)
    return reason


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_every_family_s_layers(variant: tuple[Family, Tiny]) -> None:
    engine = accepted(variant, torch.float32)
    isa = next(name for name in ISAS if load(name) is not None)
    rounds = Rounds(engine, isa)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY):
        if max(s + c for _, s, c in spans) <= getattr(engine.config, "max_position_embeddings", 64):
            assert rounds.error(spans) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt2",
        "gemma2",
        "gpt_neox",
        "bloom",
        "gpt_oss",
        "olmo2",
        "mpt",
        "afmoe",
        "hrm_text",
        "minicpm3",
        "ministral3",
        "granite_swa",
    ],
)
def test_every_instruction_set(name: str, isa: str, dtype: torch.dtype) -> None:
    variant = next(v for v in VARIANTS if v[0].name == name)
    rounds = Rounds(accepted(variant, dtype), isa)
    # Where two experts score the same but for rounding, either may be chosen, and they say other things.
    has_ties = dtype == torch.bfloat16 and any(block.spec.moe is not None for block in rounds.blocks)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY):
        assert rounds.error(spans, 0.1 if has_ties else 0.0) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_branches_that_share_rows_of_an_odd_width(isa: str) -> None:
    library(isa)  # or nothing is built for it
    family, tiny = next(v for v in VARIANTS if v[0].name == "gptj")
    odd = replace(tiny, options={**tiny.options, "n_embd": 63, "n_head": 3, "n_inner": 64})
    rounds = Rounds(accepted((family, odd), torch.bfloat16), isa)
    for spans in (((0, 0, 16),), ((0, 16, 1),)):
        assert rounds.error(spans) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["glm4_moe", "cohere2_moe", "ernie4_5_moe", "exaone_moe", "minimax_m2"])
def test_every_way_to_choose_experts(name: str, isa: str) -> None:
    # In float32 only: in bfloat16, rounding moves several tokens of a prompt to another group of experts.
    library(isa)
    for variant in VARIANTS:
        if variant[0].name == name and not refused(engine_of(variant[1], torch.float32)):
            rounds = Rounds(engine_of(variant[1], torch.float32), isa)
            for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY):
                assert rounds.error(spans) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("quant", [name for name in FORMATS if name != "plain" and name in abi.FORMATS])
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_weights(name: str, isa: str, quant: str, dtype: torch.dtype) -> None:
    library(isa)  # or nothing is built for it
    variant = next(v for v in VARIANTS if v[0].name == name)
    rounds = Rounds(accepted(variant, dtype, quant), isa)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        assert rounds.error(spans) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("quant", [name for name in FORMATS if name in abi.FORMATS])
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_many_tokens_of_experts(name: str, isa: str, quant: str, dtype: torch.dtype) -> None:
    variant = next(v for v in VARIANTS if v[0].name == name)
    rounds = Rounds(accepted(variant, dtype, None if quant == "plain" else quant), isa)
    if dtype == torch.float32:
        assert rounds.error(MANY) <= TOLERANCE[dtype]
    else:  # ties as above, but one early in a sequence is heard by all that follow: the best of three prompts
        assert min(rounds.error(MANY, 0.1) for _ in range(3)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("q_type", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_neox", "youtu"]
)  # experts would turn a step into another choice
def test_inputs_rounded_to_int8(name: str, bits: int, q_type: str, isa: str) -> None:
    variant = next(v for v in VARIANTS if v[0].name == name)
    quant = {"weight": {"num_bits": bits}, "activation": {"q_type": q_type}}
    rounds = Rounds(accepted(variant, torch.float32, quant), isa)
    # Numbers that are equal to 1e-6 may be rounded one step apart, 1/127 of their row's largest, and what
    # comes after them in their sequence hears of it: of several prompts, half of one has none of that.
    assert min(rounds.error(PREFILL, 0.5) for _ in range(4)) <= 1e-4
    for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY):
        assert rounds.error(spans) <= 3e-2


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_in_int8(name: str, isa: str) -> None:
    variant = next(v for v in VARIANTS if v[0].name == name)
    rounds = Rounds(accepted(variant, torch.float32), isa, torch.int8)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        # Keys that are equal to 1e-6 may be rounded to neighbouring codes, 1/127 of the largest apart.
        assert rounds.error(spans) <= 1.1 / 127


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_cache_in_int8_passes_on_what_is_no_number(value: float, isa: str) -> None:
    variant = next(v for v in VARIANTS if v[0].name == "llama")
    rounds = Rounds(accepted(variant, torch.float32), isa, torch.int8)
    step, x = rounds.step(((0, 0, 4),))
    x = x.clone()
    x[1] = value
    with torch.no_grad():
        tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])
        outs = [
            run(rounds.blocks, x, step, cache.layers, tables)
            for run, cache in zip((run_stack, rounds.stack), rounds.caches, strict=True)
        ]
    for out in outs:
        # A masked key may spoil the token before it as well: it has weight 0, and 0 * NaN is NaN.
        assert not out[1:].isfinite().all(-1).any()


@pytest.fixture
def rounds() -> Rounds:
    variant = next(v for v in VARIANTS if v[0].name == "llama")
    return Rounds(accepted(variant, torch.float32), "baseline")


def test_weights_changed_in_place_and_replaced_count(rounds: Rounds) -> None:
    assert rounds.error(PREFILL) <= 2e-5
    with torch.no_grad():
        for block in rounds.blocks:
            for weight in block.weights.matrices.values():
                weight.planes[0].mul_(1.5)
    assert rounds.error(CHUNK) <= 2e-5
    for block in rounds.blocks:
        block.apply(lambda t: t.clone() * 0.7)
    assert rounds.error(DECODE) <= 2e-5


def test_a_block_that_leaves_is_left_to_the_reference(rounds: Rounds) -> None:
    for block in rounds.blocks:
        block.apply(lambda t: t.double())
    step, x = rounds.step(PREFILL)
    with pytest.raises(AssertionError, match="left to the reference"):
        rounds.stack(rounds.blocks, x.double(), step, rounds.caches[1].layers, {})


def test_some_layers_in_a_row(rounds: Rounds) -> None:
    step, x = rounds.step(PREFILL)
    tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])
    one_by_one = x
    for block, kept in zip(rounds.blocks, rounds.caches[0].layers, strict=True):
        one_by_one = rounds.stack([block], one_by_one, step, [kept], tables)
    torch.testing.assert_close(
        one_by_one, rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, tables)
    )


def test_a_step_that_points_outside_is_refused_before_the_cache_is_touched(rounds: Rounds) -> None:
    step, x = rounds.step(PREFILL)
    tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])
    for name, value in (
        ("slots", 12 * BLOCK_SIZE),
        ("block_table", 12),
        ("kv_lens", 10_000),
        ("query_starts", -1),
    ):
        tensor = getattr(step, name)
        kept = tensor.clone()
        tensor.view(-1)[0] = value
        with pytest.raises(DeviceError, match="outside"):
            rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, tables)
        tensor.copy_(kept)
    assert all(bool(t.isnan().all()) for kept in rounds.caches[1].layers for t in kept.parts)


def test_biases_by_distance_cover_tokens_that_are_no_keys(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = rounds.blocks[0].spec
    bias, own = torch.zeros(spec.heads, 3), Library.run

    def biased(self: Library, name: str, call: StackCall) -> None:
        call.blocks[0].mask.relative, call.blocks[0].mask.reach = bias.data_ptr(), bias.shape[1]
        own(self, name, call)

    places = torch.arange(5)
    packed = Packed(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), places)
    tables = rounds.runner.frame.angles(places, [block.spec.rope for block in rounds.blocks])
    monkeypatch.setattr(Library, "run", biased)
    with pytest.raises(DeviceError, match="outside"):
        rounds.stack.encode(rounds.blocks[:1], torch.randn(5, spec.hidden), packed, tables)


def test_a_layer_that_cannot_be_had_ends_the_call_for_all_threads(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, turns = ctypes.c_int32(), itertools.count()

    @ctypes.CFUNCTYPE(None, ctypes.c_int64)
    def turn(_: int) -> None:
        failed.value = next(turns) % 3 == 2  # as the second block begins, right after the first has ended

    class Missing:
        def point(self, call: StackCall) -> None:
            call.turn, call.failed = ctypes.cast(turn, ctypes.c_void_p), ctypes.addressof(failed)

        def check(self) -> None:
            failed.value = 0

    monkeypatch.setattr(Turns, "of", lambda blocks: Missing())
    step, x = rounds.step(DECODE)
    tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])

    def call() -> None:
        torch.set_num_threads(2)  # this one's
        busy = torch.zeros(100_000)
        for _ in range(2000):
            busy.add_(1)  # torch's own thread keeps the library's from its processor
            rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, tables)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert next(turns) == 6000, "blocks come after one that cannot be had"


def test_what_a_signal_raises_between_layers_ends_the_call_and_leaves_none_held(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter looks for it as the next Python function begins: that is the one that takes a turn."""

    class Stopped(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stopped

    leases = [threading.Lock() for _ in rounds.blocks]
    monkeypatch.setattr(Turns, "of", lambda blocks: Turns(leases))
    step, x = rounds.step(DECODE)
    tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Stopped):
                for _ in range(1000):
                    rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, tables)
            assert not any(lease.locked() for lease in leases)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

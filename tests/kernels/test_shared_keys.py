"""Shared keys and values, layers' own inputs, experts beside shared ones; the last layers of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.generation.runner import make_step
from slipstream.engine.generation.schedule import Chunk
from slipstream.errors import DeviceError
from slipstream.formats import FORMATS
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.frames import refuse_frame
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.ops.kv_cache import tensors_of
from slipstream.ops.step import Step
from slipstream.spec import lender_of
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.libraries import library
from tests.kernels.test_model import TOLERANCE as LOGITS
from tests.kernels.test_model import Sessions, hold_every_step, refuses_frame
from tests.kernels.test_stack import (
    CHUNK,
    DECODE,
    PREFILL,
    SINGLE,
    TOLERANCE,
    Change,
    Rounds,
    accepted,
    refuses,
    squared_errors,
)

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

SHARING = [v for v in VARIANTS if v[0].name == "gemma4_text"]
BY_NAME = {label(v): v for v in VARIANTS}
NARROWED = [
    "gemma4_text shared",
    "gemma4_text experts",
    "llama",
    "gpt2",
    "mixtral",
    "gemma2",
    "nemotron_h",
    "gptj",
    "olmo2",
]
"""Sequential and parallel branches, experts, norms before and after; feed-forwards that are layers."""


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", [label(v) for v in SHARING])
def test_every_instruction_set(name: str, isa: str) -> None:
    library(isa)  # or nothing is built for it
    engine = accepted(BY_NAME[name], torch.float32)
    hold_every_step(engine, isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", [label(v) for v in SHARING if "num_experts" not in v[1].options])
def test_16_bits_are_closer_to_float32_than_the_reference_s(name: str, isa: str, dtype: torch.dtype) -> None:
    # So many norms let two right answers differ by more than the tolerance of the other families.
    library(isa)
    ours, theirs = squared_errors(peaked_model(BY_NAME[name][1]).to(dtype), dtype, isa)
    assert 0 < ours <= theirs


@pytest.mark.parametrize("quant", [name for name in FORMATS if name != "plain" and name in abi.FORMATS])
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_packed_weights(isa: str, quant: str) -> None:
    library(isa)
    for variant in SHARING:
        rounds = Rounds(accepted(variant, torch.float32, quant), isa)
        for spans in (PREFILL, CHUNK, DECODE, SINGLE):
            assert rounds.error(spans) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8", "fp6", "bf13"])
def test_packed_tables_of_embeddings(quant: str) -> None:
    engine = accepted(BY_NAME["gemma4_text shared"], torch.float32, {"weight": quant, "embedding": quant})
    steps = Sessions(engine)
    formats = {name: weight.format for name, weight in steps.model.frame.matrices().items()}
    assert formats["embed"] != "plain"
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        assert steps.error(spans) <= LOGITS[torch.float32]


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_a_cache_in_int8(isa: str) -> None:
    library(isa)
    rounds = Rounds(accepted(BY_NAME["gemma4_text shared"], torch.float32), isa, torch.int8)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        # Keys that are equal to 1e-6 may be rounded to neighbouring codes, 1/127 of the largest apart.
        assert rounds.error(spans) <= 1.1 / 127


def test_layers_that_borrow_take_no_memory() -> None:
    runner = accepted(BY_NAME["gemma4_text shared"], torch.float32)._built.runner
    assert runner is not None
    cache, specs = runner.new_cache(4, 1), [block.spec for block in runner.blocks]
    owners = [lender_of(specs, index) for index in range(len(specs))]
    assert owners == [0, 1, 0, 1]
    for index, owner in enumerate(owners):
        assert cache.layers[index] is cache.layers[owner]
    own = sum(t.nbytes for index in (0, 1) for part in cache.layers[index].parts for t in tensors_of(part))
    assert cache.nbytes == own


def test_a_layer_that_borrows_what_no_layer_lends_is_named() -> None:
    runner = accepted(BY_NAME["gemma4_text shared"], torch.float32)._built.runner
    assert runner is not None
    specs = [replace(block.spec, sharing="borrows") for block in runner.blocks]
    with pytest.raises(ValueError, match="layer 2 borrows keys and values of type 'sliding_attention'"):
        lender_of(specs, 2)


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", NARROWED)
def test_only_rows_with_logits_go_through_the_last_layers(name: str, isa: str) -> None:
    library(isa)
    runs = Sessions(accepted(BY_NAME[name], torch.float32), isa)
    for wanted in ([True, False, True, False], [False, False, False, True], [True] * 4):
        runs.session = runs.begin()
        step = stepped(runs, PREFILL, wanted)
        with torch.no_grad():
            expected = runs.plain(step, runs.caches[0]).float()
        got = runs.session.logits(step)
        assert got is not None and got.shape == expected.shape
        assert float((got - expected).abs().max() / expected.abs().max()) <= LOGITS[torch.float32]
        for ours, theirs in zip(runs.caches[1].layers, runs.caches[0].layers, strict=True):
            for a, b in zip(ours.parts, theirs.parts, strict=True):
                assert isinstance(a, Tensor) and torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma4_text shared"])
def test_rows_within_a_chunk_go_through_all_layers(name: str) -> None:
    runs = Sessions(accepted(BY_NAME[name], torch.float32))
    step = stepped(runs, PREFILL, [True] * 4)
    for rows in ([0, 7, 20], [60, 6], [3]):  # not the last of their sequences, or not in order
        other = replace(step, logit_rows=torch.tensor(rows))
        with torch.no_grad():
            expected = runs.plain(other, runs.caches[0]).float()
        got = runs.begin().logits(other)
        assert got is not None
        assert float((got - expected).abs().max() / expected.abs().max()) <= LOGITS[torch.float32]


def stepped(runs: Sessions, spans: Sequence[tuple[int, int, int]], wanted: Sequence[bool]) -> Step:
    """A step whose chunks are the last of their prompts or not."""
    chunks = [Chunk(row, start, count, last) for (row, start, count), last in zip(spans, wanted, strict=True)]
    generator = torch.Generator().manual_seed(3)
    return make_step(
        chunks,
        lambda chunk: torch.randint(3, 60, (chunk.count,), generator=generator),
        runs.places,
        torch.device("cpu"),
    )


@pytest.mark.parametrize("name", ["gemma4_text shared", "llama"])
def test_placeholders_are_embedded_as_another_token(name: str) -> None:
    runs = Sessions(accepted(BY_NAME[name], torch.float32))
    frame: Any = runs.model.frame
    before = runs.begin().logits(stepped(runs, PREFILL, [True] * 4))
    frame.spec = replace(frame.spec, placeholders=tuple(range(10, 30)), stand_in=5)
    runs.session = runs.begin()
    assert runs.error(PREFILL) <= LOGITS[torch.float32]
    after = runs.begin().logits(stepped(runs, PREFILL, [True] * 4))
    assert before is not None and after is not None and not torch.allclose(before, after, atol=1e-2)
    step = runs.step(DECODE, torch.tensor([10, 29, 17, 11]))
    other = replace(step, token_ids=torch.full_like(step.token_ids, 5))
    pair = [runs.begin().logits(one) for one in (step, other)]
    assert pair[0] is not None and pair[1] is not None and torch.equal(pair[0], pair[1])
    # The tokens of later steps, which the library reads itself.
    frame.spec = replace(frame.spec, placeholders=tuple(range(64)), stand_in=5)
    together, step = runs.begin().best(step, 3), replace(step, token_ids=other.token_ids)
    again = runs.begin().best(step, 3)
    assert together is not None and again is not None and torch.equal(together, again)


def _block(call: Any) -> Any:
    return call.blocks[min(2, call.num_blocks - 1)]  # the first that borrows


CHANGES: dict[str, tuple[str, Change]] = {
    "keys and values of no kind": ("gemma4_text shared", lambda c: (_block(c), "keys_values", 3)),
    "keys and values below any kind": ("gemma4_text shared", lambda c: (_block(c), "keys_values", -1)),
    "keys that are not there": ("gemma4_text shared", lambda c: (_block(c), "keys_values", 1)),
    "values that are not there": ("gemma4_text shared", lambda c: (c.blocks[1], "keys_values", 1)),
    "clipped": ("gemma4_text shared", lambda c: (_block(c), "clip", 1.0)),
    "no caches": ("gemma4_text shared", lambda c: (c, "caches", None)),
    "a weight of values' norm": ("gemma4_text shared", lambda c: (c.blocks[0].v_norm, "weight", 64)),
    "a norm of no kind": ("gemma4_text shared", lambda c: (c.blocks[0].v_norm, "kind", 7)),
    "no inputs": ("gemma4_text shared", lambda c: (c, "inputs", None)),
    "inputs at an odd place": ("gemma4_text shared", lambda c: (c, "inputs", c.inputs + 1)),
    "inputs too close together": ("gemma4_text shared", lambda c: (c, "inputs_stride", 31)),
    "inputs of another width": ("gemma4_text shared", lambda c: (_block(c).inputs.contents, "width", 16)),
    "inputs of no width": ("gemma4_text shared", lambda c: (_block(c).inputs.contents, "width", 0)),
    "a gate of other inputs": (
        "gemma4_text shared",
        lambda c: (_block(c).inputs.contents.gate, "inputs", 63),
    ),
    "inputs of one branch": ("gemma4_text shared", lambda c: (_block(c), "branches", 1)),
    "inputs of a norm behind": ("gemma4_text shared", lambda c: (_block(c), "post", 1)),
    "inputs with a gate of two": ("gemma4_text shared", lambda c: (_block(c), "activation", 12)),
    "inputs for none": ("gemma4_text no own inputs", lambda c: (c, "inputs", 64)),
    "growth without places": ("ministral3", lambda c: (c, "places", None)),
    "growth with a period of 0": ("ministral3", lambda c: (c.blocks[1], "growth_period", 0.0)),
    "growth from before the start": ("ministral3", lambda c: (c.blocks[1], "growth_offset", -1.0)),
    "a scale of no dtype": ("gemma4_text shared", lambda c: (_block(c).layer_scale, "dtype", 9)),
    "a scale at an odd place": ("gemma4_text shared", lambda c: (_block(c).layer_scale, "weight", 65)),
    "experts beside none": ("gemma4_text experts", lambda c: (_block(c).moe.contents, "shared", 0)),
    "experts in a third way": (
        "gemma4_text experts",
        lambda c: (_block(c).moe.contents, "beside", 2),
    ),
    "norms of experts that are not beside": (
        "gemma4_text experts",
        lambda c: (_block(c).moe.contents, "beside", 0),
    ),
    "experts' scales of no dtype": (
        "gemma4_text experts",
        lambda c: (_block(c).moe.contents, "expert_scale_dtype", 5),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_calls_that_contradict_themselves_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = CHANGES[what]
    refuses(Rounds(accepted(BY_NAME[name], torch.float32), "baseline"), change, monkeypatch)


FRAMES: dict[str, Change] = {
    "fewer rows than tokens": lambda f: (f.inputs_embed, "outputs", 40),
    "rows of another width": lambda f: (f.inputs_embed, "inputs", 24),
    "no projection": lambda f: (f.inputs_project, "outputs", 0),
    "a projection of other inputs": lambda f: (f.inputs_project, "inputs", 32),
    "a norm of another width": lambda f: (f.inputs_norm, "count", 16),
    "placeholders nowhere": lambda f: (f, "num_placeholders", 2),
    "fewer placeholders than none": lambda f: (f, "num_placeholders", -1),
}


@pytest.mark.parametrize("what", FRAMES)
def test_frames_that_contradict_their_layers_are_refused(what: str) -> None:
    runs = Sessions(accepted(BY_NAME["gemma4_text shared"], torch.float32), "baseline")
    refuses_frame(runs, FRAMES[what])


def test_a_placeholder_for_a_token_that_does_not_exist_is_refused() -> None:
    runs = Sessions(accepted(BY_NAME["gemma4_text shared"], torch.float32))
    frame: Any = runs.model.frame
    frame.spec = replace(frame.spec, placeholders=(4,), stand_in=10_000)
    with pytest.raises(DeviceError, match="refuses its arguments"):
        runs.begin().logits(runs.step(PREFILL))


def test_inputs_of_layers_beside_other_embeddings_are_left() -> None:
    runs = Sessions(accepted(BY_NAME["gemma4_text shared"], torch.float32))
    frame: Any = runs.model.frame
    frame.embed_norm = frame.final_norm
    assert "layers' own inputs" in str(refuse_frame(frame))
    assert runs.model.begin(runs.caches[1].layers, 96) is None

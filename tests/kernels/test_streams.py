"""Layers of several streams, their narrow branches and sparse gates; what makes streams of embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.formats import FORMATS
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.blocks import refuse_block
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.ops.activation import deviations_at, sparse
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.libraries import library
from tests.kernels.test_model import TOLERANCE as LOGITS
from tests.kernels.test_model import Sessions, hold_every_step, refuses_frame
from tests.kernels.test_shared_keys import stepped
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

STREAMED = [v for v in VARIANTS if v[0].name == "gemma3n_text"]
FIRST = STREAMED[0]


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("variant", STREAMED, ids=label)
def test_every_instruction_set(variant: Any, isa: str) -> None:
    library(isa)
    engine = accepted(variant, torch.float32)
    hold_every_step(engine, isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_16_bits_are_closer_to_float32_than_the_reference_s(isa: str, dtype: torch.dtype) -> None:
    library(isa)
    ours, theirs = squared_errors(peaked_model(FIRST[1]).to(dtype), dtype, isa)
    assert 0 < ours <= theirs


@pytest.mark.parametrize("quant", [name for name in FORMATS if name != "plain" and name in abi.FORMATS])
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_packed_weights(isa: str, quant: str) -> None:
    library(isa)
    engine = accepted(FIRST, torch.float32, quant)
    rounds, steps = Rounds(engine, isa), Sessions(engine, isa)
    for spans in (PREFILL, CHUNK, DECODE, SINGLE):
        assert rounds.error(spans) <= TOLERANCE[torch.float32]
        assert steps.error(spans) <= LOGITS[torch.float32]


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_only_rows_with_logits_go_through_the_layers_that_borrow(isa: str) -> None:
    library(isa)
    runs = Sessions(accepted(FIRST, torch.float32), isa)
    for wanted in ([True, False, True, False], [False, False, False, True], [True] * 4):
        runs.session = runs.begin()
        step = stepped(runs, PREFILL, wanted)
        with torch.no_grad():
            expected = runs.plain(step, runs.caches[0]).float()
        got = runs.session.logits(step)
        assert got is not None and got.shape == expected.shape
        assert float((got - expected).abs().max() / expected.abs().max()) <= LOGITS[torch.float32]


def test_tokens_beyond_the_second_table_read_its_first_row() -> None:
    runs = Sessions(accepted(FIRST, torch.float32))
    frame: Any = runs.model.frame
    whole = runs.begin().logits(stepped(runs, PREFILL, [True] * 4))
    inputs = replace(frame.spec.inputs, rows=20)
    frame.spec = replace(frame.spec, inputs=inputs)
    runs.session = runs.begin()
    assert runs.error(PREFILL) <= LOGITS[torch.float32]
    part = runs.begin().logits(stepped(runs, PREFILL, [True] * 4))
    assert whole is not None and part is not None and not torch.allclose(whole, part, atol=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_sparse_gate_keeps_its_share(share: float) -> None:
    gate, up = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)).chunk(2, dim=-1)
    x = torch.cat([3 * gate + 2, up], dim=-1)
    thin, same = sparse(x, share, gated=True).chunk(2, dim=-1)
    assert torch.equal(same, up)
    assert float((thin == 0).float().mean()) == pytest.approx(share, abs=0.01)
    kept = thin > 0
    bound = 2 + 3 * deviations_at(share, torch.float32)
    torch.testing.assert_close(thin[kept], (3 * gate + 2 - bound)[kept], atol=0.2, rtol=0)


def _streams(call: Any, index: int = 1) -> Any:
    return call.blocks[min(index, call.num_blocks - 1)].streams.contents


def _none(call: Any) -> Any:
    return type(call.blocks[0].streams)()


CHANGES: dict[str, Change] = {
    "streams in some blocks only": lambda c: (c.blocks[1], "streams", _none(c)),
    "no streams in the first block": lambda c: (c.blocks[0], "streams", _none(c)),
    "one stream": lambda c: (_streams(c, 0), "count", 1),
    "more streams than fit": lambda c: (_streams(c, 0), "count", 9),
    "more streams than other blocks": lambda c: (_streams(c), "count", 3),
    "an active one that is not there": lambda c: (_streams(c), "active", 4),
    "an active one before the first": lambda c: (_streams(c), "active", -1),
    "a branch of no width": lambda c: (_streams(c), "rank", 0),
    "a branch of another width": lambda c: (_streams(c), "rank", 16),
    "a router of other inputs": lambda c: (_streams(c).router, "inputs", 63),
    "a packed router": lambda c: (_streams(c).router, "format", 1),
    "predictions for fewer streams": lambda c: (_streams(c).predict, "outputs", 9),
    "a correction that is transposed": lambda c: (
        abi.Run.from_address(_streams(c).correct.runs),
        "transposed",
        1,
    ),
    "a norm of another width": lambda c: (_streams(c).router_norm, "count", 7),
    "a scale of no dtype": lambda c: (_streams(c).scale, "dtype", 9),
    "no inputs of its own": lambda c: (c.blocks[1], "inputs", type(c.blocks[1].inputs)()),
    "residuals from norms": lambda c: (c.blocks[1], "residual_from_norm", 1),
    "gates sparse in a second way": lambda c: (c.blocks[0], "sparse", 2),
    "a bound that is no number": lambda c: (c.blocks[0], "cutoff", float("nan")),
    "a sparse gate of two inputs": lambda c: (c.blocks[0], "activation", 12),
}


@pytest.mark.parametrize("what", CHANGES)
def test_calls_that_contradict_themselves_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(Rounds(accepted(FIRST, torch.float32), "baseline"), CHANGES[what], monkeypatch)


FRAMES: dict[str, Change] = {
    "streams for none": lambda f: (f, "others", 0),
    "fewer streams than the layers have": lambda f: (f, "others", 2),
    "no matrices to split": lambda f: (f, "split", None),
    "no matrices to join": lambda f: (f, "join", None),
    "a matrix of other inputs": lambda f: (abi.Matrix.from_address(f.split), "inputs", 32),
    "a matrix of other outputs": lambda f: (abi.Matrix.from_address(f.join), "outputs", 32),
    "more rows than the second table has": lambda f: (f, "inputs_rows", 1000),
    "fewer rows than none": lambda f: (f, "inputs_rows", -1),
}


@pytest.mark.parametrize("what", FRAMES)
def test_frames_that_contradict_their_layers_are_refused(what: str) -> None:
    runs = Sessions(accepted(FIRST, torch.float32), "baseline")
    refuses_frame(runs, FRAMES[what])


def test_layers_that_the_library_cannot_run_say_why() -> None:
    runner = accepted(FIRST, torch.float32)._built.runner
    assert runner is not None
    block: Any = runner.blocks[0]
    assert refuse_block(block) is None
    many = replace(block.spec.streams, count=9)
    for spec, reason in (
        (replace(block.spec, streams=many), "9 streams are not supported, at most 8"),
        (replace(block.spec, inputs=0), "streams of layers without inputs of their own"),
        (replace(block.spec, streams=None), "course="),
    ):
        block.spec = spec
        assert reason in str(refuse_block(block))

"""Whole native steps of decoders that listen to an encoder say what their parts say one by one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.encoder_decoder import with_encoder
from slipstream.engine.generation.runner import Runner
from slipstream.errors import DeviceError
from slipstream.families import FAMILIES
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.encoder_decoder import NativeEncoderDecoder, bind_encoder_decoder
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.model.frame.run_stack import run_stack
from slipstream.ops.encoder_states import EncoderStates
from tests.families.sweep import peaked_model
from tests.helpers.models import inject

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)
TOLERANCE = 3e-5
"""Of the largest logit, in float32; sixteen bits are judged by how far off the parts themselves are."""

KINDS = ("bart", "t5", "umt5", "pegasus", "blenderbot-small", "m2m_100", "t5gemma")
LONGEST = 9


def said(engine: Any) -> tuple[Tensor, Tensor]:
    """An encoder's states and mask of three rows, the first of which is padded behind its tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    with torch.no_grad():
        return engine.module.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state, mask


@torch.no_grad()
def logits(runner: Runner) -> list[Tensor]:
    """Of a prompt, and of three steps that follow it, one of them of a token that is padding to some."""
    ids = torch.tensor([[4, 8, 5], [7, 9, 12], [4, 4, 30]])
    batch = Batch(runner, ids, None, max_length=LONGEST, token_budget=ids.numel())
    out = [batch.logits()]
    for token in (6, 1, 40):
        batch.append(torch.full((3, 1), token))
        out.append(batch.logits())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_what_their_parts_are_one_by_one(kind: str, isa: str, dtype: torch.dtype) -> None:
    library = load(isa)
    if library is None:
        pytest.skip(f"this machine has no {isa}")
    original = peaked_model(FAMILIES[kind].tiny[0])
    engine, exact = inject(original, dtype=dtype), inject(original)
    runner = copy.copy(engine._built.runner)
    assert isinstance(runner.whole, NativeEncoderDecoder)
    stack = type(runner.whole.stack)(runner.blocks, library, run_stack)
    runner.whole = replace(runner.whole, stack=stack)
    states, mask = said(engine)
    heard = with_encoder(runner, states, mask, LONGEST)
    assert heard.whole is not None
    parts = copy.copy(heard)
    parts.whole = None
    whole = torch.stack(logits(heard))
    if dtype == torch.float32:
        expected = torch.stack(logits(parts))
        assert float((expected - whole).abs().max() / expected.abs().max()) <= TOLERANCE
        return
    alone = with_encoder(exact._built.runner, *said(exact), LONGEST)
    alone.whole = None
    truth = torch.stack(logits(alone))
    ours, theirs = (float((truth - some).square().sum()) for some in (whole, torch.stack(logits(parts))))
    assert ours <= 1.2 * theirs


def test_what_hides_states_in_between_runs_by_parts() -> None:
    engine = inject(peaked_model(FAMILIES["bart"].tiny[0]))
    states, mask = said(engine)
    for hidden, is_whole in (((0, 3), False), ((2, 0), False), ((1, 10), True)):
        gaps = mask.clone()
        gaps[hidden] = 0
        assert (with_encoder(engine._built.runner, states, gaps, LONGEST).whole is not None) == is_whole


@pytest.mark.parametrize("what", ["states that are not there", "no states", "a table that is too short"])
def test_what_cannot_be_heard_is_refused(what: str) -> None:
    engine = inject(peaked_model(FAMILIES["t5"].tiny[0]))
    states, mask = said(engine)
    runner = engine._built.runner
    heard = with_encoder(runner, states, mask, LONGEST if what != "a table that is too short" else 2)
    told: EncoderStates = heard.whole.stack._states
    if "states" in what:
        seen = torch.tensor([6, 12 if "not" in what else 0, 11], dtype=torch.int32)
        heard.whole = runner.whole.with_encoder_states(replace(told, seen=seen))
    with pytest.raises(DeviceError):
        logits(heard)


def test_a_copied_listener_has_its_own_layers() -> None:
    engine = inject(peaked_model(FAMILIES["bart"].tiny[0]))
    other = copy.deepcopy(engine)
    whole = other._built.runner.whole
    assert isinstance(whole, NativeEncoderDecoder)
    assert all(a is b for a, b in zip(whole.stack.blocks, other._built.runner.blocks, strict=True))
    assert whole.begin([], 4) is None
    assert bind_encoder_decoder(engine._built.runner.frame, [], run_stack) is None


@pytest.mark.parametrize(("kind", "is_whole"), [("bart", True), ("t5", True), ("nllb-moe", False)])
def test_the_report_says_whether_steps_are_whole(kind: str, is_whole: bool) -> None:
    engine = inject(peaked_model(FAMILIES[kind].tiny[0]))
    decoders = [one for one in engine.report().layers if "decoder" in one.name]
    assert decoders
    assert {one.kernels["stack"] for one in decoders} == {
        f"cpu-{engine._built.runner.whole.stack.library.isa}" if is_whole else "reference"
    }

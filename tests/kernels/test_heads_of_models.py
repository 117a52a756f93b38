"""What surrounds the layers of decoders with a head of two linears; chunks of positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.frames import refuse_frame
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from tests.families.sweep import VARIANTS, label
from tests.helpers.libraries import library
from tests.kernels.test_model import TOLERANCE as LOGITS
from tests.kernels.test_model import Sessions, hold_every_step, refuses_frame
from tests.kernels.test_stack import (
    PREFILL,
    Change,
    Rounds,
    accepted,
    refuses,
)

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

NAMES = ("modernbert-decoder", "llama4_text")
TYPED = ("bert causal", "roberta causal", "roberta-prelayernorm causal", "xlm-roberta-xl causal")
BY_NAME = {label(v): v for v in VARIANTS if v[0].name in NAMES or label(v) in TYPED}


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", BY_NAME)
def test_every_instruction_set(name: str, isa: str) -> None:
    library(isa)
    engine = accepted(BY_NAME[name], torch.float32)
    hold_every_step(engine, isa)


FRAMES: dict[str, Change] = {
    "an activation of no kind": lambda f: (f, "out_activation", 99),
    "an activation below any kind": lambda f: (f, "out_activation", -2),
    "an activation of two inputs": lambda f: (f, "out_activation", 12),
    "no product": lambda f: (f.project_out, "outputs", 0),
    "a norm of another width": lambda f: (f.out_norm, "count", 63),
    "a norm of no kind": lambda f: (f.out_norm, "kind", 5),
}


@pytest.mark.parametrize("what", FRAMES)
def test_frames_that_contradict_themselves_are_refused(what: str) -> None:
    runs = Sessions(accepted(BY_NAME["modernbert-decoder"], torch.float32), "baseline")
    refuses_frame(runs, FRAMES[what])


TYPES: dict[str, Change] = {
    "a row of no dtype": lambda f: (f, "type_dtype", 99),
    "a row at an odd address": lambda f: (f, "type_row", f.type_row + 1),
}


@pytest.mark.parametrize("what", TYPES)
def test_rows_of_types_that_cannot_be_read_are_refused(what: str) -> None:
    runs = Sessions(accepted(BY_NAME["bert causal"], torch.float32), "baseline")
    refuses_frame(runs, TYPES[what])


def test_a_row_of_types_in_pieces_is_left_to_the_reference() -> None:
    runs = Sessions(accepted(BY_NAME["bert causal"], torch.float32))
    frame: Any = runs.model.frame
    assert refuse_frame(frame) is None
    module = frame._type_embed[0]
    module.weight = torch.nn.Parameter(module.weight.detach().T.contiguous().T)
    assert "with strides" in str(refuse_frame(frame))


def test_another_row_of_types_is_used() -> None:
    runs = Sessions(accepted(BY_NAME["bert causal"], torch.float32))
    with torch.no_grad():
        runs.model.frame.type_row.add_(1.0)  # type: ignore[attr-defined]
    assert runs.error(PREFILL) <= LOGITS[torch.float32]


def test_an_activation_without_a_product_is_left_to_the_reference() -> None:
    runs = Sessions(accepted(BY_NAME["modernbert-decoder"], torch.float32))
    frame: Any = runs.model.frame
    assert refuse_frame(frame) is None
    frame.project_out = None
    assert "before the vocabulary projection" in str(refuse_frame(frame))
    assert runs.model.begin(runs.caches[1].layers, 96) is None


def test_another_activation_is_used() -> None:
    runs = Sessions(accepted(BY_NAME["modernbert-decoder"], torch.float32))
    frame: Any = runs.model.frame
    frame.spec = replace(frame.spec, out_activation="relu2")
    runs.session = runs.begin()
    assert runs.error(PREFILL) <= LOGITS[torch.float32]


MASKS: dict[str, Change] = {
    "chunks of fewer than no tokens": lambda c: (c.blocks[0].mask, "chunk", -1),
    "chunks of too many tokens": lambda c: (c.blocks[0].mask, "chunk", 1 << 62),
    "chunks and a window": lambda c: (c.blocks[0].mask, "window", 3),
}


@pytest.mark.parametrize("what", MASKS)
def test_masks_that_contradict_themselves_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(Rounds(accepted(BY_NAME["llama4_text"], torch.float32), "baseline"), MASKS[what], monkeypatch)

"""A real speech model hears a real sentence: the engine writes what the original writes, token for token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import slipstream
from tests.helpers.models import close
from tests.real import moonshine

pytestmark = pytest.mark.skipif(
    not moonshine.HERE.exists(), reason="Moonshine tiny is not here; scripts/install moonshine fetches it"
)

SAID = "Ever tried, ever failed, no matter try again, fail again, fail better."
BEAMS_SAID = "Ever tried, ever failed, no matter, try again, fail again, fail better."


@pytest.fixture(scope="module")
def original() -> Any:
    return moonshine.model()


@pytest.fixture(scope="module")
def engine(original: Any) -> Any:
    made = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    assert made.report().level == "block", str(made.report())
    return made


@pytest.mark.parametrize(
    ("options", "said"), [({}, SAID), ({"num_beams": 4}, BEAMS_SAID)], ids=["greedy", "beams"]
)
def test_a_sentence_is_transcribed_as_the_original_does(
    original: Any, engine: Any, options: dict[str, Any], said: str
) -> None:
    expected = original.generate(moonshine.sound(), max_new_tokens=60, **options)
    got = engine.generate(moonshine.sound(), max_new_tokens=60, **options)
    assert torch.equal(expected, got)
    assert moonshine.text(got[0]).strip() == said


def test_a_batch_with_silence_is_transcribed_as_the_original_does(original: Any, engine: Any) -> None:
    """The second sound ends early, and says so in its mask."""
    sound = moonshine.sound().repeat(2, 1)
    mask = torch.ones_like(sound, dtype=torch.long)
    half = sound.shape[1] // 2
    sound[1, half:], mask[1, half:] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 40}
    expected, got = (m.generate(sound, **options) for m in (original, engine))
    assert torch.equal(expected, got)
    assert moonshine.text(got[0]).strip() == SAID


def test_probabilities_are_the_originals(original: Any, engine: Any) -> None:
    tokens = original.generate(moonshine.sound(), max_new_tokens=60)
    with torch.no_grad():
        outputs = [m(moonshine.sound(), decoder_input_ids=tokens[:, :-1]) for m in (original, engine)]
    close(*(output.logits.log_softmax(-1) for output in outputs))

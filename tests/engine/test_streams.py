"""Models of several streams generate on the engine road, also inside a model that sees and hears."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from slipstream.kernels.cpu.model import NativeSession
from tests.engine.test_recurrent import UNTIED, both, two_of
from tests.families.sweep import VARIANTS
from tests.helpers.models import Pair, inject, prompt, roads

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

VARIANT = next(v for v in VARIANTS if v[0].name == "gemma3n_text")
FIRST_PICTURE, FIRST_SOUND, VOCABULARY = 128, 144, 160


@pytest.fixture
def streams() -> Pair:
    return two_of(VARIANT, **UNTIED)


@pytest.fixture(scope="module")
def seeing() -> Pair:
    """A whole Gemma 3n; its vision tower, which needs another package, is one of SigLIP."""
    from transformers import (
        Gemma3nAudioConfig,
        Gemma3nConfig,
        Gemma3nForConditionalGeneration,
        Gemma3nTextConfig,
        SiglipVisionConfig,
    )

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**sizes, image_size=32, patch_size=16)
    vision.vocab_size, vision.vocab_offset, vision.rms_norm_eps = 16, FIRST_PICTURE, 1e-6
    audio = Gemma3nAudioConfig(
        vocab_size=VOCABULARY - FIRST_SOUND,
        vocab_offset=FIRST_SOUND,
        hidden_size=32,
        conf_num_attention_heads=2,
        conf_num_hidden_layers=1,
        sscp_conv_channel_size=(8, 4),
    )
    options = {**VARIANT[1].options, "vocab_size": VOCABULARY, **UNTIED}
    config = Gemma3nConfig(text_config=Gemma3nTextConfig(**options), audio_config=audio, **UNTIED)
    vars(config)["vision_config"] = vision
    torch.manual_seed(0)
    original = Gemma3nForConditionalGeneration(config).eval()
    return Pair(original, inject(copy.deepcopy(original)))


@pytest.mark.parametrize("changed", ["altup_projections.1.weight", "altup_unembed_projections.0.weight"])
def test_values_written_into_what_makes_the_streams_count(streams: Pair, changed: str) -> None:
    both(streams, input_ids=prompt(1))
    for model in (streams.original, streams.engine.module):
        with torch.no_grad():
            model.model.get_parameter(changed).mul_(-3.0)
    both(streams, input_ids=prompt(1))


@pytest.mark.parametrize("part", ["altup.modality_router", "altup.prediction_coefs", "laurel.linear_left"])
def test_values_written_into_a_layer_count(streams: Pair, part: str) -> None:
    before = streams.original.generate(prompt(2), max_new_tokens=12, pad_token_id=0)
    both(streams, input_ids=prompt(2))
    for model in (streams.original, streams.engine.module):
        with torch.no_grad():
            model.model.layers[1].get_submodule(part).weight.normal_(
                std=2.0, generator=torch.Generator().manual_seed(5)
            )
    both(streams, input_ids=prompt(2))
    assert not torch.equal(before, streams.original.generate(prompt(2), max_new_tokens=12, pad_token_id=0))


def test_layers_that_are_streamed_generate_the_same(streams: Pair, tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    engine = inject(streams.original, zero={"stage": 3, "offload_param": offload})
    both(Pair(streams.original, engine), input_ids=prompt(2))


def test_packed_layers_and_an_int8_cache(streams: Pair) -> None:
    engine = inject(streams.original, dtype=torch.bfloat16, quant="int8", kv_cache_dtype="int8")
    with roads(engine) as counts:
        tokens = engine.generate(input_ids=prompt(2), max_new_tokens=6, pad_token_id=0)
    assert counts.taken == "engine" and tokens.shape == (2, 15)


def test_states_that_are_asked_for_have_all_streams(streams: Pair) -> None:
    expected, got = (
        model(input_ids=prompt(2), output_hidden_states=True).hidden_states
        for model in (streams.original, streams.engine)
    )
    assert len(expected) == len(got) and got[0].shape[0] == 4
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def generated(models: Pair, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """Generate with both; return the tokens, and how many steps the library has not taken."""
    left = 0
    takes = NativeSession._takes

    def counted(self: NativeSession, *given: Any) -> bool:
        nonlocal left
        taken = takes(self, *given)
        left += not taken
        return taken

    options = {"max_new_tokens": 16, "pad_token_id": 0, "do_sample": False}
    expected = models.original.generate(input_ids=ids, **options)
    with monkeypatch.context() as patch, roads(models.engine) as counts:
        patch.setattr(NativeSession, "_takes", counted)
        got = models.engine.generate(input_ids=ids, **options)
    assert torch.equal(got, expected) and counts.runner > 0
    return got, left


def test_a_model_that_sees_and_hears(seeing: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(2)
    ids[0, 3], ids[1, 4] = FIRST_PICTURE + 2, FIRST_SOUND + 5
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (seeing.original, seeing.engine)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    generated(seeing, ids, monkeypatch)


@pytest.mark.parametrize("token", [FIRST_PICTURE + 2, FIRST_SOUND + 5])
def test_pictures_and_sounds_that_it_writes_are_embedded_by_others(
    seeing: Pair, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Pair(copy.deepcopy(seeing.original), copy.deepcopy(seeing.engine))
    tokens, _ = generated(models, prompt(1), monkeypatch)
    written = int(tokens[0, prompt(1).shape[1] + 1])  # this token becomes the other one
    for model in (models.original, models.engine.module):
        with torch.no_grad():
            rows = model.lm_head.weight
            rows[[written, token]] = rows[[token, written]]
    tokens, left = generated(models, prompt(1), monkeypatch)
    assert int((tokens[0, prompt(1).shape[1] :] >= FIRST_PICTURE).sum()) >= 1 and left >= 1

"""BLIP's decoder of text attends to a picture, or to a question about one, on the engine road."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from tests.helpers.models import Pair, inject

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
}
TEXT = {**SIZES, "vocab_size": 120, "bos_token_id": 1, "sep_token_id": 119, "pad_token_id": 0}
PICTURE = {**SIZES, "image_size": 32, "patch_size": 8}


def build(kind: str, size: float = 0.3) -> Any:
    import transformers

    config = transformers.BlipConfig(
        text_config={**TEXT, "max_position_embeddings": 64}, vision_config=PICTURE, projection_dim=32
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, size)
    return model


@pytest.fixture(scope="module", params=["BlipForConditionalGeneration", "BlipForQuestionAnswering"])
def models(request: pytest.FixtureRequest) -> Pair:
    original = build(request.param)
    return Pair(original, inject(copy.deepcopy(original)))


@contextmanager
def forwards_of(decoder: Any) -> Iterator[list[int]]:
    """Count the decoder's own forwards."""
    counts, kind = [0], type(decoder)
    forward = kind.forward

    @functools.wraps(forward)  # transformers reads the signature
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[0] += self is decoder
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", counted)
        yield counts


def both(models: Pair, road: str = "engine", **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(2, 3, 32, 32, generator=generator)
    ids = torch.randint(3, 110, (2, 6), generator=generator)
    options = {"pixel_values": pictures, "input_ids": ids, "max_new_tokens": 16, **options}
    answers = []
    for model in (models.original, models.engine):
        torch.manual_seed(3)
        with forwards_of(models.engine.module.text_decoder) as counts:
            answers.append(model.generate(**copy.deepcopy(options)))  # the model writes into the prompt
    assert (counts[0] == 0) == (road == "engine")
    assert torch.equal(*answers)
    return answers[0]  # type: ignore[no-any-return]


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 3.0},
    "sampled": {"do_sample": True, "temperature": 8.0},
    "beams": {"num_beams": 3},
    "one picture": {"pixel_values": torch.ones(1, 3, 32, 32), "input_ids": torch.tensor([[1, 9, 30]])},
    "a mask": {"attention_mask": torch.ones(2, 6, dtype=torch.int64)},
}


@pytest.mark.parametrize("call", CALLS)
def test_the_tokens_are_the_original_s(models: Pair, call: str) -> None:
    tokens = both(models, **CALLS[call])
    assert call not in ("greedy", "sampled") or len(set(tokens[0, 6:].tolist())) > 1


def test_a_picture_alone(models: Pair) -> None:
    if "Question" in type(models.original).__name__:
        pytest.skip("a question is needed")
    both(models, input_ids=None)


def test_a_padded_prompt_is_left_to_the_original_s_loop(models: Pair) -> None:
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    asks = "Question" in type(models.original).__name__  # there the prompt is the encoder's
    both(models, road="engine" if asks else "compatible", attention_mask=mask)


def test_without_a_cache_the_original_s_loop_runs(models: Pair) -> None:
    both(models, road="compatible", use_cache=False)


def test_steps_are_whole_calls_and_the_report_says_so(models: Pair) -> None:
    runner = models.engine._built.runner
    assert runner is not None and runner.whole is not None and not runner.takes_over
    assert not any("one at a time" in note or "loop" in note for note in models.engine.report().notes)


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_formats(quant: str | None) -> None:
    options = {} if quant is None else {"quant": quant}
    engine = inject(build("BlipForConditionalGeneration", 0.1), dtype=torch.bfloat16, **options)
    with forwards_of(engine.module.text_decoder) as counts:
        tokens = engine.generate(pixel_values=torch.ones(2, 3, 32, 32).bfloat16(), max_new_tokens=6)
    assert counts[0] == 0 and tokens.shape == (2, 7)


def test_a_mask_of_the_encoder_s_states_is_ignored_as_in_the_original() -> None:
    import transformers

    torch.manual_seed(0)
    original = transformers.BlipTextLMHeadModel(
        transformers.BlipTextConfig(**TEXT, encoder_hidden_size=48)
    ).eval()
    engine = inject(copy.deepcopy(original))
    ids, states, seen = (
        torch.randint(3, 90, (2, 7)),
        torch.randn(2, 5, 48),
        torch.ones(2, 5, dtype=torch.int64),
    )
    seen[0, 3:] = 0
    with torch.no_grad():
        given = {"encoder_hidden_states": states, "encoder_attention_mask": seen}
        torch.testing.assert_close(
            original(ids, **given).logits, engine(ids, **given).logits, atol=1e-4, rtol=1e-4
        )

"""`max_out_tokens` and `min_out_tokens` hold before any work is done, with both numbers in the message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

import slipstream
from tests.helpers.models import inject, make, prompt, roads


def engine_of(**settings: Any) -> slipstream.InferenceEngine:
    return inject(make("llama"), **settings)


@pytest.mark.parametrize("injected", [True, False])
@pytest.mark.parametrize("way", ["input_ids", "inputs", "positional"])
def test_an_input_longer_than_the_limit_is_refused(injected: bool, way: str) -> None:
    engine = engine_of(max_out_tokens=8, replace_with_kernel_inject=injected)
    args = (prompt(1, 9),) if way == "positional" else ()
    kwargs = {} if way == "positional" else {way: prompt(1, 9)}
    with (
        roads(engine) as counts,
        pytest.raises(slipstream.TokenLimitError, match=r"9.*max_out_tokens=8") as caught,
    ):
        engine.generate(*args, max_new_tokens=2, **kwargs)
    assert counts.taken == "none"
    assert isinstance(caught.value, RuntimeError)
    assert "raise max_out_tokens to at least 11" in str(caught.value)


def test_input_and_output_together_count() -> None:
    engine = engine_of(max_out_tokens=16)
    assert engine.generate(input_ids=prompt(1, 9), max_new_tokens=7, eos_token_id=None).shape[1] == 16
    with (
        roads(engine) as counts,
        pytest.raises(slipstream.TokenLimitError, match=r"17.*max_out_tokens=16") as caught,
    ):
        engine.generate(input_ids=prompt(1, 9), max_new_tokens=8)
    assert counts.taken == "none" and "max_new_tokens=7" in str(caught.value)


@pytest.mark.parametrize(
    "length",
    [
        {"max_length": 17},
        {"generation_config": GenerationConfig(max_new_tokens=8)},
        {"num_beams": 2, "max_new_tokens": 8},
        {"max_new_tokens": 8, "use_cache": False},
    ],
    ids=str,
)
def test_the_limit_holds_however_the_length_is_said(length: dict[str, Any]) -> None:
    engine = engine_of(max_out_tokens=16)
    with pytest.raises(slipstream.TokenLimitError, match="17"):
        engine.generate(input_ids=prompt(1, 9), **length)


def test_the_default_length_counts() -> None:
    engine = engine_of(max_out_tokens=28)
    with pytest.raises(slipstream.TokenLimitError, match="20 new"):
        engine.generate(input_ids=prompt(1, 9))
    assert engine.generate(input_ids=prompt(1, 8), eos_token_id=None).shape[1] == 28


def test_the_models_own_default_length_counts() -> None:
    engine = engine_of(max_out_tokens=20)
    engine.generation_config.max_new_tokens = 5
    assert engine.generate(input_ids=prompt(1, 9), eos_token_id=None).shape[1] == 14
    engine.generation_config.max_new_tokens = 12
    with pytest.raises(slipstream.TokenLimitError, match="21"):
        engine.generate(input_ids=prompt(1, 9))


def test_embeddings_count_too() -> None:
    engine = engine_of(max_out_tokens=16)
    embeds = engine.get_input_embeddings()(prompt(1, 9)).detach()
    with pytest.raises(slipstream.TokenLimitError, match="17"):
        engine.generate(inputs_embeds=embeds, max_new_tokens=8)
    assert engine.generate(inputs_embeds=embeds, max_new_tokens=7, eos_token_id=None).shape[1] == 7


def test_min_out_tokens_must_fit() -> None:
    engine = engine_of(max_out_tokens=16, min_out_tokens=6)
    with roads(engine) as counts, pytest.raises(slipstream.TokenLimitError, match=r"min_out_tokens=6.*17"):
        engine.generate(input_ids=prompt(1, 11), max_new_tokens=2)
    assert counts.taken == "none"
    assert engine.generate(input_ids=prompt(1, 10), max_new_tokens=6, eos_token_id=None).shape[1] == 16


def test_a_forward_is_not_bounded() -> None:
    """It allocates nothing that outlives it, and DeepSpeed bounds generation alone."""
    assert engine_of(max_out_tokens=4)(input_ids=prompt(1, 9)).logits.shape[1] == 9


def test_the_limit_is_the_documented_default() -> None:
    engine = slipstream.init_inference(make("llama"), dtype=torch.float32)
    assert engine.inference_config.max_out_tokens == 1024
    with pytest.raises(slipstream.TokenLimitError, match="1024"):
        engine.generate(input_ids=prompt(1, 9), max_new_tokens=1016)


def test_an_encoders_input_and_the_decoders_output_are_bounded_by_themselves() -> None:
    options = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 50}
    heads = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    torch.manual_seed(0)
    original = BartForConditionalGeneration(BartConfig(**options, **heads, max_position_embeddings=64)).eval()
    engine = inject(original, max_out_tokens=12, replace_with_kernel_inject=False)
    ids = prompt(2, 9, vocabulary=50)
    assert torch.equal(original.generate(ids, max_new_tokens=11), engine.generate(ids, max_new_tokens=11))
    with pytest.raises(slipstream.TokenLimitError, match="13"):
        engine.generate(ids, max_new_tokens=12)
    with pytest.raises(slipstream.TokenLimitError, match="input has 13"):
        engine.generate(prompt(2, 13, vocabulary=50), max_new_tokens=2)

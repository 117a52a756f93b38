"""Models that replace placeholder tokens by images or codes, or choose matrices by position."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.errors import RequestError
from tests.helpers.models import close
from tests.helpers.pictures import PICTURE, TEXT, grown

LANGUAGE: dict[str, Any] = {**TEXT, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 6}
PLACES = 16
"""Number of tokens of an image: four by four patches."""


def injected(model: Any) -> Any:
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True
    )


@pytest.mark.parametrize("place", [100, TEXT["vocab_size"]], ids=["within", "outside"])
def test_the_token_of_a_picture_may_lie_outside_of_the_vocabulary(place: int) -> None:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**LANGUAGE, sliding_window_pattern=2),
        vision_config=transformers.SiglipVisionConfig(**PICTURE, vision_use_head=False),
        mm_tokens_per_image=PLACES,
        image_token_index=place,
        boi_token_index=101,
        eoi_token_index=102,
    )
    original = grown(config, "Gemma3ForConditionalGeneration")
    engine = injected(original)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (2, PLACES + 8), generator=generator)
    ids[:, 4 : 4 + PLACES] = place
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    given = {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == place).long()}
    with torch.no_grad():
        close(original(**given).logits, engine(**given).logits)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(original.generate(**given, **options), engine.generate(**given, **options))
    ids[0, 0] = TEXT["vocab_size"] + 1
    with pytest.raises(RequestError, match=f"input_ids hold {ids[0, 0]}, and the vocabulary"):
        engine(**given)


def test_layers_with_a_matrix_for_each_codebook_run_their_own_code() -> None:
    small: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "ffn_dim": 48,
        "num_codebooks": 4,
        "audio_vocab_size": 64,
        "vocab_size": 90,
    }
    codec = {
        "model_type": "mimi",
        "hidden_size": 32,
        "num_filters": 4,
        "num_residual_layers": 1,
        "upsampling_ratios": [4, 2],
        "codebook_size": 64,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "num_quantizers": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 48,
        "upsample_groups": 32,
        "sampling_rate": 800,
    }
    config = transformers.MoshiConfig(
        **small,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=64,
        audio_encoder_config=codec,
        depth_decoder_config=small | {"num_key_value_heads": 2},
        pad_token_id=0,
    )
    original = grown(config, "MoshiForConditionalGeneration")
    original.generation_config.pad_token_id = 0
    engine = injected(original)
    levels = {row.name.partition(".")[0]: row.level for row in engine.report().layers if row.family}
    assert levels["decoder"] == "block" and levels["depth_decoder"] == "module", str(engine.report())
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 80, (2, 5), generator=generator)
    own, other = (torch.randint(0, 60, (2, 4, 5), generator=generator) for _ in range(2))
    given = {"input_ids": ids, "user_audio_codes": own, "moshi_audio_codes": other}
    with torch.no_grad():
        close(original(**given).logits, engine(**given).logits)
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "concat_unconditional_inputs": False,
        "return_audio_codes": True,
        "return_audio_waveforms": False,
    }
    theirs, ours = (model.generate(**given, **options) for model in (original, engine))
    assert torch.equal(theirs.sequences, ours.sequences) and torch.equal(theirs.audio_codes, ours.audio_codes)

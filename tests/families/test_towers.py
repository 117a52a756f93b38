"""Models of two towers, or with a language model inside: all towers are fused, images affect outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.families import FAMILIES
from slipstream.model.fused.state import injected_state, is_injected
from tests.helpers.models import blocks_that_run, roads
from tests.helpers.pictures import (
    LANGUAGE,
    PICTURE,
    QWEN,
    QWEN_TEXT,
    SPEAKING,
    TEXT,
    grown,
    idefics,
    idefics_asked,
    qwen,
    qwen_asked,
    speaking,
    speaking_asked,
)

TOLERANCE = 1e-4
"""The promised bound for float32, relative to the largest value if that is above one."""

_TWO: list[tuple[str, dict[str, Any]]] = [
    ("CLIP", {}),
    ("Siglip", {}),
    ("AltCLIP", {"project_dim": 64}),
    ("ChineseCLIP", {}),
]


def _injected(model: Any) -> Any:
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True
    )


def _agree(expected: Tensor, got: Tensor) -> None:
    size = max(1.0, float(expected.abs().max()))
    assert float((expected - got).abs().max()) <= TOLERANCE * size


@pytest.mark.parametrize(("prefix", "more"), _TWO, ids=[name for name, _ in _TWO])
def test_both_towers_are_fused_and_agree_on_pairs(prefix: str, more: dict[str, Any]) -> None:
    config = getattr(transformers, f"{prefix}Config")(
        text_config={**TEXT, **more}, vision_config=PICTURE, projection_dim=32
    )
    original = grown(config, f"{prefix}Model")
    engine = _injected(original)
    ids = torch.randint(3, 128, (3, 7), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 2
    mask = torch.ones_like(ids)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
        expected, got = original(**given), engine(**given)
    _agree(expected.logits_per_image, got.logits_per_image)
    _agree(expected.text_embeds, got.text_embeds)
    levels = {layer.family: layer.level for layer in engine.report().layers}
    assert set(levels.values()) == {"block"}, str(engine.report())
    assert len(levels) in (1, 2)


def test_a_pooler_of_the_last_position_reads_it_where_it_is_padding() -> None:
    config = transformers.SiglipConfig(text_config=TEXT, vision_config=PICTURE)
    original = grown(config, "SiglipModel")
    engine = _injected(original)
    ids = torch.randint(3, 128, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    mask[2, 1:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad(), blocks_that_run() as ran:
        expected, got = (model.text_model(**given).pooler_output for model in (original, engine.module))
    assert len(ran.calls) == 1, "its layers did not run in one call, so nothing was left out"
    _agree(expected, got)


@pytest.mark.parametrize("prefix", SPEAKING)
def test_a_language_model_that_sees_is_fused_whole_and_goes_on_seeing(prefix: str) -> None:
    original = speaking(prefix)
    engine = _injected(original)
    given = speaking_asked(prefix)
    other = {**given, "pixel_values": given["pixel_values"].flip(0)}
    with torch.no_grad():
        expected, got = original(**given).logits, engine(**given).logits
        seen = original(**other).logits
    rows = given["attention_mask"].bool()
    _agree(expected[rows], got[rows])
    assert float((expected - seen)[rows].abs().max()) > 1e-2, "the picture says nothing"
    # No family describes the layers of Gemma 4's vision tower.
    read = [one for one in engine.report().layers if prefix != "Gemma4" or "language_model" in one.name]
    assert read and {layer.level for layer in read} == {"block"}, str(engine.report())
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(original.generate(**given, **options), engine.generate(**given, **options))


def test_paligemma_2_is_fused_whole_with_the_windows_and_caps_of_its_language_model() -> None:
    caps = {"sliding_window": 9, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
    config = SPEAKING["PaliGemma"]()
    config.text_config = transformers.Gemma2Config(
        **LANGUAGE, **caps, query_pre_attn_scalar=20, use_bidirectional_attention=True
    )
    original = grown(config, "PaliGemmaForConditionalGeneration")
    engine = _injected(original)
    assert engine.report().level == "block", str(engine.report())
    given = speaking_asked("PaliGemma")
    with torch.no_grad():
        rows = given["attention_mask"].bool()
        _agree(original(**given).logits[rows], engine(**given).logits[rows])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(original.generate(**given, **options), engine.generate(**given, **options))


def test_t5gemma_2_reads_pictures_in_its_encoder_and_writes_by_fused_layers() -> None:
    tiny = FAMILIES["t5gemma2"].tiny[0]
    original = grown(getattr(transformers, tiny.config)(**tiny.options, image_token_index=100), tiny.model)
    engine = _injected(original)
    assert engine.report().level == "block", str(engine.report())
    given = speaking_asked("T5Gemma2")
    other = {**given, "pixel_values": given["pixel_values"].flip(0)}
    answer = torch.tensor([[1, 7, 9], [1, 8, 4]])
    with torch.no_grad():
        expected, got, seen = (
            model(**asked, decoder_input_ids=answer).logits
            for model, asked in ((original, given), (engine, given), (original, other))
        )
    _agree(expected, got)
    assert float((expected - seen).abs().max()) > 1e-2, "the picture says nothing"
    for options in ({"do_sample": False}, {"num_beams": 3}):
        written = [model.generate(**given, max_new_tokens=8, **options) for model in (original, engine)]
        assert torch.equal(*written)


@pytest.mark.parametrize("prefix", QWEN)
def test_positions_in_three_dims_reach_a_fused_language_model(prefix: str) -> None:
    original = qwen(prefix)
    engine = _injected(original)
    given = qwen_asked()
    with torch.no_grad():
        _agree(original(**given).logits, engine(**given).logits)
    of_text = [layer for layer in engine.report().layers if "language_model" in layer.name]
    assert {layer.level for layer in of_text} == {"block"}, str(engine.report())
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(original.generate(**given, **options), engine.generate(**given, **options))


def test_a_window_that_a_config_names_and_the_model_does_not_know_is_none() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    config = transformers.Qwen3VLTextConfig(**QWEN_TEXT, **windows)
    original = grown(config, "Qwen3VLTextModel")
    engine = _injected(original)
    assert engine.report().level == "block", str(engine.report())
    ids = torch.randint(3, 90, (1, 14), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        _agree(original(ids).last_hidden_state, engine(ids).last_hidden_state)


def test_layers_that_look_at_a_picture_are_fused_and_see_what_the_original_sees() -> None:
    text = {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tower = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 4, "image_size": 16, "patch_size": 8, "max_num_tiles": 2,
        "intermediate_layers_indices": [0, 1], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        "vision_output_dim": 96,
    }  # fmt: skip
    config = transformers.MllamaConfig(text_config=text, vision_config=tower, image_token_index=100)
    original = grown(config, "MllamaForConditionalGeneration")
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(0.7)
    engine = _injected(original)
    assert engine.report().level == "block", str(engine.report())
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 100, (2, 7), generator=generator)
    ids[0, 2] = ids[1, 0] = 100
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    seen = torch.zeros(2, 7, 1, 2, dtype=torch.long)
    seen[0, 2:] = 1
    seen[1, :, :, 0] = 1
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 1, 2, 3, 16, 16, generator=generator),
        "aspect_ratio_ids": torch.tensor([[2], [1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 1]], [[1, 0]]]),
        "cross_attention_mask": seen,
    }
    with torch.no_grad():
        expected, got = original(**given).logits, engine(**given).logits
        _agree(expected[mask.bool()], got[mask.bool()])
        bare = {name: given[name] for name in ("input_ids", "attention_mask")}
        passed = [m for m in engine.module.modules() if is_injected(m) and injected_state(m).declined]
        assert not passed, "the layers that look at no picture are handed it as well, and run their blocks"
        assert not torch.allclose(got[mask.bool()], engine(**bare).logits[mask.bool()], atol=1e-2)
    for more in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
        tokens = original.generate(**given, max_new_tokens=8, **more)
        assert torch.equal(tokens, engine.generate(**given, max_new_tokens=8, **more))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cross_layer_interval": 2, "qk_layer_norms": True, "alpha_type": "vector"},
        {"use_resampler": True},
    ],
    ids=["every layer", "every second, heads normalised", "resampled"],
)
def test_idefics_looks_at_several_pictures_between_fused_layers(more: dict[str, Any]) -> None:
    original = idefics(**more)
    engine = _injected(original)
    of_blocks = ("model.layers.", "model.gated_cross_attn_layers.", "model.vision_model.")
    levels = {layer.level for layer in engine.report().layers if layer.name.startswith(of_blocks)}
    assert levels == {"block"}, str(engine.report())
    given = idefics_asked()
    mask, seen = given["attention_mask"], given["image_attention_mask"]
    with torch.no_grad():
        expected, got = original(**given).logits, engine(**given).logits
        other = original(**{**given, "pixel_values": given["pixel_values"].flip(0)}).logits
    _agree(expected[mask.bool()], got[mask.bool()])
    assert float((expected - other)[mask.bool()].abs().max()) > 1e-2, "the pictures say nothing"
    passed = [m for m in engine.module.modules() if is_injected(m) and injected_state(m).declined]
    assert not passed, "layers that are reported as blocks ran their original code"
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
        tokens = original.generate(**given, max_new_tokens=8, **options)
        assert torch.equal(tokens, engine.generate(**given, max_new_tokens=8, **options))
    few = {**given, "pixel_values": given["pixel_values"][:1], "image_attention_mask": seen[:1]}
    for model in (original, engine):
        with pytest.raises(RuntimeError, match="invalid for input of size"), torch.no_grad():
            model(**few)


def test_towers_that_are_no_models_by_themselves_are_fused_where_they_stand() -> None:
    text = transformers.MistralConfig(**LANGUAGE, sliding_window=None)
    perceiver = {
        "hidden_size": 64, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 4,
        "resampler_head_dim": 16, "num_key_value_heads": 2,
    }  # fmt: skip
    idefics2 = transformers.Idefics2Config(
        text_config=text,
        vision_config=PICTURE,
        perceiver_config=perceiver,
        image_token_id=100,
        pad_token_id=0,
    )
    words = {
        "vocab_size": 128, "embed_dim": 64, "layers": 2, "attention_heads": 4, "ffn_dim": 96,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    kosmos = transformers.Kosmos2Config(text_config=words, vision_config=PICTURE, latent_query_num=3)
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(3))
    ids[:, 2:5] = 100
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    for prefix, config, given in (
        ("Idefics2", idefics2, {"pixel_values": pixels[:, None]}),
        ("Kosmos2", kosmos, {"pixel_values": pixels, "image_embeds_position_mask": (ids == 100).long()}),
    ):
        original = grown(config, f"{prefix}ForConditionalGeneration")
        engine = _injected(original)
        with torch.no_grad():
            expected = original(input_ids=ids, attention_mask=mask, **given).logits
            _agree(expected, engine(input_ids=ids, attention_mask=mask, **given).logits)
        towers = {layer.level for layer in engine.report().layers if ".encoder.layers." in layer.name}
        assert towers == {"block"}, str(engine.report())


def test_phi4_generates_text_by_the_engine_and_hears_sound_by_transformers() -> None:
    towers = {"hidden_size": 32, "intermediate_size": 48}
    config = transformers.Phi4MultimodalConfig(
        **{**TEXT, "num_key_value_heads": 2},
        vision_config={**towers, "num_hidden_layers": 0, "image_token_id": 126},
        audio_config={**towers, "num_blocks": 0, "audio_token_id": 127},
    )
    original = grown(config, "Phi4MultimodalForCausalLM")
    engine = _injected(original)
    assert engine.report().level == "block" and engine.why_compatible() is None
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(3))
    for more in ({}, {"audio_input_features": torch.zeros(2, 8, 80)}):
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **more}
        with roads(engine) as counts:
            assert torch.equal(engine.generate(ids, **options), original.generate(ids, **options))
        assert counts.taken == ("compatible" if more else "engine")

"""Models made of an encoder of pictures and a decoder of text generate on the engine road."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from tests.helpers.models import Pair, inject, roads, same_tokens

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

_BART = {
    "vocab_size": 120,
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
_GPT2 = {"vocab_size": 120, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BERT = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "trocr": ("TrOCRConfig", {**_BART, "cross_attention_hidden_size": 64}),
    "trocr with sines": ("TrOCRConfig", {**_BART, "use_learned_position_embeddings": False}),
    "trocr without a norm": ("TrOCRConfig", {**_BART, "layernorm_embedding": False, "scale_embedding": True}),
    "mbart": ("MBartConfig", {**_BART, "encoder_layers": 2, "scale_embedding": True}),
    "bart": ("BartConfig", {**_BART, "encoder_layers": 2}),
    "gpt2": ("GPT2Config", _GPT2),
    "bert": ("BertConfig", _BERT),
    "bert without a head's linear": ("BertGenerationConfig", _BERT),
    "roberta": ("RobertaConfig", _BERT),
    "roberta with norms before": ("RobertaPreLayerNormConfig", _BERT),
    "roberta without a first norm": ("XLMRobertaXLConfig", _BERT),
}


def build(name: str, hidden: int = 64) -> Any:
    import transformers

    picture = transformers.ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
    )
    kind, options = DECODERS[name]
    text = getattr(transformers, kind)(**options)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(picture, text)
    torch.manual_seed(0)
    model = transformers.VisionEncoderDecoderModel(config=config).eval()
    with torch.no_grad():
        for path, parameter in model.decoder.named_parameters():
            if parameter.dim() > 1 and "embed" not in path:
                parameter.mul_(6.0)  # or all tokens are one
    for owner in (model.config, model.generation_config):
        owner.decoder_start_token_id, owner.pad_token_id = 2, 1
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


@pytest.fixture(scope="module", params=DECODERS)
def models(request: pytest.FixtureRequest) -> Pair:
    original = build(request.param)
    return Pair(original, inject(copy.deepcopy(original)))


def pictures(rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def both(models: Pair, road: str = "engine", **options: Any) -> Tensor:
    options = {"max_new_tokens": 20, "pixel_values": pictures(), **options}
    return same_tokens(models, road, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pixel_values": pictures(1)},
        {"do_sample": True, "temperature": 1.3},
        {"num_beams": 3},
        {"decoder_input_ids": torch.tensor([[2, 17, 30], [2, 40, 9]])},
        {"repetition_penalty": 1.4},
    ],
    ids=lambda options: ", ".join(options) or "greedy",
)
def test_the_tokens_are_the_original_s(models: Pair, options: dict[str, Any]) -> None:
    tokens = both(models, **options)
    assert len(set(tokens[0].tolist())) > 1


def test_steps_are_whole_calls_and_the_report_says_so(models: Pair) -> None:
    runner = models.engine._built.runner
    assert runner is not None and runner.whole is not None and not runner.takes_over
    assert not any("one at a time" in note or "loop" in note for note in models.engine.report().notes)


def test_forwards_are_the_original_s(models: Pair) -> None:
    ids = torch.tensor([[2, 17, 30], [2, 40, 9]])
    with torch.no_grad():
        answers = [
            m(pixel_values=pictures(), decoder_input_ids=ids).logits for m in (models.original, models.engine)
        ]
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)


def test_states_that_are_projected_are_left_to_the_original_s_loop() -> None:
    original = build("mbart", hidden=48)
    assert original.enc_to_dec_proj is not None
    models = Pair(original, inject(copy.deepcopy(original)))
    both(models, road="compatible")
    assert any("projects the encoder's states" in note for note in models.engine.report().notes)


def test_int8_weights() -> None:
    engine = inject(build("trocr"), dtype=torch.bfloat16, quant="int8")
    with roads(engine) as counts:
        tokens = engine.generate(pixel_values=pictures().bfloat16(), max_new_tokens=6)
    assert counts.module == 0 and tokens.shape == (2, 7)


def test_a_decoder_that_cross_attends_without_an_encoder_is_left_to_the_original_s_loop() -> None:
    import transformers

    torch.manual_seed(0)
    original = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_GPT2, add_cross_attention=True, bos_token_id=1, eos_token_id=None)
    ).eval()
    models = Pair(original, inject(copy.deepcopy(original)))
    ids, states = torch.randint(3, 90, (2, 7)), torch.randn(2, 5, 64)
    with roads(models.engine) as counts:
        tokens = [
            model.generate(ids, max_new_tokens=8, pad_token_id=0) for model in (original, models.engine)
        ]
    assert counts.taken == "compatible" and torch.equal(*tokens)
    with torch.no_grad():
        answers = [model(ids, encoder_hidden_states=states).logits for model in (original, models.engine)]
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)
    assert any("has no encoder" in note for note in models.engine.report().notes)

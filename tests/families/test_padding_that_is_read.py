"""Padding whose states are read, and tensors of unusual modes: what towers, heads and pipelines are given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import slipstream

TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _spread(model: nn.Module) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.add_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    return model.eval()


def _engine(model: Any) -> Any:
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True
    )


def _near(expected: torch.Tensor, got: torch.Tensor) -> None:
    assert float((expected - got).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["Idefics3", "SmolVLM"])
def test_padded_patches_of_a_picture_are_read(kind: str, attention: str) -> None:
    way = {"attn_implementation": attention}
    vision = getattr(transformers, f"{kind}VisionConfig")(**SIZES, image_size=32, patch_size=8, **way)
    text = transformers.LlamaConfig(vocab_size=128, **SIZES, pad_token_id=0, **way)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision, text_config=text, image_token_id=100, scale_factor=2, pad_token_id=0, **way
    )
    model = _spread(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    engine = _engine(model)
    ids = torch.tensor([[5, 6, 100, 100, 100, 100, 7, 8]])
    pixels, seen = torch.randn(1, 1, 3, 32, 32), torch.ones(1, 1, 32, 32, dtype=torch.bool)
    seen[..., 24:] = False
    pixels[..., 24:] = 0
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given |= {"pixel_values": pixels, "pixel_attention_mask": seen}
    with torch.no_grad():
        _near(model(**given).logits, engine(**given).logits)
    some = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**given, **some), engine.generate(**given, **some))


def test_a_pipeline_reads_the_padding_of_its_text_encoder() -> None:
    text = _spread(transformers.XLMRobertaModel(transformers.XLMRobertaConfig(vocab_size=90, **SIZES)))
    pipeline = SimpleNamespace(components={"text_encoder": text, "scheduler": None}, text_encoder=text)
    ids, mask = torch.ones(1, 12, dtype=torch.long), torch.zeros(1, 12, dtype=torch.long)
    ids[0, :5], mask[0, :5] = torch.tensor([0, 7, 8, 9, 2]), 1
    with torch.no_grad():
        expected = text(ids, attention_mask=mask).last_hidden_state
        engine = slipstream.init_inference(pipeline, dtype=torch.float32, replace_with_kernel_inject=True)
        assert engine.report()["text_encoder"].level == "block"
        _near(expected, pipeline.text_encoder(ids, attention_mask=mask).last_hidden_state)


def _layout() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.LayoutLMv3Config(
        vocab_size=128, **SIZES, coordinate_size=10, shape_size=12, input_size=32, patch_size=8,
        max_2d_position_embeddings=64,
    )  # fmt: skip
    boxes = torch.randint(0, 30, (2, 9, 4)).sort(-1).values
    given = {"input_ids": torch.randint(3, 90, (2, 9)), "bbox": boxes}
    return transformers.LayoutLMv3Model(config), {**given, "pixel_values": torch.randn(2, 3, 32, 32)}


def _swin() -> tuple[Any, dict[str, torch.Tensor]]:
    config = transformers.Swinv2Config(
        image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return transformers.Swinv2Model(config), {"pixel_values": torch.randn(1, 3, 32, 44)}


@pytest.mark.parametrize("build", [_layout, _swin])
def test_inference_mode(build: Callable[[], Any]) -> None:
    made, given = build()
    model = _spread(made)
    engine = _engine(model)
    with torch.inference_mode():
        for _ in range(2):
            _near(model(**given)[0], engine(**given)[0])


def test_another_default_device() -> None:
    """As `torch.set_default_device` of an accelerator: what is made without a device lies elsewhere."""
    made, given = _swin()
    model = _spread(made)
    engine = _engine(model)
    with torch.no_grad():
        expected = model(**given)[0]
        with torch.device("meta"):  # an older transformers makes its masks there, too, and fails
            _near(expected, engine(**given)[0])
        _near(expected, engine(**given)[0])


@pytest.mark.parametrize("kind", ["Electra", "RoFormer"])
def test_a_head_that_averages_all_positions(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=100, **SIZES, embedding_size=64, summary_type="mean", pad_token_id=0
    )
    model = _spread(getattr(transformers, f"{kind}ForMultipleChoice")(config))
    engine = _engine(model)
    ids, mask = torch.randint(5, 90, (2, 2, 9)), torch.ones(2, 2, 9, dtype=torch.long)
    mask[1, :, 5:] = 0
    with torch.no_grad():
        given = {"input_ids": ids, "attention_mask": mask}
        _near(model(**given).logits, engine(**given).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_head_that_reads_a_place_beside_the_text(side: str) -> None:
    config = transformers.VisualBertConfig(vocab_size=100, **SIZES, num_labels=3, pad_token_id=0)
    model = _spread(transformers.VisualBertForQuestionAnswering(config))
    engine = _engine(model)
    ids, mask = torch.randint(5, 90, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    with torch.no_grad():
        _near(*(one(input_ids=ids, attention_mask=mask).logits for one in (model, engine)))


class MeanPooled(transformers.BertPreTrainedModel):
    """A user's own head, which averages all positions."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = transformers.BertModel(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        states = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        made: torch.Tensor = self.classifier(states.mean(1))
        return made


def test_a_users_own_head_may_read_padding() -> None:
    model = _spread(MeanPooled(transformers.BertConfig(vocab_size=90, **SIZES)))
    engine = _engine(model)
    ids, mask = torch.randint(5, 90, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    with torch.no_grad():
        _near(model(ids, mask), engine(ids, mask))


@pytest.mark.parametrize("end", [2, 63])
@pytest.mark.parametrize("kind", ["CLIP", "CLIPSeg"])
def test_the_first_end_token_may_be_padding(kind: str, end: int) -> None:
    text = dict(SIZES, vocab_size=64, max_position_embeddings=16, bos_token_id=62, eos_token_id=end)
    config = getattr(transformers, f"{kind}TextConfig")(**text, pad_token_id=63)
    model = _spread(getattr(transformers, f"{kind}TextModel")(config))
    engine = _engine(model)
    ids = torch.tensor([[63, 63, 63, 62, 5, 6, 7, 63], [62, 5, 6, 7, 8, 9, 10, 63]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    with torch.no_grad():
        expected, got = (one(input_ids=ids, attention_mask=mask).pooler_output for one in (model, engine))
    _near(expected, got)


@pytest.mark.skipif(not hasattr(transformers, "Qwen2_5OmniThinkerConfig"), reason="an older transformers")
def test_the_tower_of_qwens_omni_is_fused() -> None:
    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 100,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    vision = {
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 4,
        "intermediate_size": 48,
        "patch_size": 4,
        "out_hidden_size": 32,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    }
    audio = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "n_window": 10,
        "output_dim": 32,
    }
    config = transformers.Qwen2_5OmniThinkerConfig(text_config=text, vision_config=vision, audio_config=audio)
    model = _spread(transformers.Qwen2_5OmniThinkerForConditionalGeneration(config))
    engine = _engine(model)
    assert "block" in {layer.level for layer in engine.report().layers if "visual" in layer.name}
    pixels, grid = torch.randn(32, 3 * 2 * 4 * 4), torch.tensor([[1, 4, 8]])
    with torch.no_grad():
        seen = []
        for one in (model, engine.module):
            tower = next(part for name, part in one.named_modules() if name.endswith("visual"))
            made = tower(pixels, grid_thw=grid)
            seen.append(made if isinstance(made, torch.Tensor) else made[0])
        _near(*seen)
        ids = torch.tensor([[5, 6, 7]])
        _near(model(input_ids=ids).logits, engine(input_ids=ids).logits)

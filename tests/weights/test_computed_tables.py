"""Tables that models compute are those of transformers, whatever dtype a folder is stored or opened in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import slipstream
from slipstream.families import FAMILIES, Family, Tiny

TINY = [
    pytest.param(tiny, family, id=f"{family.name}-{tiny.label or 'plain'}")
    for family in FAMILIES.values()
    for tiny in family.tiny
    if hasattr(transformers, tiny.model)
]


def _numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in named.items() if value.is_floating_point()}


def _computes(model: Any) -> bool:
    """Whether there is more than inverse frequencies, which transformers always computes in float32."""
    buffers = (name for name, b in model.named_buffers() if b.is_floating_point())
    ignored = getattr(model, "_keys_to_ignore_on_save", None)
    return bool(ignored) or any(not name.endswith("inv_freq") for name in buffers)


@pytest.mark.parametrize(("tiny", "family"), TINY)
def test_a_folder_of_16_bits_has_the_originals_tables(tiny: Tiny, family: Family, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        empty = getattr(transformers, tiny.model)(getattr(transformers, tiny.config)(**tiny.options))
    if not _computes(empty):
        return  # nothing to compare: most families
    model = getattr(transformers, tiny.model)(getattr(transformers, tiny.config)(**tiny.options))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        expected = _numbers(type(model).from_pretrained(tmp_path, dtype=dtype).eval())
        got = _numbers(slipstream.init_inference(str(tmp_path), dtype=dtype).module)
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            # CTRL's table stays in float32 in a model of 16 bits, where the engine rounds it once.
            kept = value.to(got[name].dtype) if dtype == torch.bfloat16 else value
            assert torch.equal(kept.float(), got[name].float()), f"{name} in {dtype}"


def _esm() -> Any:
    config = transformers.EsmConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=66, position_embedding_type="rotary", pad_token_id=1, mask_token_id=32,
    )  # fmt: skip
    return transformers.EsmForMaskedLM(config)


def _lfm2_moe() -> Any:
    tiny = FAMILIES["lfm2_moe"].tiny[0]
    return getattr(transformers, tiny.model)(getattr(transformers, tiny.config)(**tiny.options))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("build", "leaf"), [(_esm, "inv_freq"), (_lfm2_moe, "expert_bias")])
def test_buffers_that_models_make_in_float32_stay_so(
    build: Any, leaf: str, stored: torch.dtype, tmp_path: Path
) -> None:
    model = build()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(4 + 0.3 * torch.randn_like(buffer))
    model.to(stored).save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
        expected = {name: b.clone() for name, b in loaded.named_buffers() if name.endswith(leaf)}
        assert expected
        for source in (str(tmp_path), loaded):
            got = dict(slipstream.init_inference(source, dtype=dtype).module.named_buffers())
            for name, buffer in expected.items():
                assert got[name].dtype == buffer.dtype == torch.float32
                assert torch.equal(got[name], buffer)

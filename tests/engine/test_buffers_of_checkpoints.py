"""Checkpoints that differ from their model: buffers that carry weights, tensors of several dtypes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import slipstream
from tests.families.sweep import VARIANTS, batch, label, peaked_model

_NAMES = ("deepseek_v3", "glm4_moe", "gemma4_text shared", "minimax_m3_vl_text", "nemotron_h")
_CHOSEN = [tiny for family, tiny in VARIANTS if label((family, tiny)) in _NAMES]


@pytest.mark.parametrize("tiny", _CHOSEN, ids=lambda tiny: tiny.model)
def test_a_checkpoints_buffers_are_in_the_blocks(tiny: object, tmp_path: Path) -> None:
    saved, other = (peaked_model(tiny, seed=seed) for seed in (0, 1))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, buffer in saved.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    state = {name: t.clone() for name, t in saved.state_dict().items() if name != "lm_head.weight"}
    head = saved.get_output_embeddings().weight
    if head is not saved.get_input_embeddings().weight:
        state["lm_head.weight"] = head.detach().clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = slipstream.init_inference(
        copy.deepcopy(other), dtype=torch.float32, replace_with_kernel_inject=True, checkpoint=str(tmp_path)
    )
    assert engine.report().level == "block"
    ids, left, _ = batch(saved.get_input_embeddings().weight.shape[0])
    with torch.no_grad():
        expected, got = (m(input_ids=ids, attention_mask=left).logits for m in (saved, engine))
    assert float((expected - got)[left.bool()].abs().max()) <= 1e-4


@pytest.mark.parametrize("own", [torch.float64, torch.bfloat16])
def test_a_checkpoint_of_several_dtypes_is_fused_all_the_same(own: torch.dtype, tmp_path: Path) -> None:
    tiny = next(tiny for family, tiny in VARIANTS if label((family, tiny)) == "llama")
    saved = peaked_model(tiny)
    with torch.no_grad():
        for name, parameter in saved.named_parameters():
            if "norm" in name or "q_proj" in name:
                parameter.copy_(parameter.to(own))
    state = {name: t.clone() for name, t in saved.state_dict().items()}
    stored = {n: t.to(own) if "norm" in n or "q_proj" in n else t for n, t in state.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        hollow = type(saved)(copy.deepcopy(saved.config)).eval()
    engine = slipstream.init_inference(
        hollow, dtype=torch.float32, replace_with_kernel_inject=True, checkpoint=str(tmp_path)
    )
    assert engine.report().level == "block"
    ids, left, _ = batch(saved.get_input_embeddings().weight.shape[0])
    with torch.no_grad():
        expected, got = (m(input_ids=ids, attention_mask=left).logits for m in (saved, engine))
    assert got.dtype == torch.float32
    assert float((expected - got)[left.bool()].abs().max()) <= 1e-4


@pytest.mark.parametrize("meta", [True, False])
def test_tables_that_are_never_saved_are_computed(meta: bool, tmp_path: Path) -> None:
    tiny = next(tiny for family, tiny in VARIANTS if label((family, tiny)) == "marian")
    torch.manual_seed(0)
    saved = getattr(transformers, tiny.model)(getattr(transformers, tiny.config)(**tiny.options)).eval()
    saved.save_pretrained(tmp_path)
    with torch.device("meta" if meta else "cpu"):
        other = type(saved)(copy.deepcopy(saved.config)).eval()
    engine = slipstream.init_inference(
        other, dtype=torch.float32, replace_with_kernel_inject=True, checkpoint=str(tmp_path)
    )
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        expected, got = (m(input_ids=ids, decoder_input_ids=ids[:, :5]).logits for m in (saved, engine))
    assert float((expected - got).abs().max()) <= 1e-4

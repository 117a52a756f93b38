"""Buffers that carry weights (a router's correction, a layer's scale) reach the blocks from a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
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

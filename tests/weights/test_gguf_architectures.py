"""GGUF files of other architectures than llama: what transformers' loader would drop is kept, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from slipstream.errors import WeightError
from slipstream.weights.gguf import gguf_to_checkpoint
from tests.weights.test_gguf import MERGES, TOKENS

Writer = gguf.GGUFWriter
Edit = Callable[[Writer], None]

COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def write(path: Path, architecture: str, model: Any, edit: Edit) -> Path:
    """Write the model's tensors under gguf's names, as llama.cpp's converter does for these architectures."""
    config = model.config
    writer = Writer(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    edit(writer)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if isinstance(target := names.get_name(name, (".weight", ".bias")), str):
            values = parameter.detach().numpy()
            writer.add_tensor(target, np.ascontiguousarray(values.squeeze(1) if values.ndim == 3 else values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def positions(width: int | None = None, window: int | None = None, heads: Any = 2) -> Edit:
    def edit(writer: Writer) -> None:
        writer.add_head_count_kv(heads)
        writer.add_rope_freq_base(1e6)
        writer.add_layer_norm_eps(1e-5)
        writer.add_layer_norm_rms_eps(1e-5)
        if width is not None:
            writer.add_rope_dimension_count(width)
        if window is not None:
            writer.add_sliding_window(window)

    return edit


def rope(**more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **more}}


@pytest.mark.parametrize(
    ("architecture", "name", "options", "edit"),
    [
        ("starcoder2", "Starcoder2", rope(), positions()),
        ("stablelm", "StableLm", rope(partial_rotary_factor=0.5), positions(width=8)),
        ("phi3", "Phi3", {"rms_norm_eps": 1e-5, "sliding_window": 5, **rope()}, positions(16, window=5)),
    ],
    ids=["base", "width", "window"],
)
def test_positions_are_those_that_the_file_states(
    architecture: str, name: str, options: dict[str, Any], edit: Edit, tmp_path: Path
) -> None:
    model = tiny(name, **options)
    folder = gguf_to_checkpoint(
        write(tmp_path / "tiny.gguf", architecture, model, edit), tmp_path / "checkpoint"
    )
    ids = torch.arange(3, 43)[None]
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(converted(ids).logits, model(ids).logits)


def test_a_file_that_transformers_newer_loader_reads_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.gguf.reader", reason="this transformers lacks it")
    kinds = ["conv", "full_attention"]
    model = tiny("Lfm2", layer_types=kinds, block_auto_adjust_ff_dim=False, norm_eps=1e-5, **rope())

    def edit(writer: Writer) -> None:
        positions(heads=[0, 2])(writer)
        writer.add_shortconv_l_cache(model.config.conv_L_cache)

    folder = gguf_to_checkpoint(write(tmp_path / "tiny.gguf", "lfm2", model, edit), tmp_path / "checkpoint")
    ids = torch.arange(3, 20)[None]
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(converted(ids).logits, model(ids).logits)


def test_a_tensor_that_transformers_would_drop_is_refused(tmp_path: Path) -> None:
    def edit(writer: Writer) -> None:
        positions(width=4)(writer)
        writer.add_tensor("blk.0.attn_q_norm.weight", np.ones((4, 16), np.float32))

    path = write(tmp_path / "tiny.gguf", "stablelm", tiny("StableLm"), edit)
    with pytest.raises(WeightError, match=r"1 unexpected weights \(blk\.0\.attn_q_norm\.weight\)"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")


def test_a_tensor_of_another_size_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.gguf.reader", reason="older ones compare no sizes")

    def edit(writer: Writer) -> None:
        positions(width=4)(writer)
        writer.kv_data[0]["stablelm.feed_forward_length"].value = 80

    path = write(tmp_path / "tiny.gguf", "stablelm", tiny("StableLm"), edit)
    with pytest.raises(WeightError, match=r"6 mismatched weights \(model\.layers\.0\.mlp\.down_proj\.weight"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")

"""Random models of a known size, made once per run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["LLAMA_1B", "LLAMA_TINY", "make_llama"]

LLAMA_1B: dict[str, Any] = {  # 1.10 billion parameters: TinyLlama's shape
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
LLAMA_TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


def make_llama(shape: dict[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Write a llama with normally distributed weights as a checkpoint folder."""
    config = LlamaConfig(**shape, tie_word_embeddings=False, dtype=dtype)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    model.save_pretrained(folder)

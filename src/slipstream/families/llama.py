"""Llama, with every kind of rotary embedding that its checkpoints use, and models with identical layers."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, tiny
from slipstream.families.family import Family, Tiny


def _tiny(label: str = "", **options: Any) -> Tiny:
    return tiny("LlamaForCausalLM", "LlamaConfig", label=label, **options)


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}

FAMILY = Family(
    name="llama",
    layers=("LlamaDecoderLayer", "Emu3DecoderLayer"),
    spec=llama_like,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(
        _tiny(),
        _tiny("biases, tied", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        _tiny("wide heads", head_dim=24),
        _tiny("linear rope", **_rope("linear", factor=4.0)),
        _tiny("dynamic rope", **_rope("dynamic", factor=4.0), max_position_embeddings=12),
        _tiny("yarn rope", **_rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        _tiny("longrope", **_rope("longrope", factor=8.0, original_max_position_embeddings=4, **_LONG)),
        _tiny("llama3 rope", **_rope("llama3", **_LLAMA3)),
        tiny("Emu3ForCausalLM", "Emu3TextConfig", label="of Emu3"),
    ),
)

"""Code World Model: llama with sliding windows in three layers of four."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_windowed, tiny
from slipstream.families.family import Family

FAMILY = Family(
    name="cwm",
    layers=("CwmDecoderLayer",),
    spec=llama_windowed,
    recipes=LLAMA_RECIPES,
    frame=llama_frame,
    tiny=(tiny("CwmForCausalLM", "CwmConfig", head_dim=16, sliding_window=5),),
)

"""EXAONE 4: norms after the branches, q and k normalised per head; full layers among windowed: not rotary."""

from __future__ import annotations

from slipstream.families.common import (
    POST_NORM_RECIPES,
    QK_NORMS,
    llama_frame,
    llama_windowed,
    rope,
    tiny,
    window,
)
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Norm, QKNorm


def _spec(config: Config, index: int) -> BlockSpec:
    rotates = config.sliding_window is None or window(config, index) is not None
    return llama_windowed(
        config,
        index,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)),
        rope=rope(config) if rotates else None,
    )


_FULL = {"sliding_window": None, "layer_types": ["full_attention"] * 3}

FAMILY = Family(
    name="exaone4",
    layers=("Exaone4DecoderLayer",),
    spec=_spec,
    recipes={**POST_NORM_RECIPES, **QK_NORMS},
    frame=llama_frame,
    tiny=(
        tiny("Exaone4ForCausalLM", "Exaone4Config", sliding_window=5, sliding_window_pattern=2),
        tiny("Exaone4ForCausalLM", "Exaone4Config", label="no window", **_FULL),
    ),
)

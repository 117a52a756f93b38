"""Doge: a mask computed from values weighs tokens and drops some; residuals have a weight per channel.

Source: Wu et al. 2024 (arXiv 2412.11834), the dynamic mask attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.families.common import LLAMA_RECIPES, QK_NORMS, llama_like, tiny
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, Norm, QKNorm, Role

_DYNAMIC = "the dynamic mask"
_PARTS = ("self_attn.A", "self_attn.dt_proj", "input_residual", "post_attention_residual")


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)), course=_DYNAMIC)


def _mask_of_values(attention: Any, x: Tensor, mask: Tensor | None, values: Tensor) -> Tensor:
    """Return the mask on scores, `(B, H, S, L)`, that the layer's own code makes of values `(B, K, L, D)`."""
    weights = attention.dt_proj(values.transpose(1, 2).flatten(2))
    weights = torch.exp(attention.A * torch.logaddexp(weights, torch.zeros_like(weights))).mT
    made = attention.prepare_dynamic_mask(x, weights, attention.keep_window_size, mask)
    by_head: Tensor = made.repeat_interleave(attention.num_key_value_groups, dim=1)
    return by_head


def _weigh(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    normed, mask = heads.norm(Role.ATTN_NORM, x), given.get("attention_mask")
    attended = heads.attend(normed, mask_of=lambda v: _mask_of_values(layer.self_attn, normed, mask, v))
    x = layer.input_residual * x + attended
    fed: Tensor = heads.feed(heads.norm(Role.MLP_NORM, x))
    return layer.post_attention_residual * x + fed  # type: ignore[no-any-return]


def _refuse(config: Config) -> str | None:
    return "is_moe is True: its experts are rows of embeddings" if config.is_moe else None


_BUILT = "DogeForCausalLM", "DogeConfig"

FAMILY = Family(
    name="doge",
    layers=("DogeDecoderLayer",),
    spec=_spec,
    recipes={**LLAMA_RECIPES, **QK_NORMS},
    courses={_DYNAMIC: OwnCourse(_weigh, _PARTS, note=_DYNAMIC)},
    refuse=_refuse,
    tiny=(
        tiny(*_BUILT),
        tiny(
            *_BUILT,
            label="few are heard, window, biases",
            keep_window_size=4,
            sliding_window=7,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
)

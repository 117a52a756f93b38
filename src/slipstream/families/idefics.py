"""IDEFICS: llama whose layers compute their own angles, with gated cross-attention to images in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.common import LLAMA_RECIPES, llama_like
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, Norm, QKNorm, Role, Rope
from slipstream.weights.recipe import Stack, Take

_LOOKS = "attention to pictures"
_ALPHAS = ("alpha_cross_attn", "alpha_dense")
_READS = frozenset({"image_hidden_states", "image_attention_mask", "cross_attention_gate"})


def _layer(config: Config, index: int, **changes: Any) -> BlockSpec:
    heads = config.num_attention_heads
    dim = config.hidden_size // heads
    sizes: dict[str, Any] = {"kv_heads": heads, "head_dim": dim, "scale": dim**-0.5, "rope": Rope(dim)}
    return llama_like(config, index, **{**sizes, **changes})


def _looking(config: Config, index: int) -> BlockSpec:
    return _layer(
        config,
        index,
        rope=None,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)) if config.qk_layer_norms else None,
        cross=config.vision_config.embed_dim,
        branches="feed_forward",
        course=_LOOKS,
    )


def _look(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    spec = heads.spec

    def by_head(rows: Tensor) -> Tensor:
        return rows.view(len(x), rows.shape[1], spec.heads, spec.head_dim).transpose(1, 2)

    q = by_head(heads.linear(Role.CROSS_Q, heads.norm(Role.ATTN_NORM, x)))
    keys, values = heads.linear(Role.CROSS_KV, given["image_hidden_states"]).chunk(2, dim=-1)
    q, k = heads.norm(Role.Q_NORM, q), heads.norm(Role.K_NORM, by_head(keys))
    seen = heads.linear(Role.CROSS_OUT, heads.heed(q, k, by_head(values), given.get("image_attention_mask")))
    # A token that attends to no image gets zeros.
    seen = seen.masked_fill((given["cross_attention_gate"] == 0)[:, :, None], 0.0)
    x = x + layer.alpha_cross_attn.tanh() * seen
    out: Tensor = x + layer.alpha_dense.tanh() * heads.feed(heads.norm(Role.MLP_NORM, x))
    return out


FAMILY = Family(
    name="idefics",
    layers=("IdeficsDecoderLayer", "IdeficsGatedCrossAttentionLayer"),
    spec=_layer,
    specs={"IdeficsGatedCrossAttentionLayer": _looking},
    recipes={
        **LLAMA_RECIPES,
        Role.CROSS_Q: Take("cross_attn.q_proj"),
        Role.CROSS_KV: Stack(("cross_attn.k_proj", "cross_attn.v_proj")),
        Role.CROSS_OUT: Take("cross_attn.o_proj"),
        Role.Q_NORM: Take("cross_attn.q_layer_norm"),
        Role.K_NORM: Take("cross_attn.k_layer_norm"),
    },
    rotary="self_attn.rotary_emb",
    courses={_LOOKS: OwnCourse(_look, _ALPHAS, _READS, needs=_READS)},
    tiny=(),  # the model does not run without an image
)

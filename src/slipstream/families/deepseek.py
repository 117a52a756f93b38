"""DeepSeek-V2 and V3 and the models with their latent attention: A.X K1, GLM-4 MoE Lite, Youtu, MiniCPM 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.families.common import LLAMA_RECIPES, field, llama_frame, llama_like, tiny
from slipstream.families.experts import CORRECTED, corrected_moe, is_sparse
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Latent, Norm, Role, Rope
from slipstream.weights.recipe import First, Recipe, Take

__all__ = ["TINY_MIXTURE", "TINY_RANKS", "latent_like", "latent_recipes", "with_experts"]

_LATENT: Mapping[Role, Recipe] = {
    Role.Q_DOWN: Take("self_attn.q_a_proj"),
    Role.Q_DOWN_NORM: Take("self_attn.q_a_layernorm"),
    Role.Q_UP: First((Take("self_attn.q_b_proj"), Take("self_attn.q_proj"))),
    Role.KV_DOWN: Take("self_attn.kv_a_proj_with_mqa"),
    Role.KV_DOWN_NORM: Take("self_attn.kv_a_layernorm"),
    Role.KV_UP: Take("self_attn.kv_b_proj"),
}


def latent_recipes(base: Mapping[Role, Recipe]) -> dict[Role, Recipe]:
    """Return a layer's recipes with those of latent attention instead of queries, keys and values."""
    return {role: recipe for role, recipe in base.items() if role is not Role.QKV} | dict(_LATENT)


def _scale(config: Config, dim: int) -> float:
    """Return `dim^-0.5`, times the square of YaRN's factor if that applies to all dims."""
    rope = field(config, "rope_parameters", default={})
    scale, all_dims = float(dim**-0.5), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not all_dims or rope["factor"] <= 1:
        return scale
    factor = 0.1 * float(all_dims) * math.log(rope["factor"]) + 1.0
    return scale * factor * factor


def latent_like(
    config: Config, index: int, *, rope: Rope | None, interleaved: bool = False, **changes: Any
) -> BlockSpec:
    """Return the spec of a layer with latent attention, by DeepSeek's field names; `changes` replace some."""
    dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    latent = Latent(
        config.kv_lora_rank,
        field(config, "q_lora_rank"),
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        Norm("rms", 1e-6),
        interleaved,
    )
    heads = config.num_attention_heads
    return llama_like(
        config,
        index,
        kv_heads=heads,
        head_dim=dim,
        scale=_scale(config, dim),
        rope=rope,
        latent=latent,
        **changes,
    )


def with_experts(config: Config, index: int, dense: BlockSpec, **changes: Any) -> BlockSpec:
    """Add a mixture of experts to a layer's spec if the layer has one; `changes` replace its fields."""
    if not is_sparse(config, index):
        return dense
    return replace(dense, ffn=config.moe_intermediate_size, moe=corrected_moe(config, **changes))


def _v3_dense(config: Config, index: int) -> BlockSpec:
    return latent_like(
        config, index, rope=Rope(config.qk_rope_head_dim), interleaved=bool(config.rope_interleave)
    )


def _v3(config: Config, index: int) -> BlockSpec:
    return with_experts(config, index, _v3_dense(config, index))


def _v2(config: Config, index: int) -> BlockSpec:
    angles = Rope(config.qk_rope_head_dim, interleaved=True, table="half")
    grouped = config.topk_method == "group_limited_greedy"
    return with_experts(
        config,
        index,
        latent_like(config, index, rope=angles),
        scoring="softmax_topk",
        normalize=False,
        group_score="max",
        groups=config.n_group if grouped else 1,
        top_groups=config.topk_group if grouped else 1,
    )


def _minicpm(config: Config, index: int) -> BlockSpec:
    spec = latent_like(config, index, rope=Rope(config.qk_rope_head_dim))
    return replace(spec, residual_scale=config.scale_depth / math.sqrt(config.num_hidden_layers))


def _minicpm_frame(config: Config) -> FrameSpec:
    scale = 1.0 / float(config.logits_scaling)
    return llama_frame(config, embed_scale=float(config.scale_emb), logit_scale=scale)


TINY_RANKS: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
TINY_MIXTURE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

FAMILIES = (
    Family(
        name="deepseek_v3",
        layers=("DeepseekV3DecoderLayer",),
        spec=_v3,
        recipes=latent_recipes(CORRECTED),
        frame=llama_frame,
        tiny=(
            tiny("DeepseekV3ForCausalLM", "DeepseekV3Config", **TINY_RANKS, **TINY_MIXTURE),
            tiny(
                "DeepseekV3ForCausalLM",
                "DeepseekV3Config",
                label="yarn, halves, queries at once",
                rope_parameters=_YARN,
                rope_interleave=False,
                **{**TINY_RANKS, **TINY_MIXTURE, "q_lora_rank": None},
            ),
        ),
    ),
    Family(
        name="deepseek_v2",
        layers=("DeepseekV2DecoderLayer",),
        spec=_v2,
        recipes=latent_recipes(CORRECTED),
        frame=llama_frame,
        tiny=(
            tiny(
                "DeepseekV2ForCausalLM",
                "DeepseekV2Config",
                topk_method="greedy",
                **TINY_RANKS,
                **TINY_MIXTURE,
            ),
            tiny(
                "DeepseekV2ForCausalLM",
                "DeepseekV2Config",
                label="groups, queries at once",
                topk_method="group_limited_greedy",
                **{**TINY_RANKS, **TINY_MIXTURE, "q_lora_rank": None},
            ),
        ),
    ),
    Family(
        name="glm4_moe_lite",
        layers=("Glm4MoeLiteDecoderLayer",),
        spec=_v3,
        recipes=latent_recipes(CORRECTED),
        frame=llama_frame,
        tiny=(tiny("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", **TINY_RANKS, **TINY_MIXTURE),),
    ),
    Family(
        name="axk1",
        layers=("AXK1DecoderLayer",),
        spec=_v3,
        recipes={
            **latent_recipes(CORRECTED),
            Role.MLP_POST_NORM: Take("mlp.post_mlp_layernorm"),
        },
        frame=llama_frame,
        tiny=(tiny("AXK1ForCausalLM", "AXK1Config", **TINY_RANKS, **TINY_MIXTURE),),
    ),
    Family(
        name="youtu",
        layers=("YoutuDecoderLayer",),
        spec=_v3_dense,
        recipes=latent_recipes(LLAMA_RECIPES),
        frame=llama_frame,
        tiny=(tiny("YoutuForCausalLM", "YoutuConfig", **TINY_RANKS),),
    ),
    Family(
        name="minicpm3",
        layers=("MiniCPM3DecoderLayer",),
        spec=_minicpm,
        recipes=latent_recipes(LLAMA_RECIPES),
        frame=_minicpm_frame,
        tiny=(tiny("MiniCPM3ForCausalLM", "MiniCPM3Config", dim_model_base=64, **TINY_RANKS),),
    ),
)

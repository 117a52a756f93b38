"""DBRX: clamped queries, keys and values from one matrix, and experts stored in flat matrices."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import plain_like
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, MoE, Norm, Role, Rope
from slipstream.weights.feed_forward import PerExpert
from slipstream.weights.recipe import Take

_NORM = Norm("layer", 1e-5)


def _spec(config: Config, index: int) -> BlockSpec:
    attention, mixture = config.attn_config, config.ffn_config
    normalize = mixture.moe_normalize_expert_weights is not None
    return plain_like(
        config,
        index,
        kv_heads=attention.kv_n_heads,
        clip_qkv=attention.clip_qkv,
        rope=Rope(config.hidden_size // config.num_attention_heads),
        norm=_NORM,
        ffn=mixture.ffn_hidden_size,
        activation=mixture.ffn_act_fn.get("name", "silu"),
        gated=True,
        moe=MoE(mixture.moe_num_experts, mixture.moe_top_k, normalize=normalize),
    )


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="transformer.blocks",
        embed="transformer.wte",
        head="lm_head",
        norm=_NORM,
        final_norm="transformer.norm_f",
        rotary="transformer.rotary_emb",
    )


def _refuse(config: Config) -> str | None:
    power = config.ffn_config.moe_normalize_expert_weights
    if power not in (None, 1):
        return f"moe_normalize_expert_weights is {power:g}; only 1 and None are supported"
    return None


def _tiny(label: str = "", clip: float = 0.7, **ffn: Any) -> Tiny:
    options: dict[str, Any] = {
        "vocab_size": 128,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_config": {"clip_qkv": clip, "kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, **ffn},
    }
    return Tiny("DbrxForCausalLM", "DbrxConfig", options, label)


FAMILY = Family(
    name="dbrx",
    layers=("DbrxBlock",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Take("norm_attn_norm.norm_1"),
        Role.QKV: Take("norm_attn_norm.attn.Wqkv"),
        Role.ATTN_OUT: Take("norm_attn_norm.attn.out_proj"),
        Role.MLP_NORM: Take("norm_attn_norm.norm_2"),
        Role.ROUTER: Take("ffn.router.layer"),
        Role.EXPERTS_IN: PerExpert(("ffn.experts.mlp.w1", "ffn.experts.mlp.v1")),
        Role.EXPERTS_OUT: PerExpert(("ffn.experts.mlp.w2",), transposed=True),
    },
    frame=_frame,
    refuse=_refuse,
    tiny=(
        _tiny(),
        _tiny("weights not normalised", 8.0, moe_normalize_expert_weights=None),
    ),
)

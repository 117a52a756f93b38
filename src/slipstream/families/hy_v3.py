"""Hunyuan 3 and MiniMax-M2: experts chosen by sigmoid with a correction, without groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.families.common import llama_frame, llama_like, tiny
from slipstream.families.experts import CORRECTED, corrected_moe, is_sparse
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm


def _hunyuan(config: Config, index: int) -> BlockSpec:
    dense = llama_like(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps)))
    if not is_sparse(config, index):
        return dense
    moe = corrected_moe(
        config, normalize=True, groups=1, top_groups=1, factor=float(config.router_scaling_factor)
    )
    return replace(dense, ffn=config.moe_intermediate_size, moe=moe)


def _minimax(config: Config, index: int) -> BlockSpec:
    moe = MoE(config.num_local_experts, config.num_experts_per_tok, scoring="sigmoid", normalize=True)
    return llama_like(config, index, qk_norm=QKNorm(Norm("rms", config.rms_norm_eps), over="all"), moe=moe)


_HUNYUAN: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

FAMILIES = (
    Family(
        name="hy_v3",
        layers=("HYV3DecoderLayer",),
        spec=_hunyuan,
        recipes=CORRECTED,
        frame=llama_frame,
        tiny=(
            tiny("HYV3ForCausalLM", "HYV3Config", **_HUNYUAN),
            tiny(
                "HYV3ForCausalLM",
                "HYV3Config",
                label="two shared",
                num_shared_experts=2,
                enable_moe_fp32_combine=False,
                **_HUNYUAN,
            ),
        ),
    ),
    Family(
        name="minimax_m2",
        layers=("MiniMaxM2DecoderLayer",),
        spec=_minimax,
        recipes=CORRECTED,
        frame=llama_frame,
        tiny=(
            tiny(
                "MiniMaxM2ForCausalLM",
                "MiniMaxM2Config",
                num_local_experts=8,
                num_experts_per_tok=2,
                head_dim=16,
            ),
        ),
    ),
)

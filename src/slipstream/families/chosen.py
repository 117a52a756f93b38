"""Sparse attention over chosen tokens: a small indexer in each layer selects the tokens to attend to.

DeepSeek-V3.2 and GLM-5 choose tokens of latent attention, MiniMax-M3 blocks of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.families.common import LLAMA_RECIPES, QK_NORMS, llama_like, rope, tiny
from slipstream.families.deepseek import (
    TINY_MIXTURE,
    TINY_RANKS,
    latent_like,
    latent_recipes,
    with_experts,
)
from slipstream.families.experts import CORRECTED, SHARED
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role, Rope
from slipstream.weights.recipe import Take

_CHOSEN = "the selection of tokens"
_OWN = "latent attention over selected tokens"
_BLOCKS = "the selection of blocks of tokens"
_PLAIN = "padding and all"
_PASSED = ("position_embeddings", "attention_mask", "position_ids", "past_key_values", "prev_topk_indices")


def _latent(config: Config, index: int) -> BlockSpec:
    angles = Rope(config.qk_rope_head_dim)
    spec = latent_like(config, index, rope=angles, interleaved=True, course=_CHOSEN)
    return with_experts(config, index, spec)


def _measure(layer: Any, config: Config) -> BlockSpec:
    """Return a layer's spec; attention is not fused if transformers caches all heads (before 5.23)."""
    attention = layer.self_attn
    if _caches_latents(type(attention)):
        return _latent(config, attention.layer_idx)
    spec = llama_like(config, attention.layer_idx, rope=None, branches="feed_forward", course=_OWN)
    return with_experts(config, attention.layer_idx, spec)


def _caches_latents(attention: type) -> bool:
    """Whether the class updates the cache before it expands latents; only the names in its code show that."""
    code = inspect.unwrap(attention.forward).__code__  # type: ignore[attr-defined]
    used = [name for name in code.co_names if name in ("update", "expand_kv")]
    return used == ["update", "expand_kv"]


def _attend_chosen(
    heads: Branches, layer: Any, normed: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend to the chosen tokens; return the output, and the tokens' indices `(B, S, k)`."""
    mask, indexer = given["attention_mask"], layer.self_attn.indexer
    chosen = given.get("prev_topk_indices")
    if indexer is not None:
        short = heads.norm(Role.Q_DOWN_NORM, heads.linear(Role.Q_DOWN, normed))
        arguments = (given["position_embeddings"], mask[:, 0], given.get("position_ids"))
        chosen = indexer(normed, short, *arguments, past_key_values=given.get("past_key_values"))
    if chosen is None:
        raise ValueError("a layer without an indexer was called without prev_topk_indices")
    left_out = torch.ones_like(mask[:, 0].expand(len(normed), -1, -1), dtype=torch.bool)
    left_out = left_out.scatter(-1, chosen.long(), False)[:, None]
    shown = mask & ~left_out if mask.dtype == torch.bool else mask.masked_fill(left_out, _least(normed))
    return heads.attend(normed, mask=shown), chosen


def _least(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


def _choose(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    attended, _ = _attend_chosen(heads, layer, heads.norm(Role.ATTN_NORM, x), given)
    x = x + attended
    return x + heads.feed(heads.norm(Role.MLP_NORM, x))


def _choose_and_tell(
    heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    attended, chosen = _attend_chosen(heads, layer, heads.norm(Role.ATTN_NORM, x), given)
    x = x + attended
    return x + heads.feed(heads.norm(Role.MLP_NORM, x)), chosen


def _hear(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Run a layer whose whole attention is not fused."""
    attended, _, *chosen = layer.self_attn(hidden_states=heads.norm(Role.ATTN_NORM, x), **_passed(given))
    x = x + attended
    return x + heads.feed(heads.norm(Role.MLP_NORM, x)), *chosen


def _passed(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _PASSED if name in given}


def _minimax(config: Config, index: int) -> BlockSpec:
    norm = Norm("rms", config.rms_norm_eps, offset=1.0)
    sparse = config.mlp_layer_types[index] == "sparse"
    spec = llama_like(
        config,
        index,
        norm=norm,
        qk_norm=QKNorm(norm),
        activation="swiglu_oai",
        rope=rope(config),
        ffn=config.intermediate_size if sparse else config.dense_intermediate_size,
        course=_BLOCKS if config.layer_types[index] == "minimax_m3_sparse" else _PLAIN,
    )
    if not sparse:
        return spec
    moe = MoE(
        config.num_local_experts,
        config.num_experts_per_tok,
        scoring="sigmoid",
        normalize=True,
        factor=float(config.routed_scaling_factor),
        shared=config.shared_intermediate_size,
    )
    return replace(spec, moe=moe)


def _follow(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Run the branches in the block's order, but keep padding: other layers' choices depend on it."""
    x = x + heads.attend(heads.norm(Role.ATTN_NORM, x))
    return x + heads.feed(heads.norm(Role.MLP_NORM, x))


def _choose_blocks(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    normed, cache = heads.norm(Role.ATTN_NORM, x), given.get("past_key_values")
    attention, mask, positions = layer.self_attn, given.get("attention_mask"), given.get("position_ids")
    indexer, length = attention.indexer, x.shape[1]
    seen = 0 if cache is None else int(cache.get_seq_length(attention.layer_idx))
    if positions is None:
        positions = torch.arange(seen, seen + length, device=x.device)
    positions = (positions if positions.ndim > 1 else positions[None]).expand(len(x), -1)
    chosen = indexer(normed, given["position_embeddings"], cache, positions)

    def shown(values: Tensor) -> Tensor:
        made: Tensor = indexer.build_block_mask(chosen, mask, values.shape[2], x.dtype, x.device, positions)
        return made

    x = x + heads.attend(normed, mask_of=shown)
    return x + heads.feed(heads.norm(Role.MLP_NORM, x))


def _refuse_minimax(config: Config) -> str | None:
    if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
        found = (config.swiglu_alpha, config.swiglu_limit)
        return f"swiglu_alpha, swiglu_limit = {found}; the op has (1.702, 7.0)"
    return None


_INDEX: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 6}
_CHOOSING: dict[str, Any] = {**TINY_RANKS, **TINY_MIXTURE, **_INDEX}
_PARTS = ("self_attn.indexer",)
_READS = frozenset({"prev_topk_indices"})
_WHOLE = {_OWN: OwnCourse(_hear, ("self_attn",), _READS, _OWN)}

FAMILIES = (
    Family(
        name="deepseek_v32",
        layers=("DeepseekV32DecoderLayer",),
        spec=_latent,
        recipes=latent_recipes(CORRECTED),
        courses={_CHOSEN: OwnCourse(_choose, _PARTS, note=_CHOSEN), **_WHOLE},
        measure=_measure,
        tiny=(tiny("DeepseekV32ForCausalLM", "DeepseekV32Config", **_CHOOSING),),
    ),
    Family(
        name="glm_moe_dsa",
        layers=("GlmMoeDsaDecoderLayer",),
        spec=_latent,
        recipes=latent_recipes(CORRECTED),
        courses={_CHOSEN: OwnCourse(_choose_and_tell, _PARTS, _READS, _CHOSEN), **_WHOLE},
        measure=_measure,
        tiny=(
            tiny("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", **_CHOOSING),
            tiny(
                "GlmMoeDsaForCausalLM",
                "GlmMoeDsaConfig",
                label="choices shared",
                indexer_types=["full", "shared", "full"],
                **_CHOOSING,
            ),
        ),
    ),
    Family(
        name="minimax_m3_vl_text",
        layers=("MiniMaxM3VLDecoderLayer",),
        spec=_minimax,
        recipes={
            **LLAMA_RECIPES,
            **QK_NORMS,
            **SHARED,
            Role.MLP_IN: Take("mlp.gate_up_proj"),
            Role.ROUTER: Take("mlp.gate"),
            Role.ROUTER_BIAS: Take("mlp.gate.e_score_correction_bias"),
            Role.EXPERTS_IN: Take("mlp.experts.gate_up_proj"),
            Role.EXPERTS_OUT: Take("mlp.experts.down_proj"),
            Role.SHARED_IN: Take("mlp.shared_experts.gate_up_proj"),
        },
        courses={_BLOCKS: OwnCourse(_choose_blocks, _PARTS, note=_BLOCKS), _PLAIN: OwnCourse(_follow)},
        refuse=_refuse_minimax,
        tiny=(
            tiny(
                "MiniMaxM3VLForCausalLM",
                "MiniMaxM3VLTextConfig",
                head_dim=16,
                rotary_dim=8,
                num_local_experts=4,
                num_experts_per_tok=2,
                dense_intermediate_size=80,
                shared_intermediate_size=40,
                index_n_heads=2,
                index_head_dim=16,
                index_block_size=3,
                index_topk_blocks=2,
                layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
                mlp_layer_types=["dense", "sparse", "dense"],
            ),
        ),
    ),
)

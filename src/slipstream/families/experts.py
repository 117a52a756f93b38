"""Parts of mixtures like DeepSeek's: experts scored by a sigmoid, with a correction for the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from slipstream.families.common import MOE_RECIPES, QK_NORMS, field, llama_like
from slipstream.families.family import Config
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role
from slipstream.weights.recipe import First, Recipe, Stack, Take

__all__ = ["CORRECTED", "GATED_SHARED", "SHARED", "TINY_EXPERTS", "corrected_moe", "is_sparse", "normed_like"]

SHARED: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        Role.SHARED_IN: Stack(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")),
        Role.SHARED_OUT: Take("mlp.shared_experts.down_proj"),
    }
)
"""Recipes of shared experts, which run on every token, by DeepSeek's names."""

GATED_SHARED: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        Role.SHARED_IN: Stack(("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
        Role.SHARED_OUT: Take("mlp.shared_expert.down_proj"),
        Role.SHARED_GATE: Take("mlp.shared_expert_gate"),
    }
)
"""Recipes of one shared expert, with a gate if there is one, by Qwen's names."""

CORRECTED: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        **MOE_RECIPES,
        **QK_NORMS,
        **SHARED,
        Role.ROUTER_BIAS: First(
            (Take("mlp.gate.e_score_correction_bias"), Take("mlp.e_score_correction_bias"))
        ),
    }
)
"""Recipes of a llama-like layer with or without such experts, and with or without norms of q and k."""

TINY_EXPERTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1}
)


def corrected_moe(config: Config, **changes: Any) -> MoE:
    """Return the mixture by DeepSeek's field names; `changes` replace single fields."""
    shared = int(field(config, "n_shared_experts", "num_shared_experts", default=0))
    values: dict[str, Any] = {
        "experts": int(field(config, "n_routed_experts", "num_experts")),
        "top_k": config.num_experts_per_tok,
        "scoring": "sigmoid",
        "normalize": bool(field(config, "norm_topk_prob", default=True)),
        "groups": int(field(config, "n_group", default=1)),
        "top_groups": int(field(config, "topk_group", default=1)),
        "group_score": "top2",
        "more_sum": 1e-20,
        "factor": float(field(config, "routed_scaling_factor", default=1.0)),
        "exact": True,
        "shared": config.moe_intermediate_size * shared,
    }
    return MoE(**{**values, **changes})


def normed_like(
    config: Config, index: int, *, sparse: bool, changes: Mapping[str, Any], **moe: Any
) -> BlockSpec:
    """Return the spec of a layer with normalised heads and, if `sparse`, experts by Qwen3-MoE's field names.

    Args:
        config: The model's config.
        index: The layer's index.
        sparse: Whether the layer has experts.
        changes: Fields of the spec to replace.
        moe: Fields of the mixture to replace.
    """
    qk_norm = QKNorm(Norm("rms", config.rms_norm_eps))
    dense = llama_like(config, index, **{"qk_norm": qk_norm, **changes})
    if not sparse:
        return dense
    normalize = moe.pop("normalize", None)
    normalize = config.norm_topk_prob if normalize is None else normalize
    mixture = MoE(config.num_experts, config.num_experts_per_tok, normalize=normalize)
    return replace(dense, ffn=config.moe_intermediate_size, moe=replace(mixture, **moe))


def is_sparse(config: Config, index: int) -> bool:
    """Whether a layer has experts, by `mlp_layer_types` or by the number of dense layers at the beginning."""
    kinds = field(config, "mlp_layer_types")
    if kinds is not None:
        return bool(kinds[index] == "sparse")
    return index >= int(field(config, "first_k_dense_replace", default=0))

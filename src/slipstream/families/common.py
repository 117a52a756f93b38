"""Parts shared by many families: the llama-like layer, its config fields, the frame of a causal model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from slipstream.families.family import Config, OwnMixer, RecurrentParts, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm, Role, Rope
from slipstream.weights.recipe import Recipe, Stack, Take

__all__ = [
    "LLAMA_RECIPES",
    "MOE_RECIPES",
    "POST_NORM_RECIPES",
    "QKV",
    "QK_NORMS",
    "SANDWICH_RECIPES",
    "TINY",
    "alibi_slopes",
    "bert_like",
    "bert_tiny",
    "field",
    "gpt_frame",
    "gpt_like",
    "head_dim",
    "layer_type",
    "llama_frame",
    "llama_like",
    "llama_windowed",
    "own_mixer",
    "plain_like",
    "rope",
    "sparse_layer",
    "tiny",
    "window",
]

QKV: Final = Stack(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))

LLAMA_RECIPES: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        Role.ATTN_NORM: Take("input_layernorm"),
        Role.QKV: QKV,
        Role.ATTN_OUT: Take("self_attn.o_proj"),
        Role.MLP_NORM: Take("post_attention_layernorm"),
        Role.MLP_IN: Stack(("mlp.gate_proj", "mlp.up_proj")),
        Role.MLP_OUT: Take("mlp.down_proj"),
    }
)

MOE_RECIPES: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        **LLAMA_RECIPES,
        Role.ROUTER: Take("mlp.gate"),
        Role.EXPERTS_IN: Take("mlp.experts.gate_up_proj"),
        Role.EXPERTS_OUT: Take("mlp.experts.down_proj"),
    }
)
"""Recipes for layers with experts and for the dense ones between them."""

QK_NORMS: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {Role.Q_NORM: Take("self_attn.q_norm"), Role.K_NORM: Take("self_attn.k_norm")}
)

SANDWICH_RECIPES: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {
        **LLAMA_RECIPES,
        Role.ATTN_POST_NORM: Take("post_attention_layernorm"),
        Role.MLP_NORM: Take("pre_feedforward_layernorm"),
        Role.MLP_POST_NORM: Take("post_feedforward_layernorm"),
    }
)
"""Recipes for norms before and after each branch, by Gemma's names."""

POST_NORM_RECIPES: Final[Mapping[Role, Recipe]] = MappingProxyType(
    {role: recipe for role, recipe in SANDWICH_RECIPES.items() if role not in (Role.ATTN_NORM, Role.MLP_NORM)}
)
"""Recipes for norms after each branch only, by OLMo 2's names."""

TINY: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)


def tiny(model: str, config: str, *, label: str = "", **options: Any) -> Tiny:
    """Return a tiny model with llama's field names; `options` override or add fields."""
    return Tiny(model, config, {**TINY, **options}, label)


def bert_tiny(model: str, config: str, *, label: str = "", **options: Any) -> Tiny:
    """Return a tiny model with BERT's field names; `options` override or add fields."""
    fields = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
    return Tiny(model, config, {**fields, **options}, label)


def field(config: Config, *names: str, default: Any = None) -> Any:
    """Return the first of the named config fields that exists and is not None, else the default."""
    return next((v for name in names if (v := getattr(config, name, None)) is not None), default)


def head_dim(config: Config) -> int:
    """Return the head width for classes that read `head_dim`; without it, hidden size over heads."""
    return int(field(config, "head_dim", default=config.hidden_size // config.num_attention_heads))


def own_mixer(
    part: str,
    *,
    cache: str = "cache_params",
    mask: str = "attention_mask",
    recurrent: RecurrentParts | None = None,
) -> OwnMixer:
    """Return a mixer that is called with the cache and the mask of the layer's call.

    Args:
        part: The mixer's path in the layer.
        cache: The mixer's name for the cache argument.
        mask: The layer's name for the mask argument.
        recurrent: The mixer's tensors, if its layers' specs have a `recurrence`.
    """

    def call(mixer: Any, x: Any, given: Mapping[str, Any]) -> Any:
        kept = given.get("past_key_values", given.get("cache_params"))
        arguments = {cache: kept, "attention_mask": given.get(mask)}
        answer = mixer(hidden_states=x, **arguments)
        return answer[0] if isinstance(answer, tuple) else answer

    return OwnMixer(part, call, frozenset({mask, "cache_params"}), recurrent, mask)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope for each head: powers of `2^(-8 / n)`.

    Here n is the largest power of two up to `heads`; further heads get every other slope of the row for 2n.

    Source: Press et al. 2021 (arXiv 2108.12409); its authors' code if `heads` is not a power of two.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * number / power) for number in range(1, power + 1)]
    finer = [2.0 ** (-4 * number / power) for number in range(1, 2 * (heads - power), 2)]
    return (*slopes, *finer)


def layer_type(config: Config, index: int) -> str | None:
    """Return the layer's entry in `layer_types`, or None if the config has no such list."""
    types = field(config, "layer_types")
    return None if types is None else str(types[index])


def window(config: Config, index: int) -> int | None:
    """Return a layer's sliding window by `layer_types`; without those, `sliding_window` is for all layers."""
    kind = layer_type(config, index)
    size = field(config, "sliding_window")
    return None if size is None or kind not in (None, "sliding_attention") else int(size)


def sparse_layer(config: Config, index: int) -> bool:
    """Whether a layer has experts: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`."""
    listed = index in field(config, "mlp_only_layers", default=())
    return not listed and config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0


def rope(config: Config, *, interleaved: bool = False, **options: Any) -> Rope:
    """Return the rotary embedding of a config; the angles come from the model's own module."""
    parameters = field(config, "rope_parameters", default={})
    factor = parameters.get("partial_rotary_factor", field(config, "partial_rotary_factor", default=1.0))
    return Rope(int(head_dim(config) * factor), interleaved, **options)


def llama_like(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a llama-like layer, causal without a window; `changes` replace single fields."""
    dim = head_dim(config)
    spec = BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=int(field(config, "num_key_value_heads", default=config.num_attention_heads)),
        head_dim=dim,
        # Some configs have no such width, only the experts', or a list with one per layer.
        ffn=width if isinstance(width := field(config, "intermediate_size"), int) else 0,
        norm=Norm("rms", float(field(config, "rms_norm_eps", default=1e-6))),
        activation=str(field(config, "hidden_act", default="silu")),
        scale=dim**-0.5,
        rope=rope(config),
    )
    return replace(spec, **changes)


def llama_windowed(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a llama-like layer with a window by `layer_types`; `changes` replace fields."""
    return llama_like(config, index, **{"window": window(config, index), **changes})


def plain_like(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a causal layer with LayerNorms and no gate; `changes` replace single fields."""
    dim = config.hidden_size // config.num_attention_heads
    spec = BlockSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=dim,
        ffn=int(field(config, "intermediate_size", default=4 * config.hidden_size)),
        norm=Norm("layer", float(field(config, "layer_norm_eps", default=1e-5))),
        activation=str(field(config, "hidden_act", default="gelu")),
        gated=False,
        scale=dim**-0.5,
    )
    return replace(spec, **changes)


def bert_like(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a BERT-like encoder's layer; `changes` replace single fields."""
    return plain_like(config, index, **{"place": "post", "causal": False, **changes})


def gpt_like(config: Config, index: int, **changes: Any) -> BlockSpec:
    """Return the spec of a layer with GPT-2's field names; `changes` replace single fields."""
    dim = config.n_embd // config.n_head
    spec = BlockSpec(
        hidden=config.n_embd,
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=dim,
        ffn=config.n_inner or 4 * config.n_embd,
        norm=Norm("layer", config.layer_norm_epsilon),
        activation=config.activation_function,
        gated=False,
        scale=dim**-0.5,
    )
    return replace(spec, **changes)


def llama_frame(config: Config, **changes: Any) -> FrameSpec:
    """Return the frame of a llama-like causal language model; `changes` replace single fields."""
    frame = FrameSpec(
        layers="model.layers",
        embed="model.embed_tokens",
        head="lm_head",
        norm=Norm("rms", float(field(config, "rms_norm_eps", default=1e-6))),
        final_norm="model.norm",
        rotary="model.rotary_emb",
    )
    return replace(frame, **changes)


def gpt_frame(config: Config, **changes: Any) -> FrameSpec:
    """Return the frame of a model with GPT-2's names; `changes` replace single fields."""
    frame = FrameSpec(
        layers="transformer.h",
        embed="transformer.wte",
        pos_embed="transformer.wpe",
        head="lm_head",
        norm=Norm("layer", config.layer_norm_epsilon),
        final_norm="transformer.ln_f",
    )
    return replace(frame, **changes)

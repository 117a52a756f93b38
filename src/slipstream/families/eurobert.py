"""EuroBERT: Llama's layer without causality."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_like, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(config, index, causal=False)


FAMILY = Family(
    name="eurobert",
    layers=("EuroBertDecoderLayer",),
    spec=_spec,
    recipes=LLAMA_RECIPES,
    tiny=(
        tiny("EuroBertForMaskedLM", "EuroBertConfig", mask_token_id=3),
        tiny(
            "EuroBertForMaskedLM",
            "EuroBertConfig",
            label="biases",
            mask_token_id=3,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
)

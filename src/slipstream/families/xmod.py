"""X-MOD: RoBERTa whose layers end in an adapter of the text's language.

Source: Pfeiffer et al. 2022 (arXiv 2205.06266), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.families.bert import BERT_RECIPES
from slipstream.families.common import bert_like, bert_tiny
from slipstream.families.family import Branches, Config, Family, OwnCourse
from slipstream.spec import BlockSpec, Role

_ADAPTED = "the language adapter"
_PARTS = ("output.adapter_modules", "output.adapter_layer_norm")


def _spec(config: Config, index: int) -> BlockSpec:
    place = "pre" if config.pre_norm else "post"
    return bert_like(config, index, place=place, causal=config.is_decoder, course=_ADAPTED)


def _refuse(config: Config) -> str | None:
    return "add_cross_attention is True" if getattr(config, "add_cross_attention", False) else None


def _adapt(heads: Branches, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor:
    before = heads.spec.place == "pre"

    def entered(role: Role, rows: Tensor) -> Tensor:
        return heads.norm(role, rows) if before else rows

    def left(role: Role, rows: Tensor) -> Tensor:
        return rows if before else heads.norm(role, rows)

    x = left(Role.ATTN_NORM, x + heads.attend(entered(Role.ATTN_NORM, x)))
    fed = x + heads.feed(entered(Role.MLP_NORM, x))
    return left(Role.MLP_NORM, layer.output.lang_adapter(given["lang_ids"], fed))


_LANGUAGES: dict[str, Any] = {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}

FAMILY = Family(
    name="xmod",
    layers=("XmodLayer",),
    spec=_spec,
    recipes=BERT_RECIPES,
    courses={_ADAPTED: OwnCourse(_adapt, _PARTS, frozenset({"lang_ids"}), _ADAPTED)},
    refuse=_refuse,
    tiny=(
        bert_tiny("XmodForMaskedLM", "XmodConfig", **_LANGUAGES),
        bert_tiny("XmodForCausalLM", "XmodConfig", label="causal", is_decoder=True, **_LANGUAGES),
        bert_tiny(
            "XmodForMaskedLM",
            "XmodConfig",
            label="norms before, one of the adapters'",
            pre_norm=True,
            adapter_layer_norm=True,
            ln_before_adapter=False,
            **_LANGUAGES,
        ),
    ),
)

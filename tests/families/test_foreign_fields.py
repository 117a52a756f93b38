"""Config fields that a model's class does not read have no effect on the engine's results."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from slipstream.families import Family, Tiny
from tests.families.sweep import VARIANTS, Row, measure
from tests.families.test_sweep import TOLERANCE

FOREIGN: dict[str, Any] = {
    "activation_function": "relu",
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "head_dim": 8,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "intermediate_multiple_size": 2,
    "ffn_dim": 40,
    "n_inner": 40,
    "rms_norm_eps": 0.2,
    "layer_norm_eps": 0.2,
    "layer_norm_epsilon": 0.2,
    "norm_eps": 0.2,
    "use_sliding_window": True,
    "use_parallel_residual": True,
    "qk_layernorm": True,
    "use_qk_norm": True,
    "clip_qkv": 0.2,
    "alibi": True,
    "query_pre_attn_scalar": 3,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 3.0,
    "logit_scale": 3.0,
    "scale_embedding": True,
    "is_decoder": True,
}
"""Config fields of other families, with values that would change the results if they were read."""


_HALF_READ = {
    "bitnet": ("head_dim",),
    "dbrx": ("head_dim",),
    "dinov2": ("head_dim",),
    "esm": ("head_dim",),
    "dinov2_with_registers": ("head_dim",),
    "gpt_neox_japanese": ("head_dim",),
    "mlcd_vision_model": ("head_dim",),
    "mllama": ("head_dim",),
    "modernbert": ("head_dim",),
    "modernbert-decoder": ("head_dim",),
    "olmoe": ("head_dim",),
    "persimmon": ("head_dim",),
    "stablelm": ("head_dim",),
    "swin": ("head_dim",),
    "swinv2": ("head_dim",),
    "tipsv2_vision_model": ("head_dim",),
}
"""Fields that only a part of the original reads, so that it cannot run with them itself, or that only some
versions of transformers read."""


def _with_foreign_fields(family: Family) -> Tiny:
    """Return the family's first tiny model with every field of `FOREIGN` that its config does not have."""
    tiny = family.tiny[0]
    config_class = getattr(transformers, tiny.config)
    own = {*config_class(**tiny.options).to_dict(), *config_class.attribute_map, *dir(config_class)}
    half_read = _HALF_READ.get(family.name, ())
    foreign = {name: value for name, value in FOREIGN.items() if name not in own and name not in half_read}
    return Tiny(tiny.model, tiny.config, {**tiny.options, **foreign}, "foreign fields")


def _errors(row: Row) -> tuple[float, ...]:
    return row.single, row.left, row.right, row.cached, row.states


_BUILT = {family.name: family for family, _ in VARIANTS}


@pytest.mark.parametrize("family", _BUILT.values(), ids=lambda family: family.name)
def test_fields_that_a_class_does_not_read_change_nothing(family: Family) -> None:
    row = measure(family, _with_foreign_fields(family))
    assert row.level == "block"
    assert max(_errors(row)) <= TOLERANCE, row
    assert row.greedy in ("identical", "-")

"""Every variant of every registered family reproduces the original's outputs in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers

from slipstream.families import Family, Tiny
from slipstream.kernels.cpu.library import refuse
from tests.families import test_towers
from tests.families.sweep import PICTURED, PROMISED, VARIANTS, Row, label, measure

TOLERANCE = PROMISED
"""The promised bound for float32 logits; for hidden states it is relative to their largest value."""

APART = frozenset(
    {
        "beit",
        "bloom",
        "codegen",
        "data2vec-vision",
        "dinov3_vit",
        "gpt_neo",
        "gptj",
        "llama4_text",
        "falcon_mamba",
        "mamba",
        "mamba2",
        "markuplm",
        "mllama_vision_model",
        "moshi",
        "mpt",
        "recurrent_gemma",
        "swin",
        "swinv2",
        "mlcd_vision_model",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "ministral3",
        "falcon_h1",
    }
)
"""Families whose layers do not run together in a forward without a cache: they receive biases or masks that
weight keys, have their own rotary angles or windows, scale queries by position, share keys and values, or
have a mixer beside attention. The layers of all other families that the library accepts do, with right-padded
rows in one native call."""

JOINED = (
    "beit",
    "data2vec-vision",
    "gemma4_text no own inputs",
    "gemma4_unified_text no own inputs",
    "gemma4_unified_text keys as values",
    "llama4_text two experts, plain heads",
)
"""Variants of those families whose layers run together after all."""


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_family_answers_like_the_original(
    variant: tuple[Family, Tiny], record_property: Callable[[str, object], None]
) -> None:
    row = measure(*variant)
    record_property("family sweep", dict(zip(Row.titles(), row.cells(), strict=True)))
    errors = {
        "single": row.single,
        "left": row.left,
        "right": row.right,
        "cached": row.cached,
        "states": row.states,
        "joined": row.joined,
    }
    assert row.level == "block"
    assert max(errors.values()) <= TOLERANCE, errors
    assert row.greedy in ("identical", "-")
    if refuse("avx2") is None and not _is_pair(variant[1]):
        # Gemma and AIMv2 pass causal masks to non-causal layers; such a mask is more than padding.
        name = label(variant)
        apart = (variant[0].name in APART and name not in JOINED) or name.startswith(
            ("falcon rw", "gemma bidirectional", "gemma2 bidirectional", "aimv2 text")
        )
        # YOLOS adds positions to the states between its layers, and HRM runs two stacks in turns; one variant
        # of LFM2 has a convolution between two layers with attention, one of Nemotron-H experts before it,
        # which get other arguments; in one of Gemma 4 every other layer has values that are its keys.
        between = variant[0].name in ("yolos", "hrm_text")
        between = between or name in (
            "lfm2_moe no correction, scaled",
            "nemotron_h",
            "gemma4_unified_text keys as values",
        )
        if row.calls != "refused":
            assert ("+" in row.calls) == between and (row.calls == "-") == apart, row.calls


def test_every_family_has_a_tiny_model() -> None:
    found = {family.name for family, _ in VARIANTS} | PICTURED
    # The oldest supported transformers lacks some types; the newest has them all.
    newest = transformers.__version__ >= "5.23"
    assert found == set(_registered()) if newest else found <= set(_registered())
    assert all(any(test.startswith(f"test_{name}_") for test in dir(test_towers)) for name in PICTURED)


def _registered() -> list[str]:
    from slipstream.families import FAMILIES

    return list(FAMILIES)


def _is_pair(tiny: Tiny) -> bool:
    """Return whether a decoder cross-attends to an encoder's states; such layers never run together."""
    config = getattr(transformers, tiny.config)(**tiny.options)
    return bool(getattr(config, "is_encoder_decoder", False))

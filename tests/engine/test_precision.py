"""In lower precision the engine is as close to the float32 original as the original in that precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import inject, left_padded, make, prompt, roads

SEEDS = range(6)
# Rotary and learned positions; norms before and after; the frame of Gemma, which scales the embedding.
KINDS = ["llama", "gpt2", "bert", "gemma2"]


def error(exact: Tensor, got: Tensor, mask: Tensor) -> float:
    return float((got.float() - exact)[mask.bool()].square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_is_as_exact_as_the_originals(kind: str, dtype: torch.dtype) -> None:
    ids, mask = left_padded(4, 24)
    theirs, ours = 0.0, 0.0
    for seed in SEEDS:
        original = make(kind, seed=seed, gain=1.0)
        exact = original(input_ids=ids, attention_mask=mask).logits.detach()
        engine = inject(original, dtype=dtype)
        assert engine.report().level == "block"
        lower = copy.deepcopy(original)
        for module in lower.modules():  # as from_pretrained(dtype=...) loads it: tables stay in float32
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = parameter.data.to(dtype)
        lower.config.dtype = dtype
        theirs += error(exact, lower(input_ids=ids, attention_mask=mask).logits.detach(), mask)
        ours += error(exact, engine(input_ids=ids, attention_mask=mask).logits, mask)
    assert ours <= 1.5 * theirs, f"{ours / len(SEEDS):.2e} against the original's {theirs / len(SEEDS):.2e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_the_engine_road_is_as_exact_as_the_originals(kind: str, dtype: torch.dtype) -> None:
    """The logits of the first new token, where every model has read the same prompt."""
    ids, mask = left_padded(4, 24)
    wants: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
    theirs, ours = 0.0, 0.0
    for seed in SEEDS:
        original = make(kind, seed=seed, gain=1.0)
        engine = inject(original, dtype=dtype)
        lower = copy.deepcopy(original)
        for parameter in lower.parameters():
            parameter.data = parameter.data.to(dtype)
        lower.config.dtype = dtype
        exact = original.generate(input_ids=ids, attention_mask=mask, **wants).logits[0]
        with roads(engine) as counts:
            got = engine.generate(input_ids=ids, attention_mask=mask, **wants).logits[0]
        assert counts.taken == "engine"
        rows = torch.ones(4, dtype=torch.long)
        theirs += error(exact, lower.generate(input_ids=ids, attention_mask=mask, **wants).logits[0], rows)
        ours += error(exact, got, rows)
    assert ours <= 1.5 * theirs, f"{ours / len(SEEDS):.2e} against the original's {theirs / len(SEEDS):.2e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rotary_tables_stay_in_float32(dtype: torch.dtype) -> None:
    original = make("llama")
    engine = inject(original, dtype=dtype)
    assert engine.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(engine.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq)
    assert {p.dtype for p in engine.parameters()} == {dtype}
    assert engine.dtype == dtype and engine.config.dtype == dtype


def test_the_default_is_float16_without_fused_layers() -> None:
    original = make("llama")
    engine = slipstream.init_inference(copy.deepcopy(original))
    assert engine.dtype == torch.float16 and engine.report().level == "none"
    got = engine(input_ids=prompt()).logits
    assert got.dtype == torch.float16 and bool(got.isfinite().all())
    assert error(original(input_ids=prompt()).logits.detach(), got, torch.ones(3, 9)) < 0.1
    tokens = engine.generate(input_ids=prompt(), max_new_tokens=4)
    assert tokens.shape == (3, 13)


@pytest.mark.parametrize("dtype", ["fp32", "float16", "bf16", torch.float32])
def test_dtypes_by_name(dtype: Any) -> None:
    names = {"fp32": torch.float32, "float16": torch.float16, "bf16": torch.bfloat16}
    assert inject(make("llama"), dtype=dtype).dtype == names.get(dtype, dtype)


def test_long_prompts_stay_right_in_half_precision() -> None:
    """Rounded frequencies would turn the last positions by whole radians."""
    original = make("llama", gain=1.0, max_position_embeddings=2048)
    ids = prompt(1, 1500)
    exact = original(input_ids=ids).logits.detach()[:, -50:]
    engine = inject(original, dtype=torch.bfloat16, max_out_tokens=2048)
    got = engine(input_ids=ids).logits[:, -50:]
    assert error(exact, got, torch.ones(1, 50)) < 0.03 * float(exact.square().mean().sqrt())


@pytest.mark.parametrize("seed", range(3))
def test_a_layer_that_rounds_more_than_others_is_fused_all_the_same(seed: int) -> None:
    """Nemotron squares its activations: fused and original differ by a tenth, and neither is nearer."""
    tiny = next(tiny for family, tiny in VARIANTS if family.name == "nemotron")
    engine = inject(peaked_model(tiny, seed), dtype=torch.bfloat16)
    assert engine.report().level == "block"

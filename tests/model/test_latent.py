"""Latent attention: what the cache keeps, and that moving projections to the query changes no answer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.model.latent import absorbed, expanded
from slipstream.ops.attention import attention
from slipstream.spec import Latent, Norm

TOLERANCE = 1e-4
"""The promise for float32."""
LATENT = Latent(24, None, 12, 8, 10, Norm("rms", 1e-6))


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=LATENT.rank,
        qk_nope_head_dim=LATENT.plain_dim,
        qk_rope_head_dim=LATENT.rope_dim,
        v_head_dim=LATENT.value_dim,
        first_k_dense_replace=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def _injected(model: Any) -> Any:
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True
    )


@pytest.mark.parametrize("masked", [False, True])
def test_absorbed_projections_say_what_expanded_keys_say(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, heads, keys = 2, 3, 7
    q = torch.randn(batch, heads, 1, LATENT.plain_dim + LATENT.rope_dim, generator=generator)
    short = torch.randn(batch, 1, keys, LATENT.rank, generator=generator)
    key = torch.randn(batch, 1, keys, LATENT.rope_dim, generator=generator)
    up = torch.randn(heads * (LATENT.plain_dim + LATENT.value_dim), LATENT.rank, generator=generator) / 5
    mask = torch.rand(batch, 1, 1, keys, generator=generator) > 0.3 if masked else None
    if mask is not None:
        mask[..., 0] = True
    wide = attention(q, *expanded(short, key, up, LATENT), mask=mask, causal=False, scale=0.2)
    got = absorbed(q, short, key, up, latent=LATENT, mask=mask, scale=0.2)
    assert got.shape == (batch, 1, heads, LATENT.value_dim)
    torch.testing.assert_close(got, wide, atol=TOLERANCE, rtol=TOLERANCE)


def test_the_cache_keeps_one_latent_and_one_key_per_token() -> None:
    original = _model()
    engine = _injected(original)
    assert engine.report().level == "block"
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    caches = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for part in (ids[:, :6], ids[:, 6:7], ids[:, 7:]):
            expected = original(part, past_key_values=caches[0], use_cache=True).logits
            got = engine(part, past_key_values=caches[1], use_cache=True).logits
            assert float((expected - got).abs().max()) <= TOLERANCE
    for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        kept = sum(t.numel() * t.element_size() for t in (ours.keys, ours.values))
        assert kept == ids.numel() * (LATENT.rank + LATENT.rope_dim) * 4
        torch.testing.assert_close(ours.keys, theirs.keys, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(ours.values, theirs.values, atol=TOLERANCE, rtol=TOLERANCE)


def test_original_code_goes_on_with_a_cache_that_blocks_began() -> None:
    original = _model()
    original.set_attn_implementation("eager")
    engine = _injected(original)
    ids = torch.randint(3, 128, (1, 6), generator=torch.Generator().manual_seed(1))
    caches = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for model, cache in zip((original, engine), caches, strict=True):
            model(ids[:, :5], past_key_values=cache, use_cache=True)
        expected = original(ids[:, 5:], past_key_values=caches[0], output_attentions=True)
        got = engine(ids[:, 5:], past_key_values=caches[1], output_attentions=True)
    assert float((expected.logits - got.logits).abs().max()) <= TOLERANCE
    for theirs, ours in zip(expected.attentions, got.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_latent_projections_are_packed_but_the_one_that_is_absorbed() -> None:
    original = _model()
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.int8, replace_with_kernel_inject=True
    )
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = original(ids).logits, engine(ids).logits
    cosine = torch.nn.functional.cosine_similarity(expected.flatten(), got.flatten(), dim=0)
    assert float(cosine) > 0.99  # eight bits, two layers: a wrong matrix would be near zero
    assert engine.report().level == "block"

"""Latent attention: what the cache keeps, and that moving projections to the query changes no answer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.model.block import run
from slipstream.model.block.latent_attention import absorbed, attend_paged, expanded
from slipstream.model.block.paged_cache import BLOCK_SIZE, bytes_per_token
from slipstream.ops.attention import attention
from slipstream.ops.step import Step
from slipstream.spec import Latent, Norm
from tests.families.sweep import VARIANTS, label, peaked_model

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


def _injected(model: Any, **settings: Any) -> Any:
    return slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True, **settings
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


def _of_two_halves(**options: Any) -> Any:
    (variant, *_) = (v for v in VARIANTS if label(v) == "longcat_flash")
    return peaked_model(replace(variant[1], options={**variant[1].options, **options}))


def test_a_layer_of_two_attentions_keeps_two_latents_per_token_and_absorbs_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = _of_two_halves()
    engine, config = _injected(original), original.config
    assert [layer.level for layer in engine.report().layers] == ["block"] * config.num_layers
    calls: list[torch.Tensor] = []
    counted = lambda q, *parts, **options: calls.append(q) or absorbed(q, *parts, **options)  # noqa: E731
    monkeypatch.setattr(run, "absorbed", counted)
    ids, mask = _padded()
    caches = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for end, begin in ((6, 0), (7, 6), (9, 7)):
            given = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "use_cache": True}
            expected = original(**given, past_key_values=caches[0]).logits
            got = engine(**given, past_key_values=caches[1]).logits
            real = mask[:, begin:end].bool()
            assert float((expected - got)[real].abs().max()) <= TOLERANCE
    assert len(calls) == 2 * config.num_layers  # of the one forward of one token
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    kept = [sum(t.numel() for t in (layer.keys, layer.values)) for layer in caches[1].layers]
    assert kept == [ids.numel() * numbers] * 2 * config.num_layers
    for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values)):
            torch.testing.assert_close(a[mask[:, None].bool()], b[mask[:, None].bool()], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"router_bias": True}, "router_bias is True, but the original ignores the bias"),
        ({"n_routed_experts": 0}, "none of its experts has weights"),
    ],
)
def test_experts_that_no_block_has_keep_their_layer(options: dict[str, Any], reason: str) -> None:
    original = _of_two_halves(**options)
    engine, ids = _injected(original), _padded()[0]
    assert {layer.reason.partition(": ")[2] for layer in engine.report().layers} == {reason}
    with torch.no_grad():
        torch.testing.assert_close(engine(ids).logits, original(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_both_halves_are_packed_and_come_back_as_what_they_stand_for(quant: str) -> None:
    original = _of_two_halves()
    engine = _injected(original, quant=quant)
    state = engine.state_dict()
    assert state.keys() == original.state_dict().keys()
    changed = {name for name, tensor in original.state_dict().items() if not state[name].equal(tensor)}
    for half in (0, 1):
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
            assert f"model.layers.1.self_attn.{half}.{part}.weight" in changed
        assert f"model.layers.1.self_attn.{half}.kv_b_proj.weight" not in changed
        assert f"model.layers.1.mlps.{half}.down_proj.weight" in changed
    unpacked = copy.deepcopy(original)
    unpacked.load_state_dict(state)
    ids, mask = _padded()
    with torch.no_grad():
        expected, got = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (unpacked, engine))
    assert float((expected - got).abs().max()) <= TOLERANCE


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


@pytest.mark.parametrize("queries", [(1, 1, 1), (3, 1, 6)], ids=["decode", "mixed"])
def test_pages_of_latents_are_attended_to_as_keys_and_values_would_be(queries: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    lens, heads, size = (9, 17, 6), 3, 4
    shorts = [torch.randn(length, 1, LATENT.rank, generator=generator) for length in lens]
    keys = [torch.randn(length, 1, LATENT.rope_dim, generator=generator) for length in lens]
    up = torch.randn(heads * (LATENT.plain_dim + LATENT.value_dim), LATENT.rank, generator=generator) / 5
    q = torch.randn(sum(queries), heads, LATENT.plain_dim + LATENT.rope_dim, generator=generator)
    pages = [-(-length // size) for length in lens]
    order = torch.randperm(sum(pages) + 1, generator=generator).tolist()
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    caches = tuple(torch.full((len(order), size, 1, w), torch.nan) for w in (LATENT.rank, LATENT.rope_dim))
    for row, (count, length) in enumerate(zip(pages, lens, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(own)
        for cache, values in zip(caches, (shorts[row], keys[row]), strict=True):
            cache[own] = (
                cache[own].flatten(0, 1).index_copy(0, torch.arange(length), values).view_as(cache[own])
            )
    starts = torch.tensor([0, *queries]).cumsum(0)
    nothing = torch.empty(0, dtype=torch.int64)
    step = Step(
        nothing,
        nothing,
        starts.int(),
        torch.tensor(lens, dtype=torch.int32),
        table,
        nothing,
        nothing,
        max(queries),
        max(lens),
    )
    got = attend_paged(q, (caches[0], caches[1]), step, up, latent=LATENT, scale=0.2)
    for row, length in enumerate(lens):
        rows = slice(int(starts[row]), int(starts[row + 1]))
        wide = expanded(shorts[row].transpose(0, 1)[None], keys[row].transpose(0, 1)[None], up, LATENT)
        assert wide[0].shape[2] == length
        asked = q[rows].transpose(0, 1)[None]
        expected = attention(asked, *wide, mask=None, causal=True, scale=0.2)[0]
        torch.testing.assert_close(got[rows], expected, atol=TOLERANCE, rtol=TOLERANCE)


def _padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    return ids, mask


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=["float32", "int8"])
def test_generate_keeps_latents_in_its_own_pages(settings: dict[str, Any]) -> None:
    original = _model()
    engine = _injected(original, **settings)
    assert engine.why_compatible() is None
    runner, made = engine._built.runner, []
    runner.new_cache = lambda *sizes: made.append(runner.make_cache(*sizes)) or made[-1]
    ids, mask = _padded()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
    expected, got = original.generate(ids, **options), engine.generate(ids, **options)
    (cache,) = made
    layers = original.config.num_hidden_layers
    numbers = LATENT.rank + LATENT.rope_dim
    formula = layers * (numbers + 2 * 4 if settings else numbers * 4)  # int8 has a scale for each of the two
    assert cache.nbytes == cache.capacity * BLOCK_SIZE * formula
    assert bytes_per_token([block.spec for block in runner.blocks], cache.layers[0].k.dtype) == formula
    if settings:
        first = zip(expected.logits[:4], got.logits[:4], strict=True)
        assert max(float((a - b).abs().max()) for a, b in first) < 0.2  # each number is off by 1/254
        return
    assert torch.equal(expected.sequences, got.sequences)
    for theirs, ours in zip(expected.logits, got.logits, strict=True):
        assert float((theirs - ours).abs().max()) <= TOLERANCE
    for theirs, ours in zip(expected.past_key_values.layers, got.past_key_values.layers, strict=True):
        real = mask[0].bool()
        for a, b in ((theirs.keys, ours.keys), (theirs.values, ours.values)):
            assert a.shape == b.shape
            torch.testing.assert_close(a[0][:, :9][:, real], b[0][:, :9][:, real], atol=1e-4, rtol=1e-4)


def test_sampling_over_latents_draws_the_original_s_tokens() -> None:
    original = _model()
    engine = _injected(original)
    ids, mask = _padded()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": True, "top_k": 20}
    torch.manual_seed(5)
    expected = original.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(engine.generate(ids, **options), expected)


def test_minicpm3_divides_its_logits_on_the_engine_road_too() -> None:
    if not hasattr(transformers, "MiniCPM3ForCausalLM"):
        pytest.skip("this version of transformers has no MiniCPM3")
    torch.manual_seed(0)
    config = transformers.MiniCPM3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        dim_model_base=16,
        scale_emb=3,
    )
    original = transformers.MiniCPM3ForCausalLM(config).eval()
    engine = _injected(original)
    assert engine.why_compatible() is None
    ids = _padded()[0]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected, got = original.generate(ids, **options), engine.generate(ids, **options)
    for theirs, ours in zip(expected.logits, got.logits, strict=True):
        assert float((theirs - ours).abs().max()) <= TOLERANCE

"""A KV cache in int8: nearly the same logits, mostly the same tokens, about half the memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.kernels.cpu.library import refuse
from slipstream.model.block.paged_cache import PagedCache, bytes_per_token
from slipstream.ops.kv_cache import Int8Cache, read_cache, write_cache
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import inject, left_padded, make, roads

KINDS = ["llama", "gpt2", "mistral", "gemma2", "mixtral", "bloom"]

DISTANCE = 0.05
"""Distance of the logits from those of the plain cache, relative to their own size: about twice what an error
of 1/254 of a head's largest value does to a random model of two layers with weights of twice the usual
size."""


def generated(engine: slipstream.InferenceEngine) -> tuple[Tensor, Tensor]:
    """Tokens and logits of greedy search over a padded batch."""
    ids, mask = left_padded()
    with roads(engine) as counts:
        out = engine.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert counts.taken == "engine"
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ["reference", None], ids=["reference", "native"])
def test_answers_are_nearly_those_of_the_plain_cache(
    kind: str, isa: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa:
        monkeypatch.setenv("SLIPSTREAM_CPU_ISA", isa)
    original = make(kind)
    plain, plain_logits = generated(inject(original))
    tokens, logits = generated(inject(original, kv_cache_dtype="int8"))
    # Where a choice was close, what follows is another text: rows count up to their first difference.
    same = (tokens == plain).long().cumprod(1).bool()
    assert float(same.float().mean()) >= 0.5
    steps = torch.cat([torch.ones(len(same), 1, dtype=torch.bool), same[:, :-1]], dim=1).T
    difference = (logits - plain_logits)[steps]
    assert 0 < float(difference.norm() / plain_logits[steps].norm()) <= DISTANCE


def test_a_returned_cache_is_in_the_dtype_of_the_engine() -> None:
    original = make("llama")
    ids, mask = left_padded()
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "return_dict_in_generate": True}
    caches = [
        inject(original, **settings).generate(**given).past_key_values
        for settings in ({}, {"kv_cache_dtype": "int8"})
    ]
    for plain, int8 in zip(*(cache.layers for cache in caches), strict=True):
        assert int8.keys.dtype == torch.float32
        # The first layer's keys and values depend on no cache.
        if plain is caches[0].layers[0]:
            for a, b in ((plain.keys, int8.keys), (plain.values, int8.values)):
                assert bool(((a - b).abs() <= a.abs().amax(-1, keepdim=True) / 254 * 1.001).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_written_is_read_within_the_stated_bound(dtype: torch.dtype) -> None:
    k = torch.randn(5, 2, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    k[1, 0] = 0.0
    k[2] *= 1e4 if dtype != torch.float16 else 10.0
    part = Int8Cache(torch.zeros(3, 4, 2, 24, dtype=torch.int8), torch.full((3, 4, 2), torch.nan))
    slots = torch.tensor([7, 2, 11, 4, 0])
    write_cache(k, -k, part, part, slots)  # the later one stays
    got = read_cache(part, torch.arange(3), torch.float32).flatten(0, 1)[slots]
    bound = k.float().abs().amax(-1, keepdim=True) / 254
    assert bool(((got + k.float()).abs() <= bound * 1.001).all())
    assert int(part.codes.abs().max()) == 127


def test_it_takes_about_half_of_bfloat16() -> None:
    specs = [block.spec for block in inject(make("llama"))._built.runner.blocks]  # type: ignore[union-attr]
    caches = {
        dtype: PagedCache(specs, 3, dtype=dtype, device=torch.device("cpu"))
        for dtype in (torch.bfloat16, torch.int8)
    }
    for dtype, cache in caches.items():
        assert cache.nbytes == 3 * 32 * bytes_per_token(specs, dtype)
    # A head is 8 codes and a scale in place of 16 bytes; with 64 or 128 values the scale weighs less.
    assert bytes_per_token(specs, torch.int8) * 32 == bytes_per_token(specs, torch.bfloat16) * 24


def test_the_report_says_what_a_token_takes() -> None:
    notes = inject(make("llama"), kv_cache_dtype="int8").report().notes
    assert any("int8: 96 bytes per token, 256 in float32" in note for note in notes)


@pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))
def test_latents_in_int8_are_said_to_run_one_layer_at_a_time() -> None:
    model = peaked_model(next(tiny for family, tiny in VARIANTS if family.name == "youtu"))
    notes = [inject(copy.deepcopy(model), kv_cache_dtype=dtype).report().notes for dtype in (None, "int8")]
    said = [
        "the layers of a step run one at a time: latents in int8 are not supported" in one for one in notes
    ]
    assert said == [False, True]


def test_without_an_engine_road_it_warns() -> None:
    with pytest.warns(UserWarning, match="kv_cache_dtype='int8' has no effect"):
        engine = inject(make("bert"), kv_cache_dtype="int8")
    assert any("kv_cache_dtype" in note for note in engine.report().notes)

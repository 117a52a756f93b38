"""Layers that extend a cache together leave in it, and say, what they do one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

from slipstream.kernels.cpu.library import refuse
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import Pair, blocks_that_run, close, inject, pair, prompt

pytestmark = pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))

CHUNKS = (5, 1, 3, 1, 2)


@pytest.fixture(scope="module")
def llama() -> Pair:
    return pair("llama", num_hidden_layers=3)


def kept(cache: Any) -> list[tuple[Tensor, Tensor, int]]:
    return [(layer.keys, layer.values, layer.get_seq_length()) for layer in cache.layers]


def both(models: Pair, caches: Sequence[Any], chunks: Sequence[int] = CHUNKS, **more: Any) -> list[int]:
    """Feed a prompt in chunks and compare answers and caches; how many blocks each native call had."""
    ids, at, calls = prompt(2, sum(chunks)), 0, []
    for size in chunks:
        given = {"input_ids": ids[:, at : at + size], "use_cache": True, **more}
        with torch.no_grad():
            expected = models.original(**given, past_key_values=caches[0])
        with blocks_that_run() as ran:
            got = models.engine(**given, past_key_values=caches[1])
        calls += ran.calls
        caches, at = (expected.past_key_values, got.past_key_values), at + size
        close(expected.logits, got.logits)
        close(kept(caches[0]), kept(caches[1]))
    return calls


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_answers_and_caches_are_the_originals(kind: str, attention: str) -> None:
    models = pair(kind, attn_implementation=attention)
    assert both(models, (None, None)) == [2] * len(CHUNKS)
    assert both(models, (DynamicCache(), DynamicCache())) == [2] * len(CHUNKS)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"])
def test_latents_are_kept_in_one_call(name: str) -> None:
    original = peaked_model(next(tiny for family, tiny in VARIANTS if family.name == name))
    engine = inject(copy.deepcopy(original))
    ids, at, caches = prompt(2, sum(CHUNKS), vocabulary=50), 0, [DynamicCache(), DynamicCache()]
    for size in CHUNKS:
        with torch.no_grad(), blocks_that_run() as ran:
            outs = [
                model(ids[:, at : at + size], past_key_values=cache)
                for model, cache in zip((original, engine), caches, strict=True)
            ]
        assert ran.calls == [len(engine.module.model.layers)]
        close(outs[0].logits, outs[1].logits)
        at += size
    assert all(t.is_contiguous() for layer in caches[1].layers for t in (layer.keys, layer.values))


def static(models: Pair, room: int, kind: Any = StaticCache) -> list[Any]:
    return [kind(config=models.original.config, max_cache_len=room) for _ in range(2)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("room", [12, 19])
def test_static_caches_are_filled_where_they_are(kind: str, attention: str, room: int) -> None:
    models = pair(kind, attn_implementation=attention, sliding_window=32)
    assert both(models, static(models, room)) == [2] * len(CHUNKS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_static_caches_in_sixteen_bits_hold_what_growing_ones_do(dtype: torch.dtype) -> None:
    models, ids, held = pair("llama", settings={"dtype": dtype}), prompt(2, 9), []
    for cache in (DynamicCache(), *static(models, 12)[:1]):
        for at, size in ((0, 5), (5, 1), (6, 3)):
            models.engine(ids[:, at : at + size], past_key_values=cache, use_cache=True)
        held.append([(k[:, :, :9], v[:, :, :9]) for k, v, _ in kept(cache)])
    assert all(
        torch.equal(a, b) for one, other in zip(*held, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_a_static_cache_is_used_again(llama: Pair) -> None:
    caches = static(llama, 14)
    assert both(llama, caches, (5, 1)) == [3, 3]
    places = [k.data_ptr() for k, _, _ in kept(caches[1])]
    for cache in caches:
        cache.reset()
    assert both(llama, caches, (7, 1, 6)) == [3, 3, 3]
    assert places == [k.data_ptr() for k, _, _ in kept(caches[1])]
    for model, cache in zip((llama.original, llama.engine), caches, strict=True):
        with pytest.raises(IndexError):
            model(prompt(2, 1), past_key_values=cache)


def test_a_static_cache_whose_memory_was_there_before(llama: Pair) -> None:
    caches, config = static(llama, 14), llama.original.config
    for cache in caches:
        heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        cache.early_initialization(2, heads, dim, torch.float32, torch.device("cpu"))
    assert both(llama, caches, (1, 5, 1)) == [3, 3, 3]


def test_windows_of_a_static_cache_that_have_passed_are_its_own_affair() -> None:
    models = pair("mistral", sliding_window=6)
    assert both(models, static(models, 16), (3, 2, 1, 1)) == [2, 2, 2]
    models = pair("gemma2", num_hidden_layers=4, sliding_window=6)
    assert both(models, static(models, 16), (3, 2)) == [1, 1] * 2
    assert both(models, static(models, 6), (3, 2, 1)) == [4, 4, 4]


def test_layers_whose_windows_have_passed_run_apart_from_those_that_keep_all() -> None:
    models = pair("gemma2", num_hidden_layers=4)
    assert both(models, (None, None), (3, 2)) == [4, 4]
    assert both(models, (None, None), (3, 5, 1)) == [4, 4, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_keep_what_was_computed_in_them(llama: Pair, dtype: torch.dtype) -> None:
    models = pair("llama", num_hidden_layers=3, gain=1.0, settings={"dtype": dtype})
    exact = copy.deepcopy(models.original).to(dtype).float()
    theirs = models.original.to(dtype)
    ids = prompt(2, 40)
    with torch.no_grad():
        truth, their = exact(ids, use_cache=True), theirs(ids, use_cache=True)
    with blocks_that_run() as ran:
        ours = models.engine(ids, use_cache=True)
    assert ran.calls == [3]
    for name in ("keys", "values"):
        states = [[getattr(x, name) for x in out.past_key_values.layers] for out in (truth, ours, their)]
        assert {t.dtype for t in states[1]} == {dtype} and all(t.is_contiguous() for t in states[1])
        ours_off, theirs_off = (
            sum(float((a - b.float()).square().sum()) for a, b in zip(states[0], some, strict=True))
            for some in states[1:]
        )
        assert ours_off <= 1.5 * theirs_off


def test_what_a_cache_had_is_left_as_it_was(llama: Pair) -> None:
    with torch.no_grad():
        cache = llama.engine(prompt(2, 6), use_cache=True).past_key_values
        before = [(k, k.clone()) for k, _, _ in kept(cache)]
        llama.engine(prompt(2, 2), past_key_values=cache)
    assert all(torch.equal(k, as_it_was) for k, as_it_was in before)
    cache.crop(-3)
    with torch.no_grad():
        expected = llama.original(prompt(2, 6), use_cache=True).past_key_values
        llama.original(prompt(2, 2), past_key_values=expected)
    expected.crop(-3)
    assert both(llama, (expected, cache), (2, 1)) == [3, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_kept_as_the_layers_keep_it(llama: Pair, side: str) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 3) if side == "left" else slice(6, 9)] = 0
    given = {"input_ids": prompt(2, 9), "attention_mask": mask, "use_cache": True}
    with torch.no_grad():
        expected = llama.original(**given)
    with blocks_that_run() as ran:
        got = llama.engine(**given)
    close(expected.logits, got.logits)
    close(kept(expected.past_key_values), kept(got.past_key_values))
    assert ran.calls == []
    more = {"input_ids": prompt(2, 1), "attention_mask": torch.cat([mask, mask[:, :1] * 0 + 1], dim=1)}
    with torch.no_grad():
        close(
            llama.original(**more, past_key_values=expected.past_key_values).logits,
            llama.engine(**more, past_key_values=got.past_key_values).logits,
        )


def test_positions_of_the_caller_s_count(llama: Pair) -> None:
    places = torch.tensor([[3, 4, 5, 9, 11], [0, 1, 2, 3, 4]])
    assert both(llama, (None, None), (5,), position_ids=places) == [3]


class Counted(DynamicCache):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.updates = getattr(self, "updates", 0) + 1
        return super().update(*args, **kwargs)


def test_caches_that_are_somebody_s_own_are_asked_layer_by_layer(llama: Pair) -> None:
    counted = (Counted(), Counted())
    assert both(llama, counted) == []
    assert counted[0].updates == counted[1].updates
    own = static(llama, 16, kind=type("Own", (StaticCache,), {}))
    assert both(llama, own) == []


def test_states_that_are_asked_for_are_the_originals(llama: Pair) -> None:
    given: dict[str, Any] = {"input_ids": prompt(2, 9), "use_cache": True, "output_hidden_states": True}
    with torch.no_grad():
        expected, got = llama.original(**given), llama.engine(**given)
    close(list(expected.hidden_states), list(got.hidden_states))
    close(kept(expected.past_key_values), kept(got.past_key_values))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_hook_sees_the_cache_as_far_as_it_is_filled(llama: Pair, place: int) -> None:
    seen: list[list[int]] = []

    def hook(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen.append([int(n) for *_, n in kept(kwargs["past_key_values"])])

    models = Pair(copy.deepcopy(llama.original), copy.deepcopy(llama.engine))
    for layers in (models.original.model.layers, models.engine.module.model.layers):
        layers[place].register_forward_hook(hook, with_kwargs=True)
    both(models, (None, None), (4, 1))
    assert seen[::2] == seen[1::2] and len(seen) == 4


def test_a_forward_whose_states_nobody_reads_fills_the_cache(llama: Pair) -> None:
    models = Pair(copy.deepcopy(llama.original), copy.deepcopy(llama.engine))
    for model in (models.original.model, models.engine.module.model):
        del model.layers[-1]  # which would have run the others
        model.norm.forward = lambda x: torch.zeros(x.shape)
    assert both(models, (None, None), (4, 1)) == [2, 2]


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_transformers_own_loops_run_in_one_call_a_step(llama: Pair, mode: dict[str, Any]) -> None:
    given = {"input_ids": prompt(1, 9), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **mode}
    expected = llama.original.generate(**given, past_key_values=transformers.DynamicCache())
    with blocks_that_run() as ran:
        got = llama.engine.generate(**given, past_key_values=transformers.DynamicCache())
    assert torch.equal(expected, got)
    assert ran.calls and set(ran.calls) == {3}


def test_padding_in_a_static_cache_is_kept_as_the_layers_keep_it(llama: Pair) -> None:
    caches, mask = static(llama, 12), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for size, last in ((6, 6), (1, 7), (2, 9)):
        given = {"input_ids": prompt(2, 9)[:, last - size : last], "attention_mask": mask[:, :last]}
        with torch.no_grad():
            expected = llama.original(**given, past_key_values=caches[0])
        with blocks_that_run() as ran:
            got = llama.engine(**given, past_key_values=caches[1])
        assert ran.calls == []
        close(expected.logits, got.logits)
        close(kept(caches[0]), kept(caches[1]))

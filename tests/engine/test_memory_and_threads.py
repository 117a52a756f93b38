"""A generation gives its memory back, and neither engines nor threads disturb each other."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from slipstream.model.block.paged_cache import PagedCache
from tests.helpers.models import close, inject, left_padded, make, pair, prompt
from tests.helpers.tokens import letter_tokenizer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[PagedCache]]:
    """Every cache that is made."""
    references: list[weakref.ref[PagedCache]] = []
    init = PagedCache.__init__

    def noted(self: PagedCache, *args: Any, **kwargs: Any) -> None:
        references.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(PagedCache, "__init__", noted)
    return references


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_a_generation_gives_its_cache_back(made: list[weakref.ref[PagedCache]], as_dictionary: bool) -> None:
    engine = inject(make("llama"))
    gc.collect()
    gc.disable()  # reference counts alone must do: on a GPU nobody waits for the collector
    try:
        output = engine.generate(input_ids=prompt(), max_new_tokens=4, return_dict_in_generate=as_dictionary)
        assert len(made) == 1 and made[0]() is None
        assert output is not None
    finally:
        gc.enable()


def test_a_generation_that_fails_gives_its_cache_back(made: list[weakref.ref[PagedCache]]) -> None:
    engine = inject(make("llama"))

    def stop(*_: Any) -> Any:
        raise KeyError("a user's own mistake")

    with pytest.raises(KeyError):
        engine.generate(input_ids=prompt(), max_new_tokens=4, prefix_allowed_tokens_fn=stop)
    gc.collect()
    assert len(made) == 1 and made[0]() is None
    assert engine.generate(input_ids=prompt(), max_new_tokens=4).shape == (3, 13)


def test_a_forward_leaves_nothing_behind() -> None:
    engine = inject(make("llama"))
    reference = weakref.ref(engine(input_ids=prompt()).past_key_values)
    gc.collect()
    assert reference() is None


def test_a_destroyed_engine_frees_the_model() -> None:
    engine = inject(make("llama"))
    engine.profile_model_time()
    reference = weakref.ref(engine.module)
    block = weakref.ref(engine._built.runner.blocks[0])
    engine.destroy()
    gc.collect()
    assert reference() is None and block() is None
    engine.destroy()
    with pytest.raises(AttributeError, match="destroyed"):
        engine.generate(input_ids=prompt())


def test_an_engine_that_goes_out_of_scope_frees_the_model() -> None:
    engine = inject(make("gpt2"))
    reference = weakref.ref(engine.module)
    engine.generate(input_ids=prompt(), max_new_tokens=3)
    del engine
    gc.collect()
    assert reference() is None


def test_a_context_manager_destroys_its_engine() -> None:
    with inject(make("llama")) as engine:
        engine(input_ids=prompt())
    with pytest.raises(AttributeError, match="destroyed"):
        _ = engine.device


def test_two_engines_of_two_dtypes_in_one_process() -> None:
    original = make("llama")
    first, second = inject(original), inject(original, dtype=torch.bfloat16)
    third = inject(make("gpt2"), dtype=torch.float16)
    before = first(input_ids=prompt()).logits
    tokens = first.generate(input_ids=prompt(), max_new_tokens=5)
    assert second(input_ids=prompt()).logits.dtype == torch.bfloat16
    second.generate(input_ids=prompt(), max_new_tokens=5)
    third.generate(input_ids=prompt(), max_new_tokens=5)
    close(before, first(input_ids=prompt()).logits, atol=0)
    close(tokens, first.generate(input_ids=prompt(), max_new_tokens=5))
    assert (first.dtype, second.dtype, third.dtype) == (torch.float32, torch.bfloat16, torch.float16)


def together(*jobs: Callable[[], Any], times: int = 5) -> list[list[Any]]:
    """Run jobs in one thread each, all at once, each several times; their results."""
    results: list[list[Any]] = [[] for _ in jobs]
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        start.wait()
        for _ in range(times):
            results[index].append(jobs[index]())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(result) == times for result in results), "a thread failed"
    return results


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generations_in_two_threads_are_as_one_after_the_other(kind: str) -> None:
    engine = pair(kind).engine
    ids, mask = left_padded()
    jobs = [
        lambda: engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12),
        lambda: engine.generate(input_ids=prompt(2, 21, seed=4), max_new_tokens=9),
    ]
    alone = [job() for job in jobs]
    for expected, got in zip(alone, together(*jobs), strict=True):
        assert all(torch.equal(expected, tokens) for tokens in got)


def test_every_road_may_run_at_once() -> None:
    original = make("llama")
    original.set_attn_implementation("eager")
    engine = inject(original)
    jobs = [
        lambda: engine.generate(input_ids=prompt(), max_new_tokens=8),
        lambda: engine(input_ids=prompt()).logits,
        lambda: engine(input_ids=prompt(), output_attentions=True).attentions[1],
        lambda: engine.generate(input_ids=prompt(), max_new_tokens=5, num_beams=2),
    ]
    alone = [job() for job in jobs]
    for expected, results in zip(alone, together(*jobs, times=3), strict=True):
        for result in results:
            close(expected, result)


def test_a_generation_in_a_thread_streams_to_this_one() -> None:
    models = pair("llama")
    tokenizer = letter_tokenizer()
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    kwargs = {"input_ids": prompt(1), "max_new_tokens": 8, "eos_token_id": None, "streamer": streamer}
    thread = threading.Thread(target=models.engine.generate, kwargs=kwargs)
    thread.start()
    text = "".join(streamer)
    thread.join()
    expected = models.original.generate(input_ids=prompt(1), max_new_tokens=8, eos_token_id=None)
    assert text == tokenizer.decode(expected[0, 9:])

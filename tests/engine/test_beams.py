"""Beam search on the engine road: which calls take it, what it writes, and how its rows share the cache."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.engine.generation.batch import Batch
from slipstream.engine.generation.fork import followed, forked
from slipstream.families import FAMILIES
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.ops.kv_cache import tensors_of
from slipstream.spec import BlockSpec, Norm
from tests.families.sweep import peaked_model
from tests.helpers.models import Pair, close, inject, pair, roads

CASES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "across pages": {"num_beams": 4, "max_new_tokens": 60},
    "all of them": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": -0.7},
    "early ends": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(3, 100, 9))},
    "never": {"num_beams": 2, "early_stopping": "never", "eos_token_id": [7, 12, 50]},
    "drawn": {"num_beams": 3, "do_sample": True, "temperature": 1.4, "top_k": 30},
    "penalised": {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "forced": {"num_beams": 2, "forced_eos_token_id": 9, "suppress_tokens": [4, 5], "min_new_tokens": 3},
    "one token": {"num_beams": 3, "max_new_tokens": 1},
    "a static cache": {"num_beams": 3, "cache_implementation": "static"},
}

SPEC = BlockSpec(8, 2, 1, 4, 8, Norm("rms", 1e-6))


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


def prompts(length: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (3, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, : length // 3] = 0
    mask[2, : length // 2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def written(model: Any, given: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    torch.manual_seed(5)
    tokens: Tensor = model.generate(**given, **{"max_new_tokens": 9, "pad_token_id": 0, **options})
    return tokens


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma2", "mixtral"])
def test_beams_write_what_the_original_writes(pairs: dict[str, Pair], kind: str, case: str) -> None:
    two = pairs.setdefault(kind, pairs.get(kind) or pair(kind))
    # Of 31 and 32 tokens the longest prompt ends before, and at, the end of a block.
    for length in (BLOCK_SIZE - 1, BLOCK_SIZE, 7):
        given = prompts(length)
        with roads(two.engine) as counts:
            found = written(two.engine, given, CASES[case])
        assert counts.taken == "engine"
        assert torch.equal(written(two.original, given, CASES[case]), found)


def test_beams_over_an_int8_cache_say_what_a_copied_cache_says() -> None:
    original = pair("llama").original
    engine = inject(copy.deepcopy(original), kv_cache_dtype="int8")
    given = {name: t[:1] for name, t in prompts(BLOCK_SIZE - 1).items()}
    runner = engine._built.runner

    def batch(rows: Tensor, forks: int = 1) -> Batch:
        return Batch(runner, rows, None, max_length=48, token_budget=512, forks=forks)

    tokens = torch.tensor([[5], [9], [9]])
    with torch.no_grad():
        whole = batch(given["input_ids"], forks=3)
        first = whole.logits()
        whole.fork(3)
        whole.append(tokens)
        whole.logits()
        whole.follow([1, 0, 1])
        whole.append(tokens)
        rows = given["input_ids"].repeat(3, 1)
        apart = batch(rows)
        torch.testing.assert_close(apart.logits(), first.repeat(3, 1), atol=1e-4, rtol=1e-4)
        for step in (tokens[[1, 0, 1]], tokens):
            apart.append(step)
            expected = apart.logits()
        torch.testing.assert_close(whole.logits(), expected, atol=1e-3, rtol=1e-3)
        assert torch.equal(whole.ids, apart.ids)


def test_prompts_run_once_however_many_beams_they_have(pairs: dict[str, Pair]) -> None:
    two = pairs.setdefault("llama", pairs.get("llama") or pair("llama"))
    tokens: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        runner = type(two.engine._built.runner)
        patch.setattr(two.engine._built.runner, "whole", None)
        call = runner.__call__

        def counted(self: Any, step: Any, *rest: Any) -> Tensor:
            tokens.append(step.token_ids.shape[0])
            return call(self, step, *rest)

        patch.setattr(runner, "__call__", counted)
        given = prompts(9)
        written(two.engine, given, {"num_beams": 4, "max_new_tokens": 3})
    assert tokens == [int(given["attention_mask"].sum()), 12, 12]


def test_a_record_of_beams_has_the_scores_and_the_cache_of_the_original(pairs: dict[str, Pair]) -> None:
    two = pairs.setdefault("llama", pairs.get("llama") or pair("llama"))
    given = prompts(BLOCK_SIZE - 2)
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
    options |= dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    with roads(two.engine) as counts:
        found = two.engine.generate(**given, **options)
    expected = two.original.generate(**given, **options)
    assert counts.taken == "engine" and type(found) is type(expected) and found.keys() == expected.keys()
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.beam_indices, expected.beam_indices)
    close(found.sequences_scores, expected.sequences_scores)
    for name in ("scores", "logits"):
        for ours, theirs in zip(found[name], expected[name], strict=True):
            close(ours, theirs, atol=1e-3)
    real = given["attention_mask"].repeat_interleave(3, 0).bool()
    for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True):
        for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert one.shape == other.shape
            seen = torch.cat((real, torch.ones(9, one.shape[2] - real.shape[1], dtype=torch.bool)), 1)
            close(one.transpose(1, 2)[seen], other.transpose(1, 2)[seen], atol=1e-3)


def test_a_search_of_the_models_own_runs_in_transformers_loop(pairs: dict[str, Pair]) -> None:
    two = pairs.setdefault("llama", pairs.get("llama") or pair("llama"))

    class Own(transformers.LlamaForCausalLM):
        def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
            return super()._beam_search(*args, **kwargs)

    model, given = Own(two.original.config).eval(), prompts(7)
    engine = inject(copy.deepcopy(model))
    with roads(engine) as counts:
        assert torch.equal(written(engine, given, CASES["beams"]), written(model, given, CASES["beams"]))
    assert counts.taken == "compatible"


def test_low_memory_is_refused_as_by_transformers(pairs: dict[str, Pair]) -> None:
    two = pairs.setdefault("llama", pairs.get("llama") or pair("llama"))
    for model in (two.original, two.engine):
        with pytest.raises(ValueError, match="low_memory"):
            written(model, prompts(7), {"num_beams": 2, "low_memory": True})


class Written:
    """Rows whose tokens stand in every part of a cache."""

    def __init__(self, draw: random.Random, dtype: torch.dtype, room: int, lengths: list[int]) -> None:
        needed = [-(-(length + room) // BLOCK_SIZE) for length in lengths]
        self.beams, self.draw = draw.choice([2, 3, 5]), draw
        blocks = self.beams * sum(needed)
        self.cache = PagedCache([SPEC, SPEC], blocks, dtype=dtype, device=torch.device("cpu"))
        self.blocks = [self.cache.allocate(count) for count in needed]
        self.rows: list[list[int]] = [[] for _ in lengths]

    def write(self, row: int) -> None:
        place, value = len(self.rows[row]), self.draw.randrange(100)
        self.rows[row].append(value)
        for part in self.parts():
            part[self.blocks[row][place // BLOCK_SIZE], place % BLOCK_SIZE] = value

    def parts(self) -> list[Tensor]:
        return [tensor for layer in self.cache.layers for part in layer.pages for tensor in tensors_of(part)]

    def held(self) -> list[int]:
        return [len(row) for row in self.rows]

    def check(self) -> None:
        for row, own in zip(self.rows, self.blocks, strict=True):
            places = torch.arange(len(row))
            for part in self.parts():
                found = part[torch.tensor(own)[places // BLOCK_SIZE], places % BLOCK_SIZE]
                assert found.flatten(1)[:, 0].int().tolist() == row


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_rows_find_the_tokens_of_those_they_follow(dtype: torch.dtype) -> None:
    draw = random.Random(3)
    for _ in range(40):
        lengths = [draw.randrange(1, 70) for _ in range(draw.choice([1, 2, 3]))]
        steps = draw.randrange(1, 70)
        said = Written(draw, dtype, steps, lengths)
        for row, length in enumerate(lengths):
            for _ in range(length):
                said.write(row)
        beams = said.beams
        said.blocks = forked(said.cache, said.blocks, beams, lengths)
        said.rows = [list(row) for row in said.rows for _ in range(beams)]
        for _ in range(steps):
            for row in range(len(said.rows)):
                said.write(row)
            sources = [
                row - row % beams + draw.randrange(beams) if draw.random() < 0.8 else row
                for row in range(len(said.rows))
            ]
            said.blocks = followed(said.cache, said.blocks, sources, said.held())
            said.rows = [list(said.rows[source]) for source in sources]
        said.check()


def test_each_block_that_is_written_belongs_to_one_row() -> None:
    cache = PagedCache(
        [SPEC],
        12,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    blocks = forked(cache, [cache.allocate(3), cache.allocate(3)], 2, [40, 32])
    assert [row[0] for row in blocks] == [blocks[0][0], blocks[0][0], blocks[2][0], blocks[2][0]]
    blocks = followed(cache, blocks, [1, 1, 3, 3], [41, 41, 33, 33])
    later = [block for row in blocks for block in row[1:]]
    assert len(set(later)) == len(later)


def test_a_family_that_listens_forks_no_prompt() -> None:
    original = peaked_model(FAMILIES["t5"].tiny[0])
    engine = inject(copy.deepcopy(original))
    given = {"input_ids": torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][1, 5:] = 0
    first = torch.tensor([[4, 8, 5], [4, 9, 9]])
    options = {"num_beams": 4, "num_return_sequences": 3, "decoder_input_ids": first, "max_new_tokens": 40}
    with roads(engine) as counts:
        found = written(engine, given, options)
    assert torch.equal(found, written(original, given, options))
    assert counts.module == 0

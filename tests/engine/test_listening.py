"""The engine road of decoders that listen to an encoder: which calls take it, and what it writes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from slipstream.engine.generation.encoder_decoder import CrossAttendingStack
from slipstream.families import FAMILIES
from slipstream.kernels.cpu.model import NativeSession
from slipstream.ops.step import Step
from tests.families.pairs import _entries
from tests.families.sweep import peaked_model
from tests.helpers.models import Pair, inject

ROAD = (
    "t5",
    "mt5",
    "umt5",
    "t5gemma",
    "switch_transformers",
    "longt5",
    "bart",
    "led",
    "mbart",
    "pegasus",
    "marian",
    "m2m_100",
    "nllb-moe",
    "blenderbot",
    "blenderbot-small",
    "plbart",
    "moonshine",
)


@functools.cache
def pair(family: str) -> Pair:
    original = peaked_model(FAMILIES[family].tiny[0])
    return Pair(original, inject(original))


@contextmanager
def steps() -> Iterator[list[int]]:
    """Counts the steps of the road within the context: their packed tokens, or of whole ones their rows."""
    taken: list[int] = []
    run, tokens, logits = CrossAttendingStack.__call__, NativeSession._tokens, NativeSession.logits

    def counted(self: CrossAttendingStack, blocks: Any, x: Tensor, *rest: Any) -> Tensor:
        taken.append(x.shape[0])
        return run(self, blocks, x, *rest)

    def chosen(self: NativeSession, *args: Any) -> Tensor | None:
        out = tokens(self, *args)
        if out is not None:
            taken.extend([out.shape[0]] * out.shape[1])
        return out

    def scored(self: NativeSession, step: Step) -> Tensor | None:
        out = logits(self, step)
        if out is not None:
            taken.append(out.shape[0])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossAttendingStack, "__call__", counted)
        patch.setattr(NativeSession, "_tokens", chosen)
        patch.setattr(NativeSession, "logits", scored)
        yield taken


def written(model: Any, options: Mapping[str, Any], entry: Mapping[str, Tensor]) -> Tensor:
    torch.manual_seed(5)
    tokens = model.generate(**entry, **{"max_new_tokens": 7, **options})
    return tokens if isinstance(tokens, Tensor) else tokens.sequences


_ROWS = 3
_SERVED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 12, "temperature": 1.7},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "forced tokens": {"do_sample": False, "forced_bos_token_id": 9, "forced_eos_token_id": 11},
    "a prompt": {"do_sample": False, "decoder_input_ids": torch.tensor([[4, 8, 5]] * _ROWS)},
    "rows that end early": {"do_sample": False, "eos_token_id": list(range(3, 70)), "pad_token_id": 0},
    "beams": {"num_beams": 3, "length_penalty": 0.4},
    "beams that end early": {"num_beams": 2, "early_stopping": True, "eos_token_id": [*range(3, 70, 4)]},
    "drawn beams": {"num_beams": 3, "do_sample": True},
    "a penalty": {"do_sample": False, "repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("case", _SERVED)
@pytest.mark.parametrize("family", ROAD)
def test_the_road_writes_what_the_original_writes(family: str, case: str) -> None:
    two = pair(family)
    assert two.engine.why_compatible() is None
    for entry in _entries(two.original).values():
        options = dict(_SERVED[case])
        rows = next(iter(entry.values())).shape[0]
        if "decoder_input_ids" in options:
            options["decoder_input_ids"] = options["decoder_input_ids"][:rows]
        expected = written(two.original, options, entry)
        with steps() as taken:
            assert torch.equal(expected, written(two.engine, options, entry))
        assert taken


_LEFT: dict[str, dict[str, Any]] = {
    "no cache": {"use_cache": False},
    "a record": {"return_dict_in_generate": True, "output_scores": True},
    "a padded prompt": {
        "decoder_input_ids": torch.tensor([[4, 8, 5]] * _ROWS),
        "decoder_attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]]),
    },
    "more tokens than there are positions": {"max_new_tokens": 300},
}


@pytest.mark.parametrize("case", _LEFT)
def test_what_the_road_cannot_honour_runs_transformers_loop(case: str) -> None:
    two, options = pair("bart"), {"do_sample": False, **_LEFT[case]}
    entry = _entries(two.original)["right"]
    if "max_new_tokens" in options:
        options["stopping_criteria"] = StoppingCriteriaList([_Enough()])
    expected = written(two.original, options, entry)
    with steps() as taken:
        assert torch.equal(expected, written(two.engine, options, entry))
    assert not taken


class _Enough(StoppingCriteria):
    """Ends a generation whose bound is far away."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] > 4)


def test_the_encoder_runs_once_and_its_keys_are_made_once() -> None:
    two = pair("bart")
    runs: list[int] = []
    encoder = two.engine.module.get_encoder()
    forward = type(encoder).forward
    made: list[int] = []

    @functools.wraps(forward)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return forward(self, *args, **kwargs)

    blocks = two.engine._built.runner.blocks
    make = type(blocks[0]).cross_keys_values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(encoder), "forward", counted)
        patch.setattr(
            type(blocks[0]), "cross_keys_values", lambda self, states: made.append(1) or make(self, states)
        )
        with steps() as taken:
            written(two.engine, {"do_sample": False, "min_new_tokens": 7}, _entries(two.original)["right"])
    assert (len(runs), len(made), len(taken)) == (1, len(blocks), 7)


def test_a_long_answer_crosses_pages_of_the_cache() -> None:
    for family in ("t5", "umt5", "t5gemma", "switch_transformers", "marian", "moonshine"):
        two = pair(family)
        entry = _entries(two.original)["right"]
        options = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
        with steps() as taken:
            assert torch.equal(written(two.original, options, entry), written(two.engine, options, entry))
        assert len(taken) == 40


def test_a_cache_in_int8_serves_the_road() -> None:
    original = pair("t5").original
    engine = inject(original, kv_cache_dtype="int8")
    with steps() as taken:
        tokens = written(engine, {"do_sample": False}, _entries(original)["single"])
    assert taken and tokens.shape[0] == 1


def test_a_table_of_biases_that_is_changed_counts_on_the_road() -> None:
    original = copy.deepcopy(pair("t5").original)
    engine = inject(original)
    for model in (original, engine.module):
        part = model.decoder.block[0].layer[0].SelfAttention
        part.relative_attention_bias.weight.data.neg_()
    entry = _entries(original)["right"]
    with steps() as taken:
        assert torch.equal(*(written(m, {"do_sample": False}, entry) for m in (original, engine)))
    assert taken


def test_graphs_are_refused_with_the_reason() -> None:
    engine = inject(pair("t5").original, enable_cuda_graph=True)
    assert any("enable_cuda_graph has no effect" in note for note in engine.report().notes)

"""Forwards outside `generate` run layers with a recurrence in one call each, and fill transformers' cache."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from slipstream.model.fused import inject as injected
from slipstream.model.fused.state import injected_state, is_injected
from tests.engine.test_recurrent import RECURRENT, two_of
from tests.families.sweep import label
from tests.helpers.models import Pair, inject, prompt

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)
TOLERANCE = 1e-4
"""As in the families' sweep."""
ALONE = [v for v in RECURRENT if v[0].name != "falcon_h1"]
"""Models whose mixers replace attention; Falcon-H1's are beside it, and run their own code."""


@pytest.fixture(scope="module", params=ALONE, ids=label)
def models(request: pytest.FixtureRequest) -> Pair:
    return two_of(request.param)


def beginning(engine: Any) -> list[nn.Module]:
    """Return the layers that may begin sequences in one call."""
    layers = [module for module in engine.module.modules() if is_injected(module)]
    return [layer for layer in layers if injected_state(layer).begins is not None]


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Record of each layer with a recurrence whether it ran in one call."""
    record: list[bool] = []
    begin = injected.begin

    def recorded(*args: Any) -> Any:
        out = begin(*args)
        record.append(out is not None)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(injected, "begin", recorded)
        yield record


def ids_of(models: Pair, rows: int = 2, length: int = 9) -> Tensor:
    return prompt(rows, length)


def near(models: Pair, *answers: Tensor, where: Tensor | None = None) -> None:
    theirs, ours = (t if where is None else t[where] for t in answers)
    size = max(float(theirs.abs().max()), 1.0)
    assert float((theirs - ours).abs().max()) <= TOLERANCE * size


@torch.no_grad()
def logits(model: Any, *args: Any, **options: Any) -> Tensor:
    out: Tensor = model(*args, **options).logits
    return out


def mask_of(first: tuple[int, int]) -> Tensor:
    """Return a mask of two rows, the first of which has the tokens `[begin, end)`."""
    mask = torch.zeros(2, 9, dtype=torch.int64)
    mask[0, slice(*first)], mask[1] = 1, 1
    return mask


def test_a_forward_without_a_cache(models: Pair) -> None:
    ids = ids_of(models)
    with counted() as record:
        ours = logits(models.engine, ids, use_cache=False)
    assert record == [True] * len(beginning(models.engine))
    near(models, logits(models.original, ids, use_cache=False), ours)


@pytest.mark.parametrize("first", [(3, 9), (0, 5)], ids=["left", "right"])
def test_padding(models: Pair, first: tuple[int, int]) -> None:
    ids, mask = ids_of(models), mask_of(first)
    answers = [logits(m, ids, attention_mask=mask, use_cache=False) for m in (models.original, models.engine)]
    near(models, *answers, where=mask.bool())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("first", [(3, 9), (0, 5)], ids=["left", "right"])
def test_rows_that_are_padded_alike(models: Pair, first: tuple[int, int], rows: int) -> None:
    ids = ids_of(models, rows)
    mask = torch.zeros(rows, 9, dtype=torch.int64)
    mask[:, slice(*first)] = 1
    for cache in (False, True):
        answers = [
            logits(m, ids, attention_mask=mask, use_cache=cache) for m in (models.original, models.engine)
        ]
        near(models, *answers, where=mask.bool())


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("first", [(3, 9), (0, 5)], ids=["left", "right"])
def test_a_loss_and_hidden_states_see_padding_as_in_the_original(
    models: Pair, first: tuple[int, int], cache: bool
) -> None:
    ids = ids_of(models)
    given = {"input_ids": ids, "attention_mask": mask_of(first), "use_cache": cache}
    for more in ({"labels": ids}, {"output_hidden_states": True}):
        with torch.no_grad(), counted() as record:
            theirs, ours = models.original(**given, **more), models.engine(**given, **more)
        assert record and not any(record)
        near(models, theirs.logits, ours.logits)
        if theirs.loss is not None:
            torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("value", [0.5, 2, -1])
def test_a_mask_that_weighs_tokens_runs_the_modules_own_code(models: Pair, value: float) -> None:
    ids = ids_of(models)
    mask = torch.full((2, 9), value)
    with counted() as record:
        ours = logits(models.engine, ids, attention_mask=mask, use_cache=False)
    assert record and not any(record)
    near(models, logits(models.original, ids, attention_mask=mask, use_cache=False), ours)


def test_autocast_leaves_no_trace(models: Pair) -> None:
    """How transformers keeps a state is found by the module's own code, which autocast would change."""
    engine = inject(models.original)
    with torch.autocast("cpu", torch.bfloat16), counted() as record:
        logits(engine, ids_of(models), use_cache=True)
    assert record and not any(record)
    answers = []
    for model in (models.original, engine):
        with torch.no_grad():
            first = model(ids_of(models), use_cache=True)
        layers = [layer for layer in _cache(first).layers if hasattr(layer, "conv_states")]
        assert {layer.conv_states[0].dtype for layer in layers} == {torch.float32}
        answers.append(logits(model, ids_of(models, length=3), use_cache=True, **_kept(first)))
    near(models, *answers)


@pytest.mark.parametrize("cache", [False, True])
def test_narrower_embeddings_count_as_the_model_s_own_dtype(models: Pair, cache: bool) -> None:
    x = torch.randn(2, 9, models.original.get_input_embeddings().weight.shape[1]).bfloat16()
    theirs = logits(models.original, inputs_embeds=x.float(), use_cache=cache)
    near(models, theirs, logits(models.engine, inputs_embeds=x, use_cache=cache))


@pytest.mark.parametrize("length", [2, 3, 9, 40])
def test_a_cache_continues_where_it_was_begun(models: Pair, length: int) -> None:
    ids = prompt(2, length + 6)
    answers = []
    with counted() as record:
        for model in (models.original, models.engine):
            with torch.no_grad():
                first = model(ids[:, :length], use_cache=True)
                more = model(ids[:, length : length + 3], **_kept(first), use_cache=True)
                last = model(ids[:, length + 3 : length + 4], **_kept(more), use_cache=True)
            answers.append(torch.cat([first.logits, more.logits, last.logits], dim=1))
    near(models, *answers)
    layers = len(beginning(models.engine))
    assert record[:layers] == [True] * layers
    assert not any(record[layers:])  # what exists is continued by the modules' own code


def test_a_cache_keeps_what_the_original_keeps(models: Pair) -> None:
    ids = ids_of(models)
    with torch.no_grad():
        caches = [_cache(model(ids, use_cache=True)) for model in (models.original, models.engine)]
    for theirs, ours in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("conv_states", "recurrent_states"):
            pair = [getattr(layer, name, {}) for layer in (theirs, ours)]
            assert pair[0].keys() == pair[1].keys()
            for one in pair[0]:
                states = [kept[one] for kept in pair]
                if states[0] is None:
                    assert states[1] is None
                    continue
                assert states[0].dtype == states[1].dtype and states[0].shape == states[1].shape
                near(models, *states)


def _kept(answer: Any) -> dict[str, Any]:
    """Return the cache of an answer, as the argument of the next call."""
    names = ("cache_params", "past_key_values")
    return {name: getattr(answer, name) for name in names if getattr(answer, name, None) is not None}


def _cache(answer: Any) -> Any:
    return next(iter(_kept(answer).values()))


def test_padded_rows_continue(models: Pair) -> None:
    ids, mask = prompt(2, 10), mask_of((3, 9))
    answers = []
    for model in (models.original, models.engine):
        with torch.no_grad():
            first = model(ids[:, :9], attention_mask=mask, use_cache=True)
            longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            last = model(ids[:, 9:], attention_mask=longer, use_cache=True, **_kept(first))
        answers.append(torch.cat([first.logits[:, -1:], last.logits], dim=1))
    near(models, *answers)


def test_rows_that_are_padded_behind_fill_a_cache_by_the_original_s_code(models: Pair) -> None:
    ids, mask = ids_of(models), mask_of((0, 5))
    with counted() as record:
        ours = logits(models.engine, ids, attention_mask=mask, use_cache=True)
    assert not any(record)
    near(models, logits(models.original, ids, attention_mask=mask, use_cache=True), ours, where=mask.bool())


def test_gaps_and_single_tokens_run_the_modules_own_code(models: Pair) -> None:
    ids, mask = ids_of(models), mask_of((0, 9))
    mask[0, 4] = 0
    with counted() as record:
        logits(models.engine, ids, attention_mask=mask, use_cache=False)
        logits(models.engine, ids[:, :1], use_cache=False)
    assert record and not any(record)


def test_hooks_within_a_mixer_see_its_calls(models: Pair) -> None:
    layer = beginning(models.engine)[0]
    state, seen = injected_state(layer), []
    assert state.mixer is not None
    handle = layer.get_submodule(state.mixer.part).register_forward_hook(lambda *_: seen.append(1))
    with counted() as record:
        logits(models.engine, ids_of(models), use_cache=False)
    handle.remove()
    assert len(seen) == 1
    assert sum(record) == len(beginning(models.engine)) - 1


def test_gradients_of_inputs(models: Pair) -> None:
    embeds = models.original.get_input_embeddings()(ids_of(models)).detach()
    grads = []
    for model in (models.original, models.engine.module):
        x = embeds.clone().requires_grad_()
        model(inputs_embeds=x, use_cache=False).logits.square().mean().backward()
        grads.append(x.grad)
    near(models, *grads)  # type: ignore[arg-type]


def test_a_cache_with_other_methods_is_filled_by_the_modules_own_code(models: Pair) -> None:
    from transformers import DynamicCache

    ids, calls = ids_of(models), []
    cache = DynamicCache(config=models.original.config)
    own = cache.update_conv_state
    cache.update_conv_state = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)  # type: ignore
    name = "cache_params" if "mamba" in type(models.original).__name__.lower() else "past_key_values"
    with counted() as record:
        logits(models.engine, ids, **{name: cache}, use_cache=True)
    assert calls and not any(record)


@pytest.mark.parametrize("variant", ALONE, ids=label)
def test_16_bits_are_as_close_as_the_modules_own_code(variant: Any) -> None:
    exact = two_of(variant)
    original = copy.deepcopy(exact.original).bfloat16()
    engine = inject(original, dtype=torch.bfloat16)
    ratios: list[tuple[float, float]] = []
    for seed in range(7):
        ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(seed))
        truth = logits(exact.original, ids, use_cache=False)
        with counted() as record:
            cached = logits(engine, ids, use_cache=True)
        assert all(record)
        some = (logits(original, ids, use_cache=False), logits(engine, ids, use_cache=False), cached)
        theirs, ours, ours_cached = (float((truth - one.float()).square().sum()) for one in some)
        ratios.append((ours / theirs, ours_cached / theirs))
    # Medians, because rounding makes some routers choose other experts, in either.
    assert all(statistics.median(column) <= 1.2 for column in zip(*ratios, strict=True))

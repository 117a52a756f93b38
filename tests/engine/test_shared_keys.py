"""Models whose layers share keys and values, or have inputs of their own, generate on the engine road."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from tests.engine.test_recurrent import SHARING, UNTIED, both, two_of
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.models import Pair, inject, prompt, roads

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


@pytest.fixture(scope="module", params=SHARING, ids=label)
def models(request: pytest.FixtureRequest) -> Pair:
    return two_of(request.param, **UNTIED)


def shared(**options: Any) -> Pair:
    return two_of(next(v for v in SHARING if label(v) == "gemma4_text shared"), **UNTIED, **options)


def test_whole_steps_are_one_call(models: Pair) -> None:
    runner = models.engine._built.runner
    assert runner.whole.begin(runner.new_cache(2, 1).layers, 8) is not None


def test_the_cache_that_is_returned_goes_on_in_transformers(models: Pair) -> None:
    ids = prompt(2)
    options = {"max_new_tokens": 6, "pad_token_id": 0, "return_dict_in_generate": True}
    with roads(models.engine) as counts:
        got = models.engine.generate(input_ids=ids, **options)
    assert counts.taken == "engine"
    expected = models.original.generate(input_ids=ids, **options)
    assert torch.equal(got.sequences, expected.sequences)
    following = [
        models.original(answer.sequences[:, -1:], past_key_values=answer.past_key_values).logits
        for answer in (got, expected)
    ]
    torch.testing.assert_close(*following, atol=1e-4, rtol=1e-4)


def test_int8_weights_and_int8_cache() -> None:
    engine = inject(shared().original, dtype=torch.bfloat16, quant="int8", kv_cache_dtype="int8")
    with roads(engine) as counts:
        tokens = engine.generate(input_ids=prompt(2), max_new_tokens=6, pad_token_id=0)
    assert counts.taken == "engine" and tokens.shape == (2, 15)


def test_each_layer_timed_alone_generates_the_same() -> None:
    models = shared()
    models.engine.profile_model_time()
    both(models, input_ids=prompt(2))
    assert len(models.engine.model_times()) == 12


def test_layers_in_memory_on_lease_generate_the_same() -> None:
    models = shared()
    engine = inject(models.original, zero={"stage": 3, "offload_param": {"device": "cpu"}})
    both(Pair(models.original, engine), input_ids=prompt(2))


@pytest.mark.parametrize(
    "changed",
    ["model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"],
)
def test_values_written_into_what_makes_the_inputs_count(changed: str) -> None:
    models = shared()
    both(models, input_ids=prompt(1))
    for model in (models.original, models.engine.module):
        with torch.no_grad():
            model.get_parameter(changed).mul_(-3.0)
    both(models, input_ids=prompt(1))


def test_a_layer_s_scale_is_read_anew() -> None:
    models = shared()
    both(models, input_ids=prompt(1))
    for model in (models.original, models.engine.module):
        model.model.layers[3].layer_scalar.fill_(-0.7)
    both(models, input_ids=prompt(1))
    for model in (models.original, models.engine.module):
        model.model.layers[1].layer_scalar.data = torch.full((1,), 1.7)
    both(models, road="compatible", input_ids=prompt(1))


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text"])
def test_scales_that_were_rounded_once_stay_rounded(name: str) -> None:
    variant = next(v for v in VARIANTS if v[0].name == name)
    options = {**variant[1].options, "hidden_size": 72, **UNTIED}
    original: Any = peaked_model(replace(variant[1], options=options)).bfloat16().float()
    assert float(original.model.embed_tokens.embed_scale) != 72**0.5
    models = Pair(original, inject(original))
    both(models, input_ids=prompt(2))


def test_another_scale_of_the_second_embedding_ends_the_engine_road() -> None:
    models = shared()
    both(models, input_ids=prompt(1))
    for model in (models.original, models.engine.module):
        model.model.embed_tokens_per_layer.embed_scale.fill_(0.25)
    both(models, road="compatible", input_ids=prompt(1))


def test_code_that_changes_the_inputs_is_found_by_the_check() -> None:
    original = copy.deepcopy(shared().original)
    own = type(original.model)

    class Louder(own):  # type: ignore[misc,valid-type]
        def project_per_layer_inputs(self, *args: Any, **kwargs: Any) -> Tensor:
            louder: Tensor = 2 * super().project_per_layer_inputs(*args, **kwargs)
            return louder

    original.model.__class__ = Louder
    louder = Pair(original, inject(original))
    assert louder.engine._built.runner is None
    both(louder, road="compatible", input_ids=prompt(1))


def test_copies_of_an_engine_have_inputs_of_their_own() -> None:
    models = shared()
    twin = copy.deepcopy(models.engine)
    with torch.no_grad():
        twin.module.model.embed_tokens_per_layer.weight.normal_(std=30.0)
    both(models, input_ids=prompt(1))
    with roads(twin) as counts:
        other = twin.generate(input_ids=prompt(1), max_new_tokens=12, pad_token_id=0)
    assert counts.taken == "engine" and isinstance(twin, slipstream.InferenceEngine)
    assert not torch.equal(
        other, models.engine.generate(input_ids=prompt(1), max_new_tokens=12, pad_token_id=0)
    )

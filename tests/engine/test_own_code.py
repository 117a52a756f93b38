"""Code around the layers that is nobody known runs as it is; parameters that are given later count."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

import slipstream
from slipstream.model.frame.authors import own_code
from tests.helpers.models import Pair, close, inject, make, pair, prompt, roads

TOKEN = 57
"""In none of the runs that prove a frame: its own code is what these classes are about."""


class Soft(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if input_ids is not None:
            rows = self.get_input_embeddings()(input_ids)
            inputs_embeds = torch.where((input_ids == TOKEN)[..., None], 0.3, rows)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class Shifted(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        made: Any = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**made, "input_ids": (made["input_ids"] + 1) % 90}


class Table(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return torch.where((input == TOKEN)[..., None], 0.3, super().forward(input))


class Norm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        found: Tensor = super().forward(hidden_states)
        return found if hidden_states.shape[-2] > 1 else -found


class Blank(BertEmbeddings):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Tensor:
        found: Tensor = super().forward(input_ids=input_ids, **kwargs)
        return found if input_ids is None else torch.where((input_ids == TOKEN)[..., None], 0.0, found)


CLASSES: dict[str, tuple[str, type[nn.Module]]] = {
    "the model": ("", Soft),
    "what generate asks for": ("", Shifted),
    "the embedding": ("model.embed_tokens", Table),
    "the last norm": ("model.norm", Norm),
}


class LongScaling(LlamaAttention):
    """Scales attention by the logarithm of the length, beyond what it was trained on."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        length, scaling = hidden_states.shape[1], self.scaling
        if length > 128:
            self.scaling = 1.5 * scaling * math.log(length, 128)
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self.scaling = scaling


@pytest.mark.parametrize("check", ["error", "fallback"])
def test_layers_of_custom_code_are_checked_on_a_long_prompt(check: str) -> None:
    model = make("llama", max_position_embeddings=256)
    for layer in model.model.layers:
        layer.self_attn.__class__ = LongScaling
    if check == "error":
        with pytest.raises(slipstream.InjectionError, match="is off by"):
            inject(model, injection_check=check)
        return
    original, engine = copy.deepcopy(model), inject(model, injection_check=check)
    ids = prompt(length=200)
    close(original(ids).logits, engine(ids).logits)


def test_a_long_prompt_is_run_for_custom_code_alone() -> None:
    lengths = {}
    for name in ("known", "custom"):
        model, seen = make("llama", max_position_embeddings=256), list[int]()
        if name == "custom":
            model.model.layers[1].mlp.__class__ = type(
                "Own", (LlamaMLP,), {"forward": lambda s, x: LlamaMLP.forward(s, x)}
            )
        handle = model.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        inject(model)
        handle.remove()
        lengths[name] = max(seen)
    assert lengths["known"] < 16 < lengths["custom"]


def ids_of() -> Tensor:
    ids = prompt(vocabulary=90)
    ids[:, 2] = TOKEN
    return ids


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_a_class_of_ones_own_runs_its_code(name: str, options: dict[str, Any]) -> None:
    place, kind = CLASSES[name]
    models = []
    for _ in range(2):
        model = make("llama")
        model.get_submodule(place).__class__ = kind  # type: ignore[assignment]
        models.append(model)
    original, engine = models[0], inject(models[1])
    ids = ids_of()
    assert "has a custom" in (engine.why_compatible() or "")
    assert any("has a custom" in note for note in engine.report().notes)
    close(original(input_ids=ids).logits.detach(), engine(input_ids=ids).logits)
    expected = original.generate(input_ids=ids, max_new_tokens=6, do_sample=False, **options)
    assert torch.equal(expected, engine.generate(input_ids=ids, max_new_tokens=6, do_sample=False, **options))


@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_a_method_of_generate_that_is_set_on_the_model_counts(later: bool) -> None:
    original, other = make("llama"), make("llama")

    def patch(model: Any) -> None:
        model.prepare_inputs_for_generation = types.MethodType(_shifted, model)

    patch(original)
    engine = None if later else (patch(other) or inject(other))  # type: ignore[func-returns-value]
    if engine is None:
        engine = inject(other)
        patch(engine.module)
    ids = ids_of()
    with roads(engine) as counts:
        got = engine.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert counts.taken == "compatible"
    assert torch.equal(original.generate(input_ids=ids, max_new_tokens=6, do_sample=False), got)


def _shifted(self: Any, input_ids: Any, **kwargs: Any) -> Any:
    made = LlamaForCausalLM.prepare_inputs_for_generation(self, input_ids, **kwargs)
    return {**made, "input_ids": (made["input_ids"] + 1) % 90}


def test_an_encoder_whose_embeddings_are_ones_own_does_not_answer_at_once() -> None:
    original, other = make("bert", "BertModel"), make("bert", "BertModel")
    for model in (original, other):
        model.embeddings.__class__ = Blank  # type: ignore[assignment]
    engine, ids = inject(other), ids_of()
    close(original(input_ids=ids)[0].detach(), engine(input_ids=ids)[0])


def test_a_subclass_that_writes_nothing_anew_is_known() -> None:
    class Named(LlamaForCausalLM):
        def of_mine(self) -> int:
            return 1

    model = make("llama")
    model.__class__ = Named  # type: ignore[assignment]
    assert own_code(model, ()) is None
    assert inject(model).why_compatible() is None


BIASES = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]


@pytest.mark.parametrize("path", BIASES)
def test_a_bias_that_is_given_later_counts(path: str) -> None:
    models = pair("llama")
    for model in (models.original, models.engine.module):
        linear: Any = model.model.layers[0].get_submodule(path)  # type: ignore[union-attr,index]
        linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features), requires_grad=False)
    ids = prompt()
    close(models.original(input_ids=ids).logits.detach(), models.engine(input_ids=ids).logits)
    expected = models.original.generate(input_ids=ids, max_new_tokens=5)
    assert torch.equal(expected, models.engine.generate(input_ids=ids, max_new_tokens=5))


def _move(model: Any) -> None:
    model.embeddings.position_ids = model.embeddings.position_ids + 3


def _types(model: Any) -> None:
    model.embeddings.token_type_ids.fill_(1)


def _shrink(model: Any) -> None:
    model.embeddings.word_embeddings.max_norm = 0.01


@pytest.mark.parametrize("edit", [_move, _types, _shrink])
def test_buffers_and_tables_of_an_encoder_count(edit: Callable[[Any], None]) -> None:
    models = pair("bert", "BertModel")
    ids = prompt()
    before = models.original(input_ids=ids)[0].detach()
    for model in (models.original, models.engine.module):
        edit(model)
    expected = models.original(input_ids=ids)[0].detach()
    assert not torch.allclose(before, expected, atol=1e-3)
    close(expected, models.engine(input_ids=ids)[0])


def test_an_embedding_whose_rows_are_scaled_later_counts() -> None:
    models = pair("llama")
    for model in (models.original, models.engine.module):
        model.model.embed_tokens.max_norm = 0.01  # type: ignore[union-attr]
    with roads(models.engine) as counts:
        got = models.engine.generate(input_ids=prompt(), max_new_tokens=5)
    assert counts.taken == "compatible"
    assert torch.equal(models.original.generate(input_ids=prompt(), max_new_tokens=5), got)


class Headless(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, **kwargs).logits


def _two_matrices(model: Any) -> None:
    model.lm_head = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 100)).eval()


def _no_head(model: Any) -> None:
    model.lm_head = nn.Identity()


def _tensors(model: Any) -> None:
    model.__class__ = Headless


@pytest.mark.parametrize("edit", [_two_matrices, _no_head, _tensors])
def test_models_whose_ends_no_frame_names_run_their_own(edit: Callable[[Any], None]) -> None:
    torch.manual_seed(1)
    original = make("llama")
    edit(original)
    other = make("llama")
    edit(other)
    other.load_state_dict(original.state_dict())
    engine = inject(other)
    expected, got = original(input_ids=prompt()), engine(input_ids=prompt())
    assert engine.report().notes and type(expected) is type(got)
    close(getattr(expected, "logits", expected).detach(), getattr(got, "logits", got))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an operation in place": lambda linear: linear.weight.mul_(-1),
    "its data": lambda linear: linear.weight.data.mul_(-1),
    "other data": lambda linear: setattr(linear.weight, "data", torch.ones(linear.weight.shape)),
    "an item": lambda linear: linear.weight.__setitem__(0, 1.0),
    "torch's initialisation": lambda linear: nn.init.zeros_(linear.weight),
}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own code"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_packed_matrix_unpacks_to_refuses_to_be_written_to(change: str, fused: bool) -> None:
    engine = inject(make("llama"), quant="int8", replace_with_kernel_inject=fused)
    places = ["lm_head"] if fused else ["lm_head", "model.layers.0.mlp.down_proj"]
    for place in places:
        linear = engine.module.get_submodule(place)
        before = linear.weight.clone()
        with torch.no_grad(), pytest.raises(slipstream.UnsupportedError, match="before init_inference"):
            CHANGES[change](linear)
        assert torch.equal(linear.weight, before) and type(linear.weight + 0) is Tensor


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own code"])
@pytest.mark.parametrize("place", ["lm_head", "model.layers.0.mlp.down_proj"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "taken away"])
def test_a_bias_of_a_packed_linear_counts(given: bool, place: str, fused: bool) -> None:
    options = {"mlp_bias": not given}
    engine = inject(make("llama", **options), quant="int8", replace_with_kernel_inject=fused)
    original = make("llama", **options)
    original.load_state_dict(engine.state_dict())
    models = Pair(original, engine)
    for model in (models.original, models.engine.module):
        linear: Any = model.get_submodule(place)
        values = torch.linspace(-1, 1, linear.out_features)
        linear.bias = nn.Parameter(values, requires_grad=False) if given else None
    ids = prompt()
    close(models.original(input_ids=ids).logits.detach(), models.engine(input_ids=ids).logits)
    expected = models.original.generate(input_ids=ids, max_new_tokens=5)
    assert torch.equal(expected, models.engine.generate(input_ids=ids, max_new_tokens=5))


@pytest.mark.parametrize("training", [True, False])
def test_packed_linears_refuse_to_be_trained(training: bool) -> None:
    engine = inject(make("llama"), quant="int8", replace_with_kernel_inject=False)
    engine.module.requires_grad_(True).train(training)
    with pytest.raises(slipstream.UnsupportedError, match="is packed and cannot have a gradient"):
        engine.module(input_ids=prompt(), labels=prompt())

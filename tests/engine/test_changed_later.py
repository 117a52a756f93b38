"""What is done to the model after its layers were fused counts: hooks, replaced parts, other embeddings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import slipstream
from slipstream.families import FAMILIES
from tests.architectures.tiny import tiny_model
from tests.families.sweep import peaked_model
from tests.helpers.models import Pair, close, inject, make, pair, prompt, roads


@pytest.fixture
def models() -> Pair:
    return pair("llama")


def agree(models: Pair, road: str) -> None:
    close(models.original(input_ids=prompt()).logits.detach(), models.engine(input_ids=prompt()).logits)
    expected = models.original.generate(input_ids=prompt(), max_new_tokens=5)
    with roads(models.engine) as counts:
        got = models.engine.generate(input_ids=prompt(), max_new_tokens=5)
    assert counts.taken == road
    close(expected, got)


LAYERS = ("LlamaDecoderLayer", "GPT2Block")

PLACES = [
    "model.layers.1",
    "model.layers.1.mlp",
    "model.layers.0.self_attn.o_proj",
    "model.embed_tokens",
    "model.norm",
    "lm_head",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_changes_an_output_counts(models: Pair, place: str) -> None:
    def louder(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 1.5

    handles = [
        m.get_submodule(place).register_forward_hook(louder) for m in (models.original, models.engine.module)
    ]
    agree(models, "compatible")
    for handle in handles:
        handle.remove()
    agree(models, "engine")


def _louder(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (output[0] * 1.5, *output[1:])
    return output * 1.5


def _louder_in_place(module: nn.Module, args: Any, output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output).mul_(1.5)


def _louder_before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return ((args[0] * 1.5, *args[1:]), kwargs)


STEERED: dict[str, Callable[[nn.Module], Any]] = {
    "after": lambda layer: layer.register_forward_hook(_louder),
    "after, in place": lambda layer: layer.register_forward_hook(_louder_in_place),
    "after, before others": lambda layer: layer.register_forward_hook(_louder, prepend=True),
    "before": lambda layer: layer.register_forward_pre_hook(_louder_before, with_kwargs=True),
}


@pytest.mark.parametrize("steer", STEERED)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("early", [True, False], ids=["before init_inference", "after it"])
def test_a_hook_that_steers_layers_acts_whenever_it_was_registered(
    kind: str, steer: str, early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The check leaves hooks on a layer out: whoever calls the layer runs them about its block as well."""
    models, plain = Pair(make(kind), None), make(kind)
    handles = []

    def hook(model: nn.Module) -> None:
        layers = [layer for layer in model.modules() if type(layer).__name__ in LAYERS]
        assert len(layers) == 2
        handles.extend(STEERED[steer](layer) for layer in layers)

    hook(models.original)
    with torch.no_grad():
        expected = models.original(input_ids=prompt()).logits
        assert not torch.allclose(plain(input_ids=prompt()).logits, expected, atol=0.1)
    model = make(kind)
    if early:
        hook(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine.report().level == "block" and "off by" not in caplog.text
    if not early:
        hook(engine.module)
    models.engine = engine
    agree(models, "compatible")
    for handle in handles:
        handle.remove()
    agree(models, "engine")


def test_a_check_leaves_the_hooks_on_layers() -> None:
    model, heard = make("llama"), list[str]()
    for name, layer in model.model.layers.named_children():
        layer.register_forward_hook(lambda *_, name=name: heard.append(name))
        layer.register_forward_pre_hook(lambda *_, name=name: heard.append(f"before {name}"))
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    heard.clear()
    engine(input_ids=prompt())
    assert heard == ["before 0", "0", "before 1", "1"]


def test_a_hook_before_a_part_counts(models: Pair) -> None:
    for model in (models.original, models.engine.module):
        model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    agree(models, "compatible")


def test_transformers_own_hooks_do_not(models: Pair) -> None:
    for model in (models.original, models.engine):
        model(input_ids=prompt(), output_hidden_states=True, output_attentions=True)
    agree(models, "engine")


class Adapted(nn.Module):
    """A linear with a low-rank addition, as adapters put in a linear's place."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = linear
        self.low = nn.Parameter(torch.randn(2, linear.in_features, generator=generator))
        self.high = nn.Parameter(torch.randn(linear.out_features, 2, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.low.T @ self.high.T


@pytest.mark.parametrize(
    "place", ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj", "lm_head"]
)
def test_an_adapter_put_in_later_counts(models: Pair, place: str) -> None:
    parent, _, leaf = place.rpartition(".")
    for model in (models.original, models.engine.module):
        owner = model.get_submodule(parent)
        setattr(owner, leaf, Adapted(getattr(owner, leaf)))
    agree(models, "compatible")


def test_other_embeddings_count(models: Pair) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(100, 32, generator=generator)
    for model in (models.original, models.engine):
        model.set_input_embeddings(nn.Embedding.from_pretrained(table.clone()))
    agree(models, "compatible")


def test_a_larger_vocabulary_counts(models: Pair) -> None:
    for model in (models.original, models.engine):
        torch.manual_seed(0)
        model.resize_token_embeddings(110)
    assert models.engine(input_ids=torch.full((1, 3), 105)).logits.shape == (1, 3, 110)
    agree(models, "compatible")


def test_a_replaced_layer_counts(models: Pair) -> None:
    other = make("llama", seed=8).model.layers[1]
    for model in (models.original, models.engine.module):
        model.model.layers[1] = copy.deepcopy(other)
    agree(models, "compatible")


def _renumber(model: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)


def _prune(model: Any) -> None:
    model.model.layers = nn.ModuleList([layer for i, layer in enumerate(model.model.layers) if i != 1])
    _renumber(model)


def _scale_up(model: Any) -> None:
    """By copies of the upper layers on top, as SOLAR does."""
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([*layers[:3], *map(copy.deepcopy, layers[1:])])
    _renumber(model)


def _turn_round(model: Any) -> None:
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    _renumber(model)


def _take_away(model: Any) -> None:
    del model.model.layers[1]
    _renumber(model)


def _append(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    _renumber(model)


@pytest.mark.parametrize("surgery", [_prune, _scale_up, _turn_round, _take_away, _append])
def test_layers_in_other_places_count(surgery: Callable[[Any], None]) -> None:
    models = pair("llama", num_hidden_layers=4)
    for model in (models.original, models.engine.module):
        surgery(model)
    agree(models, "compatible")
    for options in ({"num_beams": 2}, {"cache_implementation": "static"}):
        found = [m.generate(prompt(), max_new_tokens=4, **options) for m in (models.original, models.engine)]
        close(*found)


def test_a_place_in_the_cache_that_is_changed_back_is_the_blocks_again(models: Pair) -> None:
    attentions = [layer.self_attn for layer in models.engine.module.model.layers]
    for attention in attentions:
        attention.layer_idx = 1 - attention.layer_idx
    agree(models, "compatible")
    for attention in attentions:
        attention.layer_idx = 1 - attention.layer_idx
    agree(models, "engine")


def _halved(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    heard, maps = sdpa_attention_forward(*args, **kwargs)
    return heard * 0.5, maps


@pytest.fixture
def own_attention() -> Iterator[str]:
    AttentionInterface.register("halved", _halved)
    AttentionMaskInterface.register("halved", sdpa_mask)
    yield "halved"
    for interface in (AttentionInterface, AttentionMaskInterface):
        del interface._global_mapping["halved"]


def test_an_attention_function_that_is_set_later_counts(models: Pair, own_attention: str) -> None:
    for name, road in ((own_attention, "compatible"), ("eager", "engine"), ("sdpa", "engine")):
        for model in (models.original, models.engine):
            model.set_attn_implementation(name)
        agree(models, road)


def test_in_an_encoder_that_answers_at_once_too(own_attention: str) -> None:
    two = pair("bert", "BertModel")
    for name in (own_attention, "sdpa"):
        for model in (two.original, two.engine):
            model.set_attn_implementation(name)
        expected = two.original(input_ids=prompt()).last_hidden_state.detach()
        close(expected, two.engine(input_ids=prompt()).last_hidden_state)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a norm": lambda model: model.model.norm.weight.data.mul_(1.5),
    "the head": lambda model: model.lm_head.weight.data.mul_(-1.0),
    "a layer's matrix": lambda model: model.model.layers[1].mlp.up_proj.weight.data.mul_(-1.0),
    "a layer's norm": lambda model: model.model.layers[0].input_layernorm.weight.data.mul_(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_changed_in_place_count(models: Pair, name: str) -> None:
    for model in (models.original, models.engine.module):
        CHANGES[name](model)
    agree(models, "engine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_multiplier_of_the_embedding_counts(dtype: torch.dtype) -> None:
    original = peaked_model(FAMILIES["gemma3_text"].tiny[0])
    engine, ids = inject(original, dtype=dtype), prompt(vocabulary=40)
    tokens = []
    for factor, road in ((1.0, "engine"), (0.1, "compatible")):
        for model in (original, engine.module):
            model.model.embed_tokens.embed_scale.mul_(factor)
        with roads(engine) as counts:
            tokens.append(engine.generate(input_ids=ids, max_new_tokens=5))
        assert counts.taken == road
        if dtype == torch.float32:
            close(original.generate(input_ids=ids, max_new_tokens=5), tokens[-1])
    assert not torch.equal(*tokens)


def test_training_mode_takes_the_original_code(models: Pair) -> None:
    models.engine.train()
    agree(models, "compatible")
    models.engine.eval()
    agree(models, "engine")


@contextmanager
def everywhere(hook: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    register = register_module_forward_pre_hook if before else register_module_forward_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def test_a_hook_on_all_modules_counts(models: Pair) -> None:
    def louder(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.5 if isinstance(module, nn.Linear) else None

    with everywhere(louder):
        agree(models, "compatible")
    with everywhere(
        lambda module, args: (args[0] * 0.5,) if isinstance(module, nn.Linear) else None, before=True
    ):
        agree(models, "compatible")
    agree(models, "engine")


def louder(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose answer is larger, in the form it had."""

    def patched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return output * 1.5
        if isinstance(output, tuple):
            return (output[0] * 1.5, *output[1:])
        output["last_hidden_state"] = output["last_hidden_state"] * 1.5
        return output

    return patched


@pytest.mark.parametrize("place", [*PLACES, "model.rotary_emb", "model"])
def test_a_forward_set_on_an_object_counts(models: Pair, place: str) -> None:
    parts: list[Any] = [model.get_submodule(place) for model in (models.original, models.engine.module)]
    for part in parts:
        part.forward = louder(part.forward)
    agree(models, "compatible")
    for part in parts:
        del part.forward
    agree(models, "engine")


@pytest.mark.parametrize("place", ["model.layers.0", "model.layers.0.self_attn"])
def test_a_forward_set_on_a_class_counts(models: Pair, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(models.original.get_submodule(place))
    monkeypatch.setattr(kind, "forward", functools.wraps(kind.forward)(louder(kind.forward)))
    agree(models, "compatible")


@pytest.mark.parametrize("name", ["self_attn.v_proj.weight", "post_attention_layernorm.weight"])
@pytest.mark.parametrize("way", ["data", "parameter"])
def test_a_tensor_put_in_anothers_place_counts(models: Pair, name: str, way: str) -> None:
    for model in (models.original, models.engine.module):
        path, _, leaf = name.rpartition(".")
        owner = model.model.layers[1].get_submodule(path)
        larger = owner.get_parameter(leaf).detach() * 1.5
        if way == "data":
            owner.get_parameter(leaf).data = larger
        else:
            setattr(owner, leaf, nn.Parameter(larger))
    agree(models, "compatible")
    for changed in (copy.deepcopy(models.engine), models.engine.double().float()):
        agree(Pair(models.original, changed), "compatible")


@pytest.mark.parametrize("moved", [False, True])
def test_biases_changed_in_place_count(moved: bool) -> None:
    models = pair("llama", attention_bias=True)
    if moved:
        models.engine.double().float()
    for model in (models.original, models.engine.module):
        layer = model.model.layers[0]
        layer.self_attn.k_proj.bias.data.mul_(-3.0)
        layer.input_layernorm.weight.data.mul_(1.5)
    agree(models, "engine")


CHANGES_OF_RELEASED: dict[str, Callable[[nn.Parameter], Any]] = {
    "an operation in place": lambda parameter: parameter.mul_(2.0),
    "its data": lambda parameter: parameter.data.mul_(2.0),
    "other data": lambda parameter: setattr(parameter, "data", torch.zeros(parameter.shape)),
    "an item": lambda parameter: parameter.__setitem__(0, 1.0),
    "a copy": lambda parameter: parameter.copy_(torch.zeros(parameter.shape)),
}


@pytest.mark.parametrize("change", CHANGES_OF_RELEASED)
@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_what_the_block_holds_in_another_layout_refuses_to_be_written_to(change: str, leaf: str) -> None:
    models = pair("bloom")
    parameter = models.engine.transformer.h[0].self_attention.query_key_value.get_parameter(leaf)
    with torch.no_grad(), pytest.raises(slipstream.UnsupportedError, match=r"before init_inference"):
        CHANGES_OF_RELEASED[change](parameter)
    agree(models, "engine")


def test_an_adapter_around_what_the_block_holds_in_another_layout_counts() -> None:
    models = pair("bloom")
    for model in (models.original, models.engine.module):
        owner = model.transformer.h[0].self_attention
        owner.query_key_value = Adapted(owner.query_key_value)
    agree(models, "compatible")
    close(models.original.state_dict(), models.engine.state_dict())
    agree(Pair(models.original, copy.deepcopy(models.engine)), "compatible")


WINDOWED = {"sliding_window": 4}
NUMBERS: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {
    "a norm's": ("llama", {}, lambda m: setattr(m.model.norm, "variance_epsilon", 0.5)),
    "a layer's norm's": ("llama", {}, lambda m: setattr(_last(m).input_layernorm, "variance_epsilon", 0.5)),
    "a layer's": ("granite", {}, lambda m: setattr(_last(m), "residual_multiplier", 0.5)),
    "an attention's": ("llama", {}, lambda m: setattr(_last(m).self_attn, "scaling", 0.5)),
    "an embedding's": ("granite", {}, lambda m: setattr(m.model, "embedding_multiplier", 2.5)),
    "the logits'": ("cohere", {}, lambda m: setattr(m, "logit_scale", 0.3)),
    "the config's": ("granite", {}, lambda m: setattr(m.config, "logits_scaling", 2.5)),
    "experts": ("mixtral", {}, lambda m: setattr(_last(m).mlp.gate, "top_k", 1)),
    "no window": ("mistral", WINDOWED, lambda m: setattr(m.config, "sliding_window", None)),
    "a wider window": ("mistral", WINDOWED, lambda m: setattr(m.config, "sliding_window", 6)),
    "a narrower window": ("mistral", WINDOWED, lambda m: setattr(m.config, "sliding_window", 3)),
}


def _last(model: Any) -> Any:
    return model.model.layers[-1]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_set_later_count(name: str) -> None:
    kind, options, change = NUMBERS[name]
    original = tiny_model(kind, "causal") if kind in ("granite", "cohere") else make(kind, **options)
    models = Pair(original, inject(original))
    ids = prompt(vocabulary=90)
    before = original(input_ids=ids).logits.detach()
    for model in (original, models.engine.module):
        change(model)
    expected = original(input_ids=ids).logits.detach()
    assert not torch.allclose(before, expected, atol=1e-3)
    close(expected, models.engine(input_ids=ids).logits)
    with roads(models.engine) as counts:
        got = models.engine.generate(input_ids=ids, max_new_tokens=6)
    assert counts.taken == "compatible"
    close(original.generate(input_ids=ids, max_new_tokens=6), got)


def test_a_number_of_an_encoder_counts() -> None:
    models = pair("bert", "BertModel")
    for model in (models.original, models.engine.module):
        model.encoder.layer[1].output.LayerNorm.eps = 0.5
    close(models.original(input_ids=prompt())[0].detach(), models.engine(input_ids=prompt())[0])

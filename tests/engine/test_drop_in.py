"""The engine stands where the model stood: pipelines, attributes, moves, copies, checkpoints, optimizers."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import slipstream
from slipstream.model.fused.state import injected_state, is_injected
from tests.helpers.models import Pair, close, inject, left_padded, make, pair, prompt, roads
from tests.helpers.tokens import letter_tokenizer


@pytest.fixture(scope="module")
def llama() -> Pair:
    return pair("llama")


GREEDY = {"max_new_tokens": 8, "do_sample": False}
TASKS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "text-generation": ("llama", "LlamaForCausalLM", "hello w", GREEDY),
    "text-generation, batch": ("llama", "LlamaForCausalLM", ["hello w", "a b"], {**GREEDY, "batch_size": 2}),
    "text-generation, gpt2": ("gpt2", "GPT2LMHeadModel", "hello w", {**GREEDY, "num_beams": 2}),
    "fill-mask": ("bert", "BertForMaskedLM", "hel<mask>o", {"top_k": 3}),
    "text-classification": ("bert", "BertForSequenceClassification", ["good", "not so"], {"batch_size": 2}),
    "text-classification, llama": ("llama", "LlamaForSequenceClassification", "good", {}),
    "token-classification": ("bert", "BertForTokenClassification", "some names", {}),
    "question-answering": (
        "bert", "BertForQuestionAnswering", {"question": "who?", "context": "nobody at all"}, {},
    ),
    "feature-extraction": ("bert", "BertModel", "hello", {}),
    "feature-extraction, llama": ("llama", "LlamaModel", "hello", {}),
}  # fmt: skip


def rounded(value: Any) -> Any:
    """The same nest with floats rounded, so that it compares."""
    if isinstance(value, float | np.floating):
        return round(float(value), 3) + 0.0
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def is_near(a: Any, b: Any) -> bool:
    """Whether two nests are the same but for a last digit, which may be rounded either way."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1.5e-3
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_near(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(is_near(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("way", ["pipeline(model=engine)", "pipe.model = engine"])
@pytest.mark.parametrize("name", TASKS)
def test_pipelines_take_the_engine(name: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, model_class, text, options = TASKS[name]
    task = name.partition(",")[0]
    if task not in transformers.pipelines.get_supported_tasks():
        pytest.skip(f"this transformers has no {task}")
    original = make(kind, model_class, gain=1.0)
    tokenizer = letter_tokenizer(frame=kind == "bert")
    expected_pipe = transformers.pipeline(task, model=original, tokenizer=tokenizer, device="cpu")
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.ERROR, logger="transformers"):
            engine = inject(original)
            assert engine.report().level == "block"
            if way == "pipe.model = engine":
                pipe = transformers.pipeline(
                    task, model=copy.deepcopy(original), tokenizer=tokenizer, device="cpu"
                )
                pipe.model = engine
            else:
                pipe = transformers.pipeline(task, model=engine, tokenizer=tokenizer, device="cpu")
            with roads(engine) as counts:
                got = pipe(text, **options)
    finally:
        transformers.utils.logging.disable_propagation()
    assert not caplog.records, caplog.text
    assert counts.taken == ("engine" if task == "text-generation" else "compatible")
    assert is_near(rounded(got), rounded(expected_pipe(text, **options)))


def test_attributes_are_the_models(llama: Pair) -> None:
    engine, model = llama.engine, llama.engine.module
    assert engine.device == model.device == torch.device("cpu")
    assert engine.dtype == torch.float32
    assert engine.generation_config is model.generation_config
    assert engine.get_input_embeddings() is model.get_input_embeddings()
    assert engine.main_input_name == "input_ids" and engine.can_generate()
    assert engine.name_or_path == model.name_or_path
    assert engine.config is model.config
    assert engine.lm_head is model.lm_head and engine.model is model.model
    assert engine.num_parameters() == llama.original.num_parameters()
    assert hasattr(engine, "prepare_inputs_for_generation") and not hasattr(engine, "no_such_attribute")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = engine.no_such_attribute


def test_setting_an_attribute_of_the_model_reaches_it(llama: Pair) -> None:
    engine = copy.deepcopy(llama.engine)
    engine.generation_config = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=2, pad_token_id=0)
    assert engine.module.generation_config.max_new_tokens == 2
    assert engine.generate(input_ids=prompt(1)).shape[1] == 11
    engine.of_my_own = 3
    assert engine.of_my_own == 3 and not hasattr(engine.module, "of_my_own")


def test_the_engine_is_an_engine_under_the_models_name(llama: Pair) -> None:
    assert isinstance(llama.engine, slipstream.InferenceEngine) and isinstance(llama.engine, nn.Module)
    assert type(llama.engine).__name__ == "LlamaForCausalLM"
    text = repr(llama.engine)
    assert text.startswith("InferenceEngine(") and "LlamaDecoderLayer" in text


def test_the_module_that_went_in_is_the_one_inside() -> None:
    model = make("llama")
    layers = list(model.model.layers)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine.module is model and all(a is b for a, b in zip(layers, model.model.layers, strict=True))


def test_injected_layers_are_instances_of_their_class(llama: Pair) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    for layer in llama.engine.module.model.layers:
        assert is_injected(layer) and isinstance(layer, LlamaDecoderLayer)
        assert type(layer).__name__ == "LlamaDecoderLayer"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bloom", "mixtral"])
def test_the_state_dict_has_the_original_names_and_values(kind: str) -> None:
    models = pair(kind)
    expected = models.original.state_dict()
    for state in (models.engine.state_dict(), models.engine.module.state_dict()):
        assert list(state) == list(expected)
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bloom"])
def test_a_saved_checkpoint_loads_as_the_original(kind: str, tmp_path: Path) -> None:
    models = pair(kind)
    models.engine.save_checkpoint(tmp_path)
    again = type(models.original).from_pretrained(tmp_path)
    state, expected = again.state_dict(), models.original.state_dict()
    assert list(state) == list(expected) and all(
        torch.equal(state[name], expected[name]) for name in expected
    )
    opened = slipstream.init_inference(str(tmp_path), dtype=torch.float32, replace_with_kernel_inject=True)
    close(models.original(input_ids=prompt()).logits.detach(), opened(input_ids=prompt()).logits)


def test_save_pretrained_of_the_engine_works_too(llama: Pair, tmp_path: Path) -> None:
    llama.engine.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    close(llama.original(input_ids=prompt()).logits.detach(), again(input_ids=prompt()).logits.detach())


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_a_state_dict_survives_torch_save(kind: str, tmp_path: Path) -> None:
    models = pair(kind)
    torch.save(models.engine.state_dict(), tmp_path / "model.pt")
    fresh = make(kind, seed=9)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    close(models.original(input_ids=prompt()).logits.detach(), fresh(input_ids=prompt()).logits.detach())


def test_loading_into_fused_layers_is_refused_with_a_way_out(llama: Pair) -> None:
    for target in (llama.engine, llama.engine.module):
        with pytest.raises(slipstream.UnsupportedError, match="before init_inference"):
            target.load_state_dict(llama.original.state_dict())
    with pytest.raises(slipstream.WeightError, match="there is no such checkpoint"):
        llama.engine.load_checkpoint("somewhere")


@pytest.mark.parametrize("settings", [{}, {"quant": "int8"}], ids=["plain", "int8"])
def test_a_state_dict_can_be_loaded_where_nothing_is_fused(settings: dict[str, Any]) -> None:
    engine = inject(make("llama"), replace_with_kernel_inject=False, **settings)
    other = make("llama", seed=5)
    if settings:
        with pytest.raises(slipstream.UnsupportedError, match="before init_inference"):
            engine.load_state_dict(other.state_dict())
        return
    engine.load_state_dict(other.state_dict())
    close(other(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    assert engine.load_state_dict({}, strict=False).missing_keys == list(other.state_dict())


def test_pickling_is_refused_with_a_way_out(llama: Pair, tmp_path: Path) -> None:
    for what in (llama.engine, llama.engine.module):
        with pytest.raises(slipstream.UnsupportedError, match="save_checkpoint"):
            torch.save(what, tmp_path / "model.pt")


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_packed_modules_refuse_to_be_pickled_and_are_copied(injected: bool) -> None:
    engine = inject(
        make("llama"), quant={"head": "int4", "embedding": "int4"}, replace_with_kernel_inject=injected
    )
    for what in (engine.module, engine.module.lm_head, engine.module.model.embed_tokens):
        with pytest.raises(slipstream.UnsupportedError, match=r"state_dict\(\).* save_checkpoint"):
            pickle.dumps(what)
    head, rows = engine.module.lm_head, torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    for twin in (copy.copy(head), copy.deepcopy(head)):
        assert type(twin) is type(head) and torch.equal(twin(rows), head(rows))


def test_a_head_can_still_be_loaded(llama: Pair) -> None:
    engine = copy.deepcopy(llama.engine)
    engine.module.lm_head.load_state_dict({"weight": torch.zeros_like(engine.lm_head.weight)})
    assert float(engine(input_ids=prompt()).logits.abs().max()) == 0.0
    ids = engine.generate(input_ids=prompt(1), max_new_tokens=2, min_new_tokens=2)
    assert ids[0, -1] == 0, "the engine road kept a head of its own"


def test_eval_and_train(llama: Pair) -> None:
    engine = copy.deepcopy(llama.engine)
    assert engine.eval() is engine and not engine.training
    engine.train()  # the layers then run their original code, dropout and all
    close(llama.original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    engine.eval()
    close(llama.original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mixtral"])
@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "to", "to dtype of device"])
def test_a_cast_takes_the_fused_layers_along(kind: str, how: str) -> None:
    if how == "double" and kind in ("bloom", "mixtral"):
        pytest.skip("transformers' own model does not run in double precision")
    models = pair(kind)
    engine, original = models.engine, models.original
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}.get(
        how, torch.bfloat16
    )
    for model in (engine, original):
        if how in ("half", "bfloat16", "double"):
            assert getattr(model, how)() is model
        elif how == "to":
            assert model.to(dtype) is model
        else:
            model.to(device="cpu", dtype=dtype)
    assert engine.dtype == dtype
    ids, mask = left_padded()
    expected = original(input_ids=ids, attention_mask=mask).logits.detach()
    got = engine(input_ids=ids, attention_mask=mask).logits
    assert got.dtype == dtype
    scale = float(expected[mask.bool()].float().abs().max())
    tolerance = {torch.float16: 0.02, torch.bfloat16: 0.15, torch.float64: 1e-6}[dtype]
    error = (got.float() - expected.float())[mask.bool()].abs().mean()
    assert float(error) < tolerance * scale / 4
    with roads(engine) as counts:
        tokens = engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4)
    assert counts.taken == "engine"
    if dtype == torch.float64:
        assert torch.equal(tokens, original.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4))
    state = engine.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in original.state_dict().items())


def test_a_move_to_where_it_is_changes_nothing(llama: Pair) -> None:
    before = llama.engine(input_ids=prompt()).logits
    assert llama.engine.to("cpu") is llama.engine and llama.engine.cpu() is llama.engine
    close(before, llama.engine(input_ids=prompt()).logits, atol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_a_deep_copy_is_an_engine_of_its_own(kind: str) -> None:
    models = pair(kind)
    twin = copy.deepcopy(models.engine)
    assert isinstance(twin, slipstream.InferenceEngine) and twin.module is not models.engine.module
    ids, mask = left_padded()
    expected = models.original.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)
    with torch.no_grad():
        for block in models.engine._built.runner.blocks:
            for weight in block.weights.matrices.values():
                for plane in weight.planes:
                    plane.zero_()
    close(models.original(input_ids=ids).logits.detach(), twin(input_ids=ids).logits)
    with roads(twin) as counts:
        assert torch.equal(expected, twin.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5))
    assert counts.taken == "engine"
    assert not torch.equal(
        expected, models.engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)
    )
    state = twin.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in models.original.state_dict().items())
    twin.to(torch.bfloat16)
    assert twin(input_ids=ids).logits.dtype == torch.bfloat16
    with roads(twin) as counts:
        twin.generate(input_ids=ids, max_new_tokens=2)
    assert counts.taken == "engine"
    layers = [layer for layer in twin.module.modules() if is_injected(layer)]
    blocks = [injected_state(layer).block for layer in layers]
    assert all(a is b for a, b in zip(blocks, twin._built.runner.blocks, strict=True)), (
        "there are two sets of blocks"
    )


def storages(module: nn.Module) -> dict[int, int]:
    tensors = [p for p in module.parameters() if not p.is_meta]
    blocks = [injected_state(layer).block for layer in module.modules() if is_injected(layer)]
    tensors += [
        plane for block in blocks for weight in block.weights.matrices.values() for plane in weight.planes
    ]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_weights_are_held_once(kind: str) -> None:
    models = pair(kind)
    dense = sum(p.numel() * p.element_size() for p in models.original.parameters())
    for engine in (models.engine, copy.deepcopy(models.engine)):
        assert sum(storages(engine.module).values()) <= 1.02 * dense
        engine.to(torch.bfloat16)
        assert sum(storages(engine.module).values()) <= 1.02 * dense / 2


def test_parameters_are_named_once(llama: Pair) -> None:
    names = [name for name, _ in llama.engine.named_parameters()]
    assert len(names) == len(set(names)) == len(list(llama.original.named_parameters()))
    torch.optim.SGD(llama.engine.parameters(), lr=0.1)  # refuses duplicates


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(128, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.filterwarnings("ignore:replace_with_kernel_inject=True replaced nothing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_torch_jit_made_runs_as_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ids = prompt(2, 5)
    traced = torch.jit.trace(_Plain().eval(), ids)
    engine = slipstream.init_inference(copy.deepcopy(traced), dtype=dtype, replace_with_kernel_inject=True)
    assert engine.report().level == "none"
    with torch.no_grad():
        assert torch.equal(engine(ids), traced.to(dtype)(ids))
        assert torch.equal(engine(ids=ids), traced(ids))


def test_what_torch_export_made_is_refused_with_the_way_out() -> None:
    exported = torch.export.export(_Plain().eval(), (prompt(2, 5),)).module()
    with pytest.raises(slipstream.UnsupportedError, match="pass the model that it was exported from"):
        slipstream.init_inference(exported, dtype=torch.float32)


def test_the_engine_can_be_a_part_of_another_module(llama: Pair) -> None:
    class Scorer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids).logits.sum(-1)

    scorer = Scorer(llama.engine)
    close(llama.original(input_ids=prompt()).logits.detach().sum(-1), scorer(prompt()), atol=1e-3)
    assert set(scorer.state_dict()) == {f"inner.{name}" for name in llama.original.state_dict()}


def test_the_random_state_is_left_alone() -> None:
    model = make("llama")
    before = torch.get_rng_state()
    inject(model)
    assert torch.equal(before, torch.get_rng_state())


def test_the_callers_configuration_is_left_alone() -> None:
    settings = {"dtype": torch.float32, "replace_with_kernel_inject": True, "tensor_parallel": {"tp_size": 1}}
    before = copy.deepcopy(settings)
    slipstream.init_inference(make("llama"), config=settings)
    assert settings == before


CONFIGURED: dict[str, tuple[str, dict[str, Any]]] = {
    "router logits": ("mixtral", {"output_router_logits": True}),
    "hidden states": ("llama", {"output_hidden_states": True}),
    "tuples": ("bloom", {"return_dict": False}),
    "no cache": ("gpt2", {"use_cache": False}),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_the_config_asks_for_is_answered(name: str) -> None:
    kind, asked = CONFIGURED[name]
    original = make(kind)
    for field, value in asked.items():
        setattr(original.config, field, value)
    engine = inject(original)
    ids, mask = left_padded()
    with torch.no_grad():
        expected, got = original(ids, attention_mask=mask), engine(ids, attention_mask=mask)
    if isinstance(expected, dict):  # caches are compared by what is generated upon them
        expected, got = ({k: v for k, v in a.items() if k != "past_key_values"} for a in (expected, got))
    close(expected, got, mask=mask)
    if name == "router logits":
        original.config.output_router_logits = False  # transformers cannot generate while it sums them up
    both = [model.generate(ids, attention_mask=mask, **GREEDY) for model in (original, engine)]
    assert torch.equal(*both)

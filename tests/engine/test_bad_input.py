"""What cannot be served is refused with the reason and the way out, and the model is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

import slipstream
from slipstream.families import FAMILIES
from slipstream.model.fused.state import is_injected
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import close, inject, left_padded, make, prompt, roads

FUSED: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}


class Snapshot:
    """Everything about a model that a refusal must not change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.training = {name: module.training for name, module in model.named_modules()}
        self.classes = {name: type(module) for name, module in model.named_modules()}
        self.hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
        self.parameters = dict(model.named_parameters())
        self.values = {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}
        self.grads = {name: p.requires_grad for name, p in model.named_parameters()}
        self.config = copy.deepcopy(getattr(model, "config", None))
        self.output = self.run()

    def run(self) -> Tensor | None:
        if any(p.is_meta for p in self.model.parameters()):
            return None
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        with torch.no_grad():
            output = self.model(input_ids=prompt()).logits
        for module in training:
            module.training = True
        return output

    def check(self) -> None:
        model = self.model
        assert {name: module.training for name, module in model.named_modules()} == self.training
        assert {name: type(module) for name, module in model.named_modules()} == self.classes
        assert not any(is_injected(module) for module in model.modules())
        assert {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()
        } == self.hooks
        parameters = dict(model.named_parameters())
        assert list(parameters) == list(self.parameters)
        for name, parameter in parameters.items():
            assert parameter is self.parameters[name], name
            assert parameter.requires_grad == self.grads[name]
            if not parameter.is_meta:
                assert parameter.dtype == self.values[name].dtype
                assert torch.equal(parameter.nan_to_num(), self.values[name].nan_to_num()), name
        if self.config is not None:
            assert model.config.to_dict() == self.config.to_dict()
        output = self.run()
        if output is not None and self.output is not None:
            assert torch.equal(output.nan_to_num(), self.output.nan_to_num()), "the outputs changed"


def refused(model: nn.Module, error: type[Exception], match: str, **settings: Any) -> str:
    """The message of a refusal that left the model as it was."""
    model.get_submodule("model.layers.0").train()  # one flag that differs from the others
    before = Snapshot(model)
    with pytest.raises(error, match=match) as caught:
        slipstream.init_inference(model, **{**FUSED, **settings})
    before.check()
    return str(caught.value)


# Models that are none.


@pytest.mark.parametrize("model", [[], None, 3, {"a": 1}, nn.Linear], ids=str)
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(slipstream.ConfigError, match="torch.nn.Module"):
        slipstream.init_inference(model)
    with pytest.raises(slipstream.ConfigError, match="torch.nn.Module"):
        slipstream.InferenceEngine(model)


@pytest.mark.parametrize("place", ["/no/such/folder", "./nowhere", Path("missing"), "missing.gguf"], ids=str)
def test_a_place_without_a_model_is_refused(place: Any) -> None:
    with pytest.raises(slipstream.WeightError, match="no such"):
        slipstream.init_inference(place)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(slipstream.WeightError, match="no model could be loaded"):
        slipstream.init_inference(str(tmp_path))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(slipstream.WeightError, match="no model could be loaded"):
        slipstream.init_inference(str(tmp_path), **FUSED)


def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    """transformers warns, and fills them with random values."""
    state = make("llama").state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    make("llama").save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(slipstream.WeightError, match=r"lacks model.layers.1.mlp.up_proj.weight.*1 tensor\)"):
        slipstream.init_inference(str(tmp_path), **FUSED)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_tied_weights_are_not_missing(tmp_path: Path, kind: str) -> None:
    model = make(kind, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    engine = slipstream.init_inference(str(tmp_path), **FUSED)
    close(model(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_an_engine_is_refused() -> None:
    engine = inject(make("llama"))
    for again in (engine, engine.module):
        with pytest.raises(slipstream.InjectionError, match="engine"):
            slipstream.init_inference(again, **FUSED)
    assert engine.generate(input_ids=prompt(1), max_new_tokens=2).shape == (1, 11)


def test_a_model_of_a_destroyed_engine_has_to_be_loaded_again() -> None:
    model = make("llama")
    slipstream.init_inference(model, **FUSED).destroy()
    with pytest.raises(slipstream.InjectionError, match="where it was destroyed .* load the model again"):
        slipstream.init_inference(model, **FUSED)


def test_an_engine_takes_a_configuration_in_any_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "fp32"}')
    for config in ({"dtype": "fp32"}, tmp_path / "config.json"):
        assert slipstream.InferenceEngine(make("llama"), config).inference_config.dtype is torch.float32
    with pytest.raises(slipstream.ConfigError, match="config=3 is a int"):
        slipstream.InferenceEngine(make("llama"), 3)  # type: ignore[arg-type]


def test_an_engine_without_fused_layers_is_refused_too() -> None:
    engine = slipstream.init_inference(make("llama"), dtype=torch.float32)
    with pytest.raises(slipstream.InjectionError, match="engine"):
        slipstream.init_inference(engine, **FUSED)


# Settings.


@pytest.mark.parametrize(
    "dtype", ["float", "complex64", "no dtype", 16, torch.complex64, torch.int32], ids=str
)
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    if dtype == "float":
        pytest.skip("a name of float32")
    refused(make("llama"), slipstream.ConfigError, "dtype", dtype=dtype)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"moe": {"ep_size": 2}}, "ep_size"),
        ({"checkpoint": "somewhere"}, "checkpoint"),
        ({"use_triton": True}, "triton"),
        ({"triangular_masking": False}, "triangular_masking"),
        ({"triangular_masking": False, "replace_with_kernel_inject": False}, "triangular_masking"),
        ({"args": {"a": 1}}, "LlamaConfig has no 'a'"),
        ({"args": {"a": 1}, "replace_with_kernel_inject": False}, "LlamaConfig has no 'a'"),
        ({"tensor_parallel": {"tp_group": "x"}}, "tp_group is a str, and torch.distributed has no groups"),
        ({"moe": {"ep_group": 3}}, "ep_group is a int, and torch.distributed has no groups"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_served_is_refused_before_anything_changes(
    settings: dict[str, Any], match: str
) -> None:
    if "use_triton" in settings and torch.cuda.is_available():
        pytest.skip("it is served here")
    refused(make("llama"), slipstream.SlipstreamError, match, **settings)


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("place", ["a file", "a folder that holds something", "below a file"])
def test_a_place_to_save_that_cannot_be_written_is_refused_before_anything_changes(
    place: str, quant: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "new"}.get(place, tmp_path)
    refused(
        make("llama"),
        slipstream.ConfigError,
        "save_mp_checkpoint_path=.*name another",
        save_mp_checkpoint_path=str(folder),
        **({} if quant is None else {"quant": quant}),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_packed_weights_of_a_model_without_a_config_have_no_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    with pytest.raises(slipstream.UnsupportedError, match="save_mp_checkpoint_path.*no transformers config"):
        slipstream.init_inference(model, quant="int8", save_mp_checkpoint_path=str(tmp_path / "new"))
    assert type(model[0]) is nn.Linear and not (tmp_path / "new").exists()


# Weights.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    model = make("llama")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = value
    assert name in refused(model, slipstream.WeightError, "NaN or infinity")


def test_weights_that_overflow_the_dtype_are_refused() -> None:
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    message = refused(model, slipstream.WeightError, "float16", dtype=torch.float16)
    assert "model.layers.1.mlp.up_proj.weight" in message and "65504" in message
    slipstream.init_inference(model, dtype=torch.bfloat16)


def test_a_damaged_pytorch_checkpoint_is_refused(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no weights at all")
    with pytest.raises(slipstream.WeightError, match="no model could be loaded"):
        slipstream.init_inference(str(tmp_path), **FUSED)


@pytest.mark.parametrize("injected", [False, True])
def test_a_buffer_on_meta_and_a_sparse_weight_are_refused(injected: bool) -> None:
    settings = {"dtype": torch.float32, "replace_with_kernel_inject": injected}
    model = make("llama")
    model.model.rotary_emb.register_buffer("inv_freq", torch.zeros(4, device="meta"), persistent=False)
    with pytest.raises(slipstream.WeightError, match=r"rotary_emb\.inv_freq are on the meta device"):
        slipstream.init_inference(model, **settings)
    model = make("llama")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse(), requires_grad=False)
    with pytest.raises(
        slipstream.WeightError, match=r"layers\.1\.mlp\.up_proj\.weight is stored as torch.spar"
    ):
        slipstream.init_inference(model, **settings)


@pytest.mark.parametrize("quant", [None, "int8"])
def test_layers_that_share_a_part_keep_their_own_code(quant: str | None) -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    engine = inject(model, **({"quant": quant} if quant else {}))
    assert all("shares a submodule" in layer.reason for layer in engine.report().layers)
    model.load_state_dict(engine.state_dict())
    close(model(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


@pytest.mark.parametrize("cache", [False, True])
def test_a_layer_that_a_decoder_has_twice_keeps_its_own_code(cache: bool) -> None:
    model = make("llama")
    model.model.layers[1] = model.model.layers[0]
    engine = inject(model)
    assert all("several times" in layer.reason for layer in engine.report().layers)
    with torch.no_grad():
        expected = model(input_ids=prompt(), use_cache=cache).logits
    close(expected, engine(input_ids=prompt(), use_cache=cache).logits)


def test_more_experts_per_token_than_its_groups_have_keep_the_layer_as_it_is() -> None:
    tiny = next(tiny for family, tiny in VARIANTS if family.name == "glm4_moe" and "groups" in tiny.label)
    options = {**tiny.options, "n_routed_experts": 4, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}
    model = peaked_model(replace(tiny, options=options))
    engine = inject(model)
    assert any("more than its 1 groups of them hold" in layer.reason for layer in engine.report().layers)
    close(model(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits, atol=1e-3)


def test_a_meta_model_is_refused() -> None:
    with torch.device("meta"):
        model = type(make("llama"))(make("llama").config)
    refused(
        model, slipstream.WeightError, "meta device and hold no values .* name their files with checkpoint="
    )


def test_one_meta_tensor_is_refused() -> None:
    model = make("llama")
    model.model.norm.weight = nn.Parameter(torch.empty(32, device="meta"))
    refused(model, slipstream.WeightError, "model.norm.weight")


class Int8Linear(nn.Module):
    """As quantizers leave a linear: integers and a scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax() / 127, requires_grad=False)
        values = (linear.weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_a_model_quantized_in_part_is_refused() -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = Int8Linear(model.model.layers[1].mlp.up_proj)
    refused(model, slipstream.WeightError, "int8")


def test_integers_in_buffers_are_found_too() -> None:
    model = make("llama")
    quantized = Int8Linear(model.model.layers[1].mlp.up_proj)
    values = quantized.weight.detach()
    del quantized.weight
    quantized.register_buffer("weight", values)
    model.model.layers[1].mlp.up_proj = quantized
    refused(model, slipstream.WeightError, "model.layers.1")


class Float8Linear(nn.Module):
    """The same in floats of 8 bits, beside a scale."""

    def __init__(self, linear: nn.Linear, *, buffer: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax() / 448, requires_grad=False)
        values = (linear.weight / self.scale).detach().to(torch.float8_e4m3fn)
        if buffer:
            self.register_buffer("weight", values)
        else:
            self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("buffer", [False, True])
def test_floats_of_eight_bits_are_codes_without_their_scale(buffer: bool) -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = Float8Linear(model.model.layers[1].mlp.up_proj, buffer=buffer)
    expected = model(input_ids=prompt()).logits.detach()
    with pytest.raises(slipstream.WeightError, match=r"up_proj\.weight is torch\.float8_e4m3fn"):
        inject(model)
    engine = slipstream.init_inference(copy.deepcopy(model), dtype=torch.float32)
    close(expected, engine(input_ids=prompt()).logits)
    half = slipstream.init_inference(model, dtype=torch.bfloat16)
    close(expected, half(input_ids=prompt()).logits.float(), atol=0.3)


@pytest.mark.filterwarnings("ignore")
def test_a_dynamically_quantized_model_is_refused() -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch.ao, "quantization"):
        pytest.skip("this torch cannot quantize dynamically")
    model = torch.ao.quantization.quantize_dynamic(make("llama"), {nn.Linear}, dtype=torch.qint8)
    refused(model, slipstream.WeightError, "quantized|has no tensor|missing")


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_runs_where_nothing_is_fused() -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = Int8Linear(model.model.layers[1].mlp.up_proj)
    expected = model(input_ids=prompt()).logits.detach()
    engine = slipstream.init_inference(model, dtype=torch.float32)
    close(expected, engine(input_ids=prompt()).logits)


# Layers that are not what their family says.


class ScaledResidual(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states + 0.9 * (super().forward(hidden_states, *args, **kwargs) - hidden_states)


class ExtraNorm(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        hidden = super().forward(hidden_states, *args, **kwargs)
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


class OtherActivation(LlamaDecoderLayer):
    """See `with_layers`."""


class NoCausality(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any) -> Tensor:
        length = hidden_states.shape[1]
        mask = hidden_states.new_zeros(1, 1, length, length) if length > 1 else attention_mask
        return super().forward(hidden_states, attention_mask=mask, **kwargs)


CHANGED = [ScaledResidual, ExtraNorm, OtherActivation, NoCausality]


def with_layers(layer_class: type[nn.Module], *indices: int) -> Any:
    model = make("llama", num_hidden_layers=3)
    for index in indices:
        model.model.layers[index].__class__ = layer_class
        if layer_class is OtherActivation:
            model.model.layers[index].mlp.act_fn = nn.ReLU().eval()
    return model


@pytest.mark.parametrize("layer_class", CHANGED)
@pytest.mark.parametrize("indices", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_a_layer_that_computes_something_else_is_caught(
    layer_class: type[nn.Module], indices: tuple[int, ...]
) -> None:
    message = refused(with_layers(layer_class, *indices), slipstream.InjectionError, r"off by \d")
    assert f"model.layers.{indices[0]}" in message and "fallback" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer_class", CHANGED)
def test_it_is_caught_in_lower_precision_too(layer_class: type[nn.Module], dtype: torch.dtype) -> None:
    refused(with_layers(layer_class, 2), slipstream.InjectionError, r"off by \d", dtype=dtype)


@pytest.mark.parametrize("layer_class", CHANGED)
def test_fallback_keeps_the_original_layer_and_its_answers(layer_class: type[nn.Module]) -> None:
    model = with_layers(layer_class, 1)
    ids, mask = left_padded()
    expected = model(input_ids=ids, attention_mask=mask).logits.detach()
    tokens = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5)
    engine = inject(model, injection_check="fallback")
    report = engine.report()
    assert [layer.level for layer in report.layers] == ["block", report.layers[1].level, "block"]
    assert report.layers[1].level != "block" and report.level == "module"
    assert "off by" in report.layers[1].reason
    close(expected, engine(input_ids=ids, attention_mask=mask).logits, mask=mask)
    with roads(engine) as counts:
        assert torch.equal(tokens, engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5))
    assert counts.taken == "compatible"


def test_off_trusts_the_family() -> None:
    model = with_layers(ScaledResidual, 1)
    engine = inject(model, injection_check="off")
    assert engine.report().level == "block" and engine.report().layers[1].max_error is None
    plain = make("llama", num_hidden_layers=3)
    close(plain(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_a_forward_set_on_one_layer_alone_is_caught() -> None:
    model = make("llama")
    layer = model.model.layers[1]
    layer.forward = lambda hidden_states, **kwargs: (
        2 * LlamaDecoderLayer.forward(layer, hidden_states, **kwargs)
    )
    refused(model, slipstream.InjectionError, "model.layers.1.*off by")


def test_one_layer_in_the_middle_with_another_part_is_caught() -> None:
    model = make("llama", num_hidden_layers=4)
    model.model.layers[2].mlp.act_fn = nn.ReLU().eval()
    refused(model, slipstream.InjectionError, "model.layers.2.*off by")
    model = make("llama", num_hidden_layers=4)
    mlp = model.model.layers[2].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)
    refused(model, slipstream.InjectionError, "model.layers.2.*off by")


def test_a_layer_that_is_listened_to_keeps_its_code() -> None:
    model = make("llama", num_hidden_layers=3)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    engine = inject(model)
    layers = engine.report().layers
    assert [layer.level == "block" for layer in layers] == [True, False, True] and "hooks" in layers[1].reason
    close(model(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_a_feed_forward_without_width_is_left_as_it_is() -> None:
    like = FAMILIES["lfm2"].tiny[0]
    model: Any = peaked_model(replace(like, options={**like.options, "intermediate_size": 1}))
    ids = prompt(vocabulary=90)
    expected = model(input_ids=ids).logits.detach()
    engine = inject(model, injection_check="fallback")
    assert all("has 0 units" in layer.reason for layer in engine.report().layers)
    close(expected, engine(input_ids=ids).logits)


def _louder(model: Any) -> None:
    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.lm_head.__class__ = Louder


def _another_norm(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32).eval()  # torch's own code, and not what the family says


@pytest.mark.parametrize(("edit", "why"), [(_louder, "lm_head"), (_another_norm, "logits")])
def test_a_frame_that_does_something_else_takes_the_compatible_road(
    edit: Callable[[Any], None], why: str
) -> None:
    model = make("llama")
    edit(model)
    expected = model.generate(input_ids=prompt(), max_new_tokens=5, do_sample=False, repetition_penalty=1.4)
    engine = inject(model, injection_check="fallback")
    assert why in (engine.why_compatible() or "")
    assert any(why in note for note in engine.report().notes)
    with roads(engine) as counts:
        got = engine.generate(input_ids=prompt(), max_new_tokens=5, do_sample=False, repetition_penalty=1.4)
    assert counts.taken == "compatible" and torch.equal(expected, got)


def extra(model: Any) -> None:
    model.model.layers[1].post_norm = LlamaRMSNorm(32)


def missing(model: Any) -> None:
    del model.model.layers[1].self_attn.o_proj


def reshaped(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = nn.Linear(40, 32, bias=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [(extra, "post_norm"), (missing, "attn_out"), (reshaped, "mlp_out.*48")],
    ids=["extra", "missing", "reshaped"],
)
def test_a_layer_with_other_tensors_is_refused(change: Callable[[Any], None], match: str) -> None:
    model = make("llama")
    change(model)
    before = dict(model.named_parameters())
    with pytest.raises(slipstream.WeightError, match=match) as caught:
        slipstream.init_inference(model, **FUSED)
    assert "model.layers.1" in str(caught.value)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert not any(is_injected(module) for module in model.modules())


def test_fallback_keeps_a_layer_with_other_tensors() -> None:
    model = make("llama")
    extra(model)
    engine = inject(model, injection_check="fallback")
    first, second = engine.report().layers
    assert first.level == "block" and second.level != "block" and "post_norm" in second.reason
    close(model(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


# Inputs.


@pytest.fixture(scope="module")
def engine() -> slipstream.InferenceEngine:
    return inject(make("llama"))


@pytest.fixture(params=["forward", "generate"])
def call(request: pytest.FixtureRequest, engine: slipstream.InferenceEngine) -> Callable[..., Any]:
    return engine if request.param == "forward" else engine.generate


INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "an empty batch": ({"input_ids": torch.empty(0, 5, dtype=torch.long)}, "batch is empty"),
    "an empty prompt": ({"input_ids": torch.empty(2, 0, dtype=torch.long)}, "prompt is empty"),
    "an id beyond the vocabulary": ({"input_ids": torch.tensor([[5, 100]])}, "100.*0 to 99"),
    "a negative id": ({"input_ids": torch.tensor([[5, -1]])}, "-1.*0 to 99"),
    "a mask of another batch": (
        {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(3, 4)}, r"\(3, 4\).*\(2, 4\)",
    ),
    "a mask that is too short": (
        {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(2, 3)}, r"\(2, 3\).*\(2, 4\)",
    ),
    "a mask that is too long": (
        {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(2, 5)}, r"\(2, 5\).*\(2, 4\)",
    ),
    "a mask without a batch": (
        {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(4)}, r"\(4,\) has no batch",
    ),
    "a mask of integers with 4 dims": (
        {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(2, 1, 4, 4).long()}, r"int64.*bool",
    ),
    "ids with a fraction": ({"input_ids": torch.full((2, 4), 5.0)}, "float32.*int64"),
    "ids that are bytes": ({"input_ids": torch.full((2, 4), 5, dtype=torch.uint8)}, "uint8.*int64"),
    "ids without a batch": ({"input_ids": torch.full((4,), 5)}, r"\(4,\) have no batch"),
    "ids in a list": ({"input_ids": [[5, 6]]}, "is a list; give a tensor"),
    "what a tokenizer returns": ({"input_ids": {"input_ids": torch.ones(1, 3)}}, r"is a dict; unpack it"),
    "embeddings of no token": ({"inputs_embeds": torch.ones(2, 0, 32)}, "prompt is empty"),
    "embeddings of no row": ({"inputs_embeds": torch.ones(0, 4, 32)}, "batch is empty"),
    "embeddings with a mask of another length": (
        {"inputs_embeds": torch.ones(2, 4, 32), "attention_mask": torch.ones(2, 3)}, r"\(2, 3\).*\(2, 4\)",
    ),
    "too few positions": (
        {"input_ids": torch.full((2, 4), 5), "position_ids": torch.arange(3)[None]}, r"\(1, 3\).*\(2, 4\)",
    ),
    "positions of another batch": (
        {"input_ids": torch.full((2, 4), 5), "position_ids": torch.arange(4).repeat(3, 1)}, r"\(3, 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_cannot_be_run_is_refused(
    name: str, call: Callable[..., Any], engine: slipstream.InferenceEngine
) -> None:
    inputs, match = INPUTS[name]
    with roads(engine) as counts, pytest.raises(slipstream.RequestError, match=match) as caught:
        call(**inputs)
    assert counts.taken == "none" and isinstance(caught.value, ValueError)
    assert engine(input_ids=prompt(1)).logits.shape == (1, 9, 100)


def test_positional_and_renamed_inputs_are_checked_too(engine: slipstream.InferenceEngine) -> None:
    bad = torch.tensor([[5, 100]])
    for call in (lambda: engine(bad), lambda: engine.generate(bad), lambda: engine.generate(inputs=bad)):
        with pytest.raises(slipstream.RequestError, match="100"):
            call()
    with pytest.raises(slipstream.RequestError, match=r"\(1, 3\)"):
        engine(torch.tensor([[5, 6]]), torch.ones(1, 3))


def test_inputs_that_contradict_each_other_raise_what_the_model_raises(
    engine: slipstream.InferenceEngine,
) -> None:
    for inputs in ({}, {"input_ids": prompt(), "inputs_embeds": torch.zeros(3, 9, 32)}):
        with pytest.raises(ValueError, match="input_ids"):
            engine(**inputs)
    with pytest.raises(slipstream.RequestError, match="str"):
        engine(input_ids="hello")


def test_no_place_for_more_positions_than_the_model_has() -> None:
    """A learned position embedding ends; the original says so by an IndexError, and so does the engine."""
    original = make("gpt2", n_positions=16)
    engine = inject(original)
    ids = prompt(1, 12)
    close(
        original.generate(input_ids=ids, max_new_tokens=4, eos_token_id=None),
        engine.generate(input_ids=ids, max_new_tokens=4, eos_token_id=None),
    )
    for model in (original, engine):
        with pytest.raises((IndexError, slipstream.RequestError)):
            model.generate(input_ids=ids, max_new_tokens=6, eos_token_id=None)

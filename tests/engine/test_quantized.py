"""Engines whose weights are packed: the original on the unpacked weights exactly, on its own nearly."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.errors import WeightError
from slipstream.formats import FORMATS
from slipstream.model.weights.packed import is_packed
from tests.architectures.tiny import tiny_model
from tests.helpers.models import Pair, close, inject, left_padded, make, prompt, roads

PACKED = [name for name in FORMATS if name != "plain"]
MODELS = ("llama", "gpt2", "mixtral", "bert", "bloom")
INJECTED = {"replace_with_kernel_inject": True}
NOT_INJECTED = {"replace_with_kernel_inject": False}

DISTANCE = {"int8": 0.06, "fp8": 0.17, "fp6": 0.16, "int4": 0.45, "bf13": 0.02}
"""Distance of the logits from the unquantized model's, relative to their own size: two or three times what
the format's error does to a random model of two layers with weights of twice the usual size."""


def unpacked(original: nn.Module, engine: slipstream.InferenceEngine) -> Any:
    """The original model with the weights that the engine's planes stand for, a packed head untied."""
    model = copy.deepcopy(original)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.load_state_dict(engine.module.state_dict(), strict=True)
    return model


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs).logits
    return out


@pytest.fixture(
    scope="module", params=[(k, f, i) for k in MODELS for f in PACKED for i in (True, False)], ids=str
)
def packed(request: pytest.FixtureRequest) -> tuple[Pair, str, bool]:
    kind, name, injected = request.param
    original = make(kind)
    engine = inject(original, quant=name, replace_with_kernel_inject=injected)
    return Pair(original, engine), name, injected


def close_to_packed(found: Tensor, expected: Tensor) -> None:
    """The promise for float32, or 6e-5 of the largest logit.

    Where rows are few, packed weights meet them as pairs of bfloat16, which keep 16 bits of a float32: BERT's
    layers and head are then off by 1.6e-5 to 4.6e-5 of the largest logit, by the format; in float32 by 2e-6.
    """
    atol = max(1e-4, 6e-5 * float(expected.abs().max()))
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)


def test_logits_are_those_of_the_unpacked_weights(packed: tuple[Pair, str, bool]) -> None:
    both, name, _ = packed
    exact = unpacked(both.original, both.engine)
    ids, mask = left_padded()
    for inputs in ({"input_ids": prompt()}, {"input_ids": ids, "attention_mask": mask}):
        expected, found = logits(exact, **inputs), logits(both.engine, **inputs)
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        close_to_packed(found[real], expected[real])
        plain = logits(both.original, **inputs)[real]
        # The median of the tokens: a router sends some of them elsewhere for the smallest difference.
        off = float(((found[real] - plain).norm(dim=-1) / plain.norm(dim=-1)).median())
        assert 0 < off < DISTANCE[name]


def test_the_report_says_what_was_packed(packed: tuple[Pair, str, bool]) -> None:
    both, name, injected = packed
    report = both.engine.report()
    assert report.level == ("block" if injected else "none")
    assert {layer.format for layer in report.layers} == {name}
    assert name in str(report)


def test_the_state_dict_has_unpacked_weights_under_the_original_names(packed: tuple[Pair, str, bool]) -> None:
    both, name, _ = packed
    expected, found = both.original.state_dict(), both.engine.module.state_dict()
    assert expected.keys() == found.keys()
    changed = 0
    for key, tensor in expected.items():
        assert (
            found[key].shape == tensor.shape and found[key].dtype == tensor.dtype and not found[key].is_meta
        )
        off = float((found[key].float() - tensor.float()).abs().max()) if tensor.numel() else 0.0
        assert off <= (FORMATS[name].error + FORMATS[name].floor) * float(tensor.abs().max()) + 1e-7
        changed += off > 0
    assert changed >= 4


def test_outside_of_the_layers_the_head_alone_is_packed_and_no_router(packed: tuple[Pair, str, bool]) -> None:
    both, name, _ = packed
    (head,) = both.engine.report().outside
    layers = tuple(layer.name for layer in both.engine.report().layers)
    expected, found = both.original.state_dict(), both.engine.module.state_dict()
    for key, tensor in expected.items():
        if key == f"{head.name}.weight":
            assert head.format == ("bf13" if name == "bf13" else "int8") and not torch.equal(
                found[key], tensor
            )
        elif not key.startswith(layers) or key.endswith("mlp.gate.weight") or tensor.dim() < 2:
            assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_generate_writes_what_the_unpacked_model_writes(kind: str, name: str, injected: bool) -> None:
    original = make(kind)
    engine = inject(original, quant=name, replace_with_kernel_inject=injected)
    exact = unpacked(original, engine)
    ids, mask = left_padded()
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with roads(engine) as taken:
        found = engine.generate(**asked)
    assert taken.taken == ("engine" if injected else "compatible")
    assert torch.equal(found, exact.generate(**asked))
    beams = {**asked, "num_beams": 3}
    assert torch.equal(engine.generate(**beams), exact.generate(**beams))


WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_the_bytes_fall_as_the_bits_say(name: str, injected: bool) -> None:
    original = make("llama", **WIDE)
    engine = inject(original, quant=name, replace_with_kernel_inject=injected)
    for layer in engine.report().layers:
        module = original.get_submodule(layer.name)
        matrices = [p for p in module.parameters() if p.dim() == 2]
        rest = sum(p.numel() * 4 for p in module.parameters() if p.dim() == 1)
        bits = sum(p.numel() * FORMATS[name].bits + p.shape[0] * 32 for p in matrices)
        assert layer.bytes == rest + bits / 8
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(engine.module)}
    outside = sum(p.nbytes for n, p in original.named_parameters() if ".layers." not in n)
    outside -= original.lm_head.weight.nbytes - sum(part.bytes for part in engine.report().outside)
    buffers = sum(b.nbytes for b in original.buffers())
    assert (
        sum(held.values()) <= sum(layer.bytes for layer in engine.report().layers) + outside + buffers + 4096
    )


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Every tensor that a module keeps alive: parameters, buffers, planes."""
    found: list[Tensor] = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]
    for part in module.modules():
        for state in (vars(part).get("_slipstream"), vars(part).get("_slipstream_packed")):
            weights = (
                []
                if state is None
                else (
                    state.block.weights.matrices.values()
                    if hasattr(state, "block")
                    else state.weights.values()
                )
            )
            found += [plane for weight in weights for plane in weight.planes]
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant": "int4"}, "int4"),
        ({"quant": {"weight": {"num_bits": 4}}}, "int4"),
        ({"quant": {"weight": {"format": "int4"}}}, "int4"),
        ({"quant": {"weight": {"num_bits": 4, "q_type": "asymmetric"}}}, "int4"),
        ({"quant": {"weight": {"num_bits": 4, "q_type": "symmetric"}}}, "int4-g32-sym"),
        ({"quant": {"weight": {"num_bits": 4, "q_groups": 4}}}, "int4-g64"),
        ({"quant": {"weight": {"num_bits": 4, "q_groups": 8}}}, "int4"),
        ({"quant": "int8"}, "int8"),
        ({"quant": {"enabled": True}}, "int8"),
        ({"quant": {"weight": {"num_bits": 8}, "activation": {"enabled": False}}}, "int8"),
        ({"dtype": torch.int8}, "int8"),
        ({"dtype": "int8", "quant": "int8"}, "int8"),
        ({"quant": {"weight": {"num_bits": 6}}}, "fp6"),
        ({"quant": "fp6-e3m2"}, "fp6-e3m2"),
        ({"quant": {"enabled": False, "weight": {"num_bits": 4}}}, "float32"),
        ({"quant": {"activation": {"enabled": False}}}, "float32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_every_way_to_ask_for_a_format(settings: dict[str, Any], expected: str, injected: bool) -> None:
    engine = inject(make("llama", **WIDE), replace_with_kernel_inject=injected, **settings)
    assert {layer.format for layer in engine.report().layers} == {expected}
    assert engine.report().level == ("block" if injected else "none")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ({"num_bits": 8, "q_groups": 4}, "q_groups=4 does not go with int8"),
        ({"num_bits": 8, "q_type": "asymmetric"}, "asymmetric.*int8"),
        ({"num_bits": 4, "q_groups": 7}, "q_groups=7 makes groups of"),
        ({"num_bits": 4, "q_groups": 256}, "q_groups=256 makes groups of 1 in rows of 256"),
    ],
    ids=str,
)
def test_what_no_format_does_is_refused_before_anything_changes(weight: dict[str, Any], message: str) -> None:
    model = make("llama", **WIDE).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(slipstream.ConfigError, match=message):
        slipstream.init_inference(model, dtype=torch.float32, quant={"weight": weight})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_int8_as_a_dtype_computes_in_the_models_own_float(own: torch.dtype, injected: bool) -> None:
    expected = torch.float32 if own == torch.float32 else torch.bfloat16
    original = make("llama").to(own)
    engine = inject(original, dtype=torch.int8, replace_with_kernel_inject=injected)
    found = logits(engine, input_ids=prompt())
    assert found.dtype == engine.module.config.dtype == expected
    plain = logits(original.float(), input_ids=prompt())
    assert float((found.float() - plain).norm() / plain.norm()) < DISTANCE["int8"] + 0.05


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_the_projection_of_queries_keys_and_values_can_be_left_plain(kind: str, injected: bool) -> None:
    original = make(kind)
    quant = {"weight": {"num_bits": 4}, "qkv": {"enabled": False}}
    engine = inject(original, quant=quant, replace_with_kernel_inject=injected)
    expected, found = original.state_dict(), engine.module.state_dict()
    same = {key for key, tensor in expected.items() if tensor.dim() > 1 and torch.equal(found[key], tensor)}
    parts = ("q_proj", "k_proj", "v_proj") if kind != "gpt2" else ("attn.c_attn",)
    qkv = {key for key in expected if key.removesuffix(".weight").endswith(parts)}
    assert qkv and qkv <= same
    assert not any(key.endswith(("o_proj.weight", "attn.c_proj.weight")) for key in same)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "llama"])
def test_a_layer_whose_own_code_must_run_runs_on_the_unpacked_weights(kind: str) -> None:
    """Attention maps are not what a block gives."""
    original = make(kind, attn_implementation="eager")
    engine = inject(original, quant="int4")
    exact = unpacked(original, engine)
    inputs = {"input_ids": prompt(), "output_attentions": True}
    with torch.no_grad():
        expected, found = exact(**inputs), engine(**inputs)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.attentions[-1], expected.attentions[-1], atol=1e-4, rtol=1e-4)


def test_so_does_one_that_keeps_a_packed_part_of_its_own() -> None:
    engine = inject(tiny_model("qwen3_next", "causal"), quant="int8")
    assert any(map(is_packed, engine.module.model.layers[0].modules()))
    expected = engine(input_ids=prompt(vocabulary=90)).logits
    close(expected, engine(input_ids=prompt(vocabulary=90), output_attentions=True).logits, atol=1e-4)


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
def test_a_packed_model_can_be_cast_copied_and_saved(injected: bool, tmp_path: Any) -> None:
    original = make("llama")
    engine = inject(original, quant="int8", replace_with_kernel_inject=injected)
    expected = logits(engine, input_ids=prompt())
    assert torch.equal(logits(copy.deepcopy(engine.module), input_ids=prompt()), expected)
    engine.save_checkpoint(tmp_path)
    again = type(original).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, input_ids=prompt()), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(slipstream.UnsupportedError, match="load_state_dict"):
        engine.module.load_state_dict(original.state_dict())
    half = engine.module.to(torch.bfloat16)
    found = logits(half, input_ids=prompt())
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).norm() / expected.norm()) < 0.1
    assert all(t.dtype == torch.bfloat16 for t in half.state_dict().values())


def test_whoever_reads_a_packed_weight_gets_its_values() -> None:
    original = make("gpt2")
    engine = inject(original, quant="int8", **NOT_INJECTED)
    projection = engine.module.transformer.h[0].mlp.c_fc
    assert is_packed(projection)
    assert isinstance(projection, type(original.transformer.h[0].mlp.c_fc))
    own = original.transformer.h[0].mlp.c_fc.weight
    assert projection.weight.shape == own.shape
    own = own.detach()
    assert float((projection.weight - own).abs().max()) <= 0.004 * float(own.abs().max())
    # Whoever puts another parameter in its place is heard.
    projection.weight = nn.Parameter(own.clone())
    x = torch.randn(2, 3, own.shape[0])
    torch.testing.assert_close(projection(x), original.transformer.h[0].mlp.c_fc(x))


def test_a_model_that_belongs_to_a_packed_engine_is_refused() -> None:
    engine = inject(make("llama"), quant="int8", **NOT_INJECTED)
    with pytest.raises(slipstream.InjectionError, match="belongs to an engine"):
        slipstream.init_inference(engine.module, dtype=torch.float32)


class Plain(nn.Module):
    """A model of nobody's: layers with linears, and one that lacks them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(48, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)) for _ in range(2)
        )
        self.leave = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.leave(x)
        return out


@pytest.mark.parametrize("name", PACKED)
def test_any_linear_of_a_layer_can_be_packed(name: str) -> None:
    original = Plain()
    engine = inject(original, quant=name, **NOT_INJECTED)
    assert {layer.format for layer in engine.report().layers} == {name}
    exact = Plain()
    exact.load_state_dict(engine.module.state_dict())
    x = torch.randn(3, 5, 48)
    torch.testing.assert_close(engine(x), exact(x), atol=1e-5, rtol=1e-5)
    assert not torch.equal(engine(x), original(x))
    assert torch.equal(engine.module.leave.weight, original.leave.weight)


class Residual(nn.Module):
    """As a vision transformer's block is, of nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


@pytest.mark.parametrize("settings", [NOT_INJECTED, {}], ids=["packed", "injected"])
@pytest.mark.parametrize("name", PACKED)
def test_layers_in_a_sequential_are_packed(name: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.LayerNorm(32), nn.Sequential(Residual(), Residual())).eval()
    engine = inject(original, quant=name, **settings)
    assert [layer.format for layer in engine.report().layers] == [name, name]
    assert all(is_packed(block.up) and is_packed(block.down) for block in engine.module[1])
    exact = copy.deepcopy(original)
    exact.load_state_dict(engine.module.state_dict())
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(engine(x), exact(x), atol=1e-5, rtol=1e-5)
    assert not torch.equal(engine(x), original(x))


def test_a_model_without_layers_is_told_that_nothing_was_packed() -> None:
    with pytest.warns(UserWarning, match="int4 weights were requested, but nothing was packed"):
        inject(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), quant="int4", **NOT_INJECTED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inject(make("llama"), quant="int4", **NOT_INJECTED)


@pytest.mark.parametrize("injected", [True, False])
def test_experts_that_no_family_knows_are_said_to_stay_plain(injected: bool) -> None:
    report = inject(
        tiny_model("mimo_v2_flash", "causal"), quant="int4", replace_with_kernel_inject=injected
    ).report()
    (note,) = (note for note in report.notes if "stay plain" in note)
    assert note.startswith("46% of the weights") and "mlp.experts.gate_up_proj" in note
    whole = inject(make("mixtral"), quant="int4", replace_with_kernel_inject=injected).report()
    assert not any("stay plain" in note for note in whole.notes)


def test_a_matrix_without_values_is_not_packed() -> None:
    for fmt in FORMATS.values():
        if fmt.bits:
            with pytest.raises(WeightError, match="meta device"):
                fmt.weight(torch.empty(4, 64, device="meta"), None)


def test_the_self_check_stays_as_strict_with_packed_weights() -> None:
    engine = inject(make("llama"), quant="int4")
    plain = inject(make("llama"))
    for one, other in zip(engine.report().layers, plain.report().layers, strict=True):
        assert one.max_error is not None and other.max_error is not None
        assert one.max_error <= 1e-4


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("pair", [("k_proj", "v_proj"), ("gate_proj", "up_proj")], ids="-".join)
def test_linears_of_a_layer_may_share_a_parameter(pair: tuple[str, str], name: str) -> None:
    model = make("llama", hidden_size=64, intermediate_size=96)
    layer = model.model.layers[0]
    part = layer.self_attn if pair[0] == "k_proj" else layer.mlp
    getattr(part, pair[1]).weight = getattr(part, pair[0]).weight
    engine = inject(model, quant=name)
    assert engine.report().level == "block"
    rounded = copy.deepcopy(model)
    rounded.load_state_dict(engine.state_dict())
    close(rounded(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits, atol=1e-3)


@pytest.mark.parametrize("name", PACKED)
def test_weights_below_the_smallest_normal_number_count_as_zero(name: str) -> None:
    model = make("llama", hidden_size=64, intermediate_size=96)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-40)
    engine = inject(model, quant=name)
    assert engine.report().level == "block"
    assert bool(engine(input_ids=prompt()).logits.isfinite().all())


def test_a_packing_that_does_not_keep_its_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from slipstream.formats import choose

    honest = FORMATS["int8"]
    broken = replace(honest, unpack=lambda *stored: honest.unpack(*stored).roll(1, -1))
    monkeypatch.setitem(choose.FORMATS, "int8", broken)
    with pytest.raises(slipstream.InjectionError, match="once packed as int8"):
        inject(make("llama"), quant="int8")


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
@pytest.mark.parametrize("kind", MODELS)
def test_bf13_has_the_numbers_of_bfloat16(kind: str, injected: bool) -> None:
    """Every weight, and so every logit but for the order of sums."""
    original = make(kind).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "replace_with_kernel_inject": injected}
    plain, engine = inject(copy.deepcopy(original), **settings), inject(original, quant="bf13", **settings)
    found = engine.module.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    expected, got = (logits(e, input_ids=prompt()) for e in (plain, engine))
    assert float((got - expected).abs().max()) <= 2.0**-7 * float(expected.abs().max())

"""What the report says: to programs exactly the promised keys, to people a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.kernels.cpu import library
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import inject, make

KEYS = {"level", "device", "notes", "layers"}
LAYER_KEYS = {"name", "family", "level", "kernels", "format", "bytes", "max_error"}


def test_the_dictionary_has_the_promised_keys_and_plain_values() -> None:
    report = inject(make("llama")).report().to_dict()
    assert set(report) == KEYS
    assert [set(layer) for layer in report["layers"]] == [LAYER_KEYS, LAYER_KEYS]
    assert json.loads(json.dumps(report)) == report
    layer = report["layers"][1]
    assert (report["level"], report["device"]) == ("block", "cpu")
    assert (layer["name"], layer["family"], layer["level"], layer["format"]) == (
        "model.layers.1", "llama", "block", "float32",
    )  # fmt: skip
    assert type(layer["bytes"]) is int and 0 <= layer["max_error"] < 1e-4 and layer["kernels"]


def test_bytes_are_those_of_the_weights() -> None:
    for kind in ("llama", "gpt2", "mixtral", "bloom"):
        model = make(kind)
        sizes = [
            sum(p.numel() * 2 for p in layer.parameters())
            for layer in (model.model.layers if hasattr(model, "model") else model.transformer.h)
        ]
        report = inject(model, dtype=torch.bfloat16).report()
        assert [layer.bytes for layer in report.layers] == sizes
        assert {layer.format for layer in report.layers} == {"bfloat16"}


@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_bytes_count_state_spaces(name: str) -> None:
    model: Any = peaked_model(next(v for v in VARIANTS if v[0].name == name)[1])
    layers = model.get_decoder().layers if name != "mamba" else model.backbone.layers
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    assert [layer.bytes for layer in inject(model).report().layers] == sizes


def test_the_table_can_be_read() -> None:
    text = str(inject(make("llama", num_hidden_layers=3)).report())
    lines = text.splitlines()
    assert lines[0].startswith("level block on cpu, 3 layers")
    assert lines[1].split()[:5] == ["layers", "level", "family", "format", "size"]
    assert "model.layers.0 .. 2" in lines[2] and "llama" in lines[2]
    assert len({line.index("block") for line in lines[2:3]} | {lines[1].index("level")}) == 1, (
        "columns do not align"
    )


def test_levels_are_told_apart() -> None:
    without = slipstream.init_inference(make("llama"), dtype=torch.float32).report()
    assert without.level == "none" and {layer.level for layer in without.layers} == {"none"}
    assert "replace_with_kernel_inject is False" in str(without)
    unknown = inject(torch.nn.Sequential(torch.nn.Linear(3, 3))).report()
    assert unknown.level == "none" and unknown.to_dict()["layers"] == []


def test_inspect_says_the_same_without_changing_the_model() -> None:
    model = make("llama").train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = slipstream.inspect(model)
    assert report.level == "block" and [layer.name for layer in report.layers] == [
        "model.layers.0",
        "model.layers.1",
    ]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert set(report.to_dict()) == KEYS
    engine = inject(model)
    assert [layer.max_error for layer in engine.report().layers] == [
        layer.max_error for layer in report.layers
    ]


def test_a_setting_without_effect_stands_in_the_notes() -> None:
    report = inject(make("llama"), enable_cuda_graph=True).report()
    assert report.device == "cpu" and any("enable_cuda_graph" in note for note in report.notes)
    assert "note: enable_cuda_graph" in str(report)


def test_kernels_that_were_not_built_stand_in_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_CPU_ISA", raising=False)
    monkeypatch.setattr(library, "_find", lambda: "the native library was not built")
    monkeypatch.setattr(library, "_load", lambda isa: None)
    report = inject(make("llama")).report()
    assert any("instead of the engine's kernels" in note and "not built" in note for note in report.notes)
    assert not inject(make("llama"), replace_with_kernel_inject=False).report().notes


@pytest.mark.skipif(library.load("avx2") is None, reason="the layers are left to torch")
def test_layers_that_do_not_run_in_one_call_say_why() -> None:
    def apart(family: str) -> list[str]:
        _, tiny = next(variant for variant in VARIANTS if variant[0].name == family)
        notes = inject(peaked_model(tiny)).report().notes
        return [note for note in notes if note.startswith("the layers of a step run one at a time: ")]

    assert apart("llama") == apart("gpt_oss") == apart("deepseek_v2") == []
    (note,) = apart("bitnet")
    assert "inner_norms=" in note


def test_inspect_takes_a_folder_and_names_what_is_no_model(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    for place in (tmp_path, str(tmp_path)):
        assert slipstream.inspect(place).level == "block"
    for what in (None, 3, {}):
        with pytest.raises(slipstream.ConfigError, match=f"model is a {type(what).__name__}; it must be"):
            slipstream.inspect(what)  # type: ignore[arg-type]
    with pytest.raises(slipstream.ConfigError, match="model is the class Linear; it must be"):
        slipstream.inspect(torch.nn.Linear)  # type: ignore[arg-type]


def test_overrides_of_the_config_that_no_layer_reads_stand_in_the_notes() -> None:
    note = "but only in engine.config: existing modules keep the values that they were built with"
    engine = inject(make("llama"), replace_with_kernel_inject=False, args={"rms_norm_eps": 1.0})
    assert engine.config.rms_norm_eps == 1.0
    assert note in str(engine.report())
    fused = inject(make("llama"), args={"rms_norm_eps": 1.0}, injection_check="off")
    assert "but only in fused layers and engine.config" in str(fused.report())
    assert "overrides" not in str(inject(make("llama")).report())


def test_a_disagreement_by_an_override_names_it() -> None:
    with pytest.raises(
        slipstream.InjectionError, match=r"config=\{'rms_norm_eps': 1.0\}.*leave the entries out"
    ):
        inject(make("llama"), args={"rms_norm_eps": 1.0})

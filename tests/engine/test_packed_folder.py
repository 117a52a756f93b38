"""A folder of packed weights opens as the engine that wrote it, and a damaged one is refused before use."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.engine.save import save_packed
from slipstream.errors import ConfigError, WeightError
from slipstream.model.fused.state import injected_state, is_injected
from tests.architectures.tiny import tiny_model
from tests.cli.conftest import Run, checkpoint, run  # noqa: F401 - fixtures
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.models import close, inject, make, prompt

BOTH = {"weight": {"format": "fp6"}, "head": "int4", "embedding": "int4"}
GROUPS = {"weight": {"format": "int4", "q_groups": 2, "q_type": "symmetric"}, "qkv": {"enabled": False}}


def write(folder: Path, kind: str, quant: Any, *, fused: bool = True) -> slipstream.InferenceEngine:
    model = make(kind, hidden_size=64) if quant is GROUPS else make(kind)
    engine = inject(model, quant=quant, replace_with_kernel_inject=fused)
    save_packed(engine.module, engine.inference_config, folder)
    return engine


@pytest.mark.parametrize(
    "quant", ["int8", "int4", "fp8", "bf13", BOTH], ids=["int8", "int4", "fp8", "bf13", "fp6 and int4"]
)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mixtral", "dbrx", "bert"])
def test_a_folder_opens_as_the_engine_that_wrote_it(kind: str, quant: Any, tmp_path: Path) -> None:
    engine = write(tmp_path / "packed", kind, quant)
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    rows = [[(r.name, r.level, r.format, r.bytes) for r in e.report().layers] for e in (engine, opened)]
    assert rows[0] == rows[1]
    assert opened.inference_config.dtype is torch.float32  # as it was written
    ids = prompt()
    # The order of MKL's sums depends on where tensors lie.
    torch.testing.assert_close(
        opened(input_ids=ids).logits, engine(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )
    own, got = engine.state_dict(), opened.state_dict()
    assert own.keys() == got.keys() and all(torch.equal(own[name], got[name]) for name in own)


@pytest.mark.parametrize("quant", ["int4", {"weight": {"format": "int4"}, "head": "int4"}])
def test_a_tied_head_that_is_packed_by_itself_is_no_news(quant: Any, tmp_path: Path) -> None:
    write(tmp_path / "packed", "gpt2", quant)
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    assert "tied" not in str(opened.report())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_rows_that_are_rounded_are_no_part_of_the_planes(
    fused: bool, name: str, kind: str, tmp_path: Path
) -> None:
    """A folder opens with the rounding of the engine that wrote it, without, and with another one."""
    quant = {"weight": {"format": name}, "activation": {"enabled": True}}
    engine = write(tmp_path / "packed", kind, quant, fused=fused)
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    torch.testing.assert_close(opened(prompt()).logits, engine(prompt()).logits, rtol=1e-5, atol=1e-5)
    zero = {"weight": {"format": name}, "activation": {"q_type": "asymmetric"}}
    for asked, found in ((None, f"{name}-a8"), (name, name), (zero, f"{name}-a8-asym")):
        settings = {} if asked is None else {"quant": asked}
        other = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True, **settings)
        assert {layer.format for layer in other.report().layers} == {found}
        own, got = engine.state_dict(), other.state_dict()
        assert own.keys() == got.keys() and all(torch.equal(own[key], got[key]) for key in own)


@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash"])
def test_a_router_s_correction_which_is_a_buffer_is_written(name: str, tmp_path: Path) -> None:
    (variant, *_) = (v for v in VARIANTS if label(v) == name)
    engine = inject(peaked_model(variant[1]), quant="int4")
    save_packed(engine.module, engine.inference_config, tmp_path / "packed")
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    torch.testing.assert_close(opened(prompt()).logits, engine(prompt()).logits, rtol=1e-5, atol=1e-5)
    own, got = engine.state_dict(), opened.state_dict()
    assert any("correction_bias" in name for name in own)
    assert own.keys() == got.keys() and all(torch.equal(own[name], got[name]) for name in own)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "own code"])
@pytest.mark.parametrize("name", ["t5", "mt5"])
def test_what_transformers_keeps_in_float32_unpacks_to_that(name: str, fused: bool, tmp_path: Path) -> None:
    """T5's second matrix, whose products float16 has no room for, from whichever place its planes come."""
    model = tiny_model(name, "seq2seq")
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.mul_(1.5e5 if path.endswith("wo.weight") else 1)
    model.save_pretrained(tmp_path / "plain")
    settings = {"dtype": torch.float16, "quant": "int8", "replace_with_kernel_inject": fused}
    first = slipstream.init_inference(copy.deepcopy(model), **settings, injection_check="off")
    save_packed(first.module, first.inference_config, tmp_path / "packed")
    own = {"replace_with_kernel_inject": fused, "injection_check": "off"}
    packed = slipstream.init_inference(tmp_path / "packed", **own)
    plain = slipstream.init_inference(tmp_path / "plain", **settings, injection_check="off")
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = first(input_ids=ids, decoder_input_ids=ids).logits
    for engine in (packed, plain):
        got = engine(input_ids=ids, decoder_input_ids=ids).logits
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        state = engine.state_dict()
        assert all(
            torch.equal(t, state[key]) and t.dtype == state[key].dtype
            for key, t in first.state_dict().items()
        )


def test_a_folder_has_the_engine_s_dtype_whatever_norms_have(tmp_path: Path) -> None:
    engine = inject(
        tiny_model("afmoe", "causal"),
        dtype=torch.float16,
        quant={"weight": {"format": "int8"}, "embedding": "int8"},
    )
    save_packed(engine.module, engine.inference_config, tmp_path / "packed")
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    assert opened.inference_config.dtype is torch.float16


@pytest.mark.parametrize("fused", [True, False], ids=["written fused", "written by linears"])
def test_a_folder_opens_at_another_level_of_injection(fused: bool, tmp_path: Path) -> None:
    engine = write(tmp_path / "packed", "llama", "int4", fused=fused)
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=not fused)
    ids = prompt()
    # The same planes; float32 sums in another order.
    torch.testing.assert_close(
        opened(input_ids=ids).logits, engine(input_ids=ids).logits, atol=1e-4, rtol=1e-4
    )
    own, got = engine.state_dict(), opened.state_dict()
    assert all(torch.equal(own[name], got[name]) for name in own)


@pytest.mark.parametrize("name", ["bloom", "codegen", "gpt_neox", "gpt_oss", "persimmon", "qwen3_next"])
def test_rows_that_a_block_has_in_another_order_open_by_linears(name: str, tmp_path: Path) -> None:
    """In bfloat16, where rows that are unpacked, rounded and packed again are others."""
    model, settings = tiny_model(name, "causal"), {"dtype": torch.bfloat16, "quant": "int8"}
    engine = slipstream.init_inference(model, replace_with_kernel_inject=True, **settings)
    save_packed(engine.module, engine.inference_config, tmp_path / "packed")
    own, got = engine.state_dict(), slipstream.init_inference(tmp_path / "packed").state_dict()
    assert any(is_injected(module) for module in engine.module.modules())
    assert own.keys() == got.keys() and all(torch.equal(own[key], got[key]) for key in own)


@pytest.mark.parametrize("pieces", [[0, 1], [8, 1], [0, 2]], ids=["twice", "beyond", "every other"])
def test_pieces_that_leave_rows_out_are_refused(pieces: list[int], tmp_path: Path) -> None:
    write(tmp_path / "packed", "bloom", "int8")
    path = tmp_path / "packed" / "slipstream.json"
    table = json.loads(path.read_text())
    entry = next(entry for key, entry in table["matrices"].items() if key.endswith(":qkv"))
    entry["pieces"][1][1], entry["pieces"][1][3] = pieces
    path.write_text(json.dumps(table))
    with pytest.raises(WeightError, match="leave out rows of a tensor"):
        slipstream.init_inference(tmp_path / "packed")


def test_a_head_that_transformers_keeps_in_float32_comes_back_in_that(tmp_path: Path) -> None:
    engine = slipstream.init_inference(tiny_model("hy_v4", "causal"), dtype=torch.bfloat16, quant="fp6")
    save_packed(engine.module, engine.inference_config, tmp_path / "packed")
    opened = slipstream.init_inference(tmp_path / "packed")
    own, got = (e.state_dict()["lm_head.weight"] for e in (engine, opened))
    assert own.dtype is got.dtype is torch.float32
    assert torch.equal(own, got)


@pytest.mark.parametrize(
    "weight",
    [{"num_bits": 4}, {"num_bits": 4, "q_type": "asymmetric"}, {"format": "int4", "q_groups": 2}],
    ids=str,
)
def test_a_folder_takes_the_words_that_mean_its_format(weight: dict[str, Any], tmp_path: Path) -> None:
    engine = inject(make("llama", hidden_size=64), quant="int4")
    save_packed(engine.module, engine.inference_config, tmp_path / "packed")
    opened = slipstream.init_inference(tmp_path / "packed", quant={"weight": weight})
    assert {row.format for row in opened.report().layers} == {"int4"}
    for other in ({"num_bits": 4, "q_type": "symmetric"}, {"format": "int4", "q_groups": 1, "num_bits": 8}):
        with pytest.raises(ConfigError, match="contradicts"):
            slipstream.init_inference(tmp_path / "packed", quant={"weight": other})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_configuration_that_is_no_object_is_named(packed: bool, name: str, tmp_path: Path) -> None:
    if packed:
        write(tmp_path / "model", "llama", "int8")
    else:
        make("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / name).write_text("null")
    with pytest.raises(WeightError, match=f"{name} holds null, but a configuration must be a JSON object"):
        slipstream.init_inference(tmp_path / "model")


def test_groups_and_plain_projections_come_back(tmp_path: Path) -> None:
    engine = write(tmp_path / "packed", "llama", GROUPS)
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    layers = [module for module in opened.module.modules() if is_injected(module)]
    formats = {str(r): w.format for r, w in injected_state(layers[0]).block.weights.matrices.items()}
    assert formats["qkv"] == "plain" and formats["mlp_in"] == "int4-g32-sym"
    close(opened(input_ids=prompt()).logits, engine(input_ids=prompt()).logits)


def test_planes_are_used_as_they_lie_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "packed", "llama", "int4")

    def never(*arguments: Any) -> Any:
        raise AssertionError("something was packed again")

    from slipstream.formats import FORMATS

    monkeypatch.setattr("slipstream.engine.settings.bind_pack", lambda packed: never)
    opened = slipstream.init_inference(
        tmp_path / "packed", replace_with_kernel_inject=True, injection_check="off"
    )
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "planes.safetensors" in line
    ]
    ranges = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in mapped]
    layers = [module for module in opened.module.modules() if is_injected(module)]
    for layer in layers:
        for weight in injected_state(layer).block.weights.matrices.values():
            for plane in weight.planes:
                assert any(low <= plane.data_ptr() < high for low, high in ranges)
    assert FORMATS["int4"].bits


def test_it_computes_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "packed", "llama", "int8")
    opened = slipstream.init_inference(tmp_path / "packed", dtype=torch.bfloat16)
    assert opened(input_ids=prompt()).logits.dtype is torch.bfloat16


def test_another_quantization_is_refused_and_the_same_in_other_words_is_not(tmp_path: Path) -> None:
    write(tmp_path / "packed", "llama", "int4")
    with pytest.raises(ConfigError, match="was packed with"):
        slipstream.init_inference(tmp_path / "packed", quant="int8")
    slipstream.init_inference(tmp_path / "packed", quant={"weight": {"num_bits": 4}, "head": "int8"})


def manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        place = folder / "slipstream.json"
        table = json.loads(place.read_text())
        change(table)
        place.write_text(json.dumps(table))

    return damage


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


QKV = "model.layers.0:qkv"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "planes cut short": (cut("planes.safetensors", -7), "planes.safetensors.* is cut short"),
    "a manifest cut short": (cut("slipstream.json", 300), "slipstream.json is not valid JSON"),
    "no planes": (lambda folder: (folder / "planes.safetensors").unlink(), "cannot be read"),
    "another format version": (manifest(lambda t: t.update(version=2)), "format version 2"),
    "another program's manifest": (manifest(lambda t: t.update(format="x")), "is not a manifest"),
    "a format that nobody knows": (manifest(lambda t: t["matrices"][QKV].update(format="int3")), "int3"),
    "groups that do not divide": (
        manifest(lambda t: t["matrices"][QKV].update(format="int4-g128")),
        r"needs \(64, 64\) in torch.uint8",
    ),
    "another shape": (manifest(lambda t: t["matrices"][QKV].update(shape=[64, 96])), "the folder again"),
    "an absurd shape": (manifest(lambda t: t["matrices"][QKV].update(shape=[1 << 50, 8])), "not that of a"),
    "a plane that is not there": (
        manifest(lambda t: t["matrices"][QKV]["planes"].__setitem__(0, "x")), "lacks the plane .x."),
    "another version's planes": (
        manifest(lambda t: t["matrices"][QKV]["planes"].pop(1)), "4 planes, but .* quantize the original"),
    "a plane named twice": (
        manifest(lambda t: t["matrices"][QKV]["planes"].__setitem__(2, t["matrices"][QKV]["planes"][1])),
        "is named twice",
    ),
    "transposed that is no truth value": (
        manifest(lambda t: t["matrices"][QKV].update(transposed=1)), "transposed=1 must be true or false"),
    "rows in another order": (
        manifest(lambda t: t["matrices"][QKV]["pieces"].reverse()), "rows in another order"),
    "rows that do not add up": (
        manifest(lambda t: t["matrices"][QKV]["pieces"].pop()), "do not add up"),
    "pieces of experts in a matrix of none": (
        manifest(lambda t: t["matrices"][QKV]["pieces"][0].append(4)), "do not add up"),
    "pieces of fewer than no experts": (
        manifest(lambda t: t["matrices"][QKV]["pieces"][0].append(-1)), "do not add up"),
    "a matrix less": (manifest(lambda t: t["matrices"].pop(QKV)), "does not fit the model"),
    "another model": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
        ) and None,
        "lacks model.layers.2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(problem: str, tmp_path: Path) -> None:
    write(tmp_path / "packed", "llama", "int4")
    damage, words = DAMAGES[problem]
    damage(tmp_path / "packed")
    with pytest.raises(WeightError, match=words) as refusal:
        slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    assert "\n" not in str(refusal.value)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "packed", "llama", "int8")
    from slipstream.weights.safe_file import SafeFile

    entry = SafeFile(tmp_path / "packed/planes.safetensors").entries[f"{QKV}:1"]
    with (tmp_path / "packed/planes.safetensors").open("r+b") as file:
        file.seek(entry.begin)
        file.write(b"\xff\xff\xff\x7f")
    with pytest.raises(WeightError, match="holds NaN or infinity"):
        slipstream.init_inference(tmp_path / "packed")


def test_plain_weights_are_not_written_beside_packed_ones(tmp_path: Path) -> None:
    engine = write(tmp_path / "packed", "llama", "int8")
    before = {file.name: file.read_bytes() for file in (tmp_path / "packed").iterdir()}
    with pytest.raises(ConfigError, match=r"packed holds packed weights \(slipstream.json\)"):
        engine.save_checkpoint(tmp_path / "packed")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "packed").iterdir()}


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ],
)
def test_a_folder_of_packed_and_plain_weights_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "packed", "llama", "int8")
    (tmp_path / "packed" / name).write_bytes(b"saved later")
    for opens in (
        lambda: slipstream.init_inference(tmp_path / "packed"),
        lambda: slipstream.init_inference(make("llama"), quant="int8", checkpoint=str(tmp_path / "packed")),
    ):
        with pytest.raises(WeightError, match=rf"slipstream.json, planes.safetensors.*{name}.*; remove"):
            opens()


def test_a_section_that_says_nothing_asks_for_nothing(tmp_path: Path) -> None:
    write(tmp_path / "packed", "llama", "int4")
    engine = slipstream.init_inference(tmp_path / "packed", quant={})
    assert {layer.format for layer in engine.report().layers} == {"int4"}


def test_the_command_packs_and_the_folder_answers(run: Run, checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    made = run("quantize", checkpoint, tmp_path / "packed", "--format", "int8", "--dtype", "float32")
    assert made.exit_code == 0, made.output
    assert (tmp_path / "packed/tokenizer.json").is_file()
    answer = run("generate", "--model", tmp_path / "packed", "-n", 8, "sky blue")
    original = slipstream.init_inference(
        checkpoint, dtype=torch.float32, quant="int8", replace_with_kernel_inject=True
    )
    assert answer.exit_code == 0, answer.output
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    turns = [{"role": "user", "content": "sky blue"}]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = original.generate(ids["input_ids"], max_new_tokens=8, do_sample=False)
    said = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said.strip() in answer.stdout
    again = run("quantize", checkpoint, tmp_path / "packed")
    assert again.exit_code == 2 and "exists already" in again.output
    shutil.rmtree(tmp_path / "packed")


def test_a_place_below_the_home_folder_is_made_there(
    checkpoint: Path,  # noqa: F811
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = run("quantize", checkpoint, "~/packed", "--format", "int8")
    assert made.exit_code == 0, made.output
    assert str(tmp_path / "packed") in made.output and (tmp_path / "packed" / "slipstream.json").is_file()


def test_the_command_takes_the_formats_that_a_configuration_takes(
    run: Run,  # noqa: F811
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = [word for name in ("format", "head", "embedding") for word in (f"--{name}", "fp6-e3m2")]
    made = run("quantize", checkpoint, tmp_path / "packed", *options)
    assert made.exit_code == 0, made.output
    report = slipstream.init_inference(tmp_path / "packed").report()
    assert {row.format for row in (*report.layers, *report.outside)} == {"fp6-e3m2"}


def test_what_does_not_divide_is_refused_before_work(run: Run, checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    refused = run("quantize", checkpoint, tmp_path / "packed", "--groups", 3)
    assert refused.exit_code == 2 and "q_groups=3" in refused.output
    assert not (tmp_path / "packed").exists()


def test_a_packed_folder_is_no_model_for_transformers(run: Run, tmp_path: Path) -> None:  # noqa: F811
    write(tmp_path / "packed", "llama", "int4")
    refused = run("inspect", tmp_path / "packed")
    assert refused.exit_code == 1 and "only an engine can run" in refused.output

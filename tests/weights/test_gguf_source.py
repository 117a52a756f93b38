"""An int4 engine takes a GGUF file's blocks as they are, and packs the rest one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import slipstream
from slipstream.errors import WeightError
from slipstream.formats import FORMATS
from slipstream.weights.gguf import gguf_to_checkpoint
from slipstream.weights.gguf_source import GgufSource, _q4, _q4_k
from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.helpers.models import close
from tests.weights.test_gguf import tiny_llama, write_gguf

KINDS = ("Q4_0", "Q4_1", "Q4_K")


def blocks(kind: str, rows: int, inputs: int) -> Any:
    """Random bytes, with numbers for the scales."""
    luck = np.random.default_rng(0)
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = luck.integers(0, 256, (rows, inputs // size, width), dtype=np.uint8)
    ends = luck.normal(size=(rows, inputs // size, 2 if kind != "Q4_0" else 1)).astype(np.float16)
    made[..., : ends.shape[-1] * 2] = ends.view(np.uint8)
    return made.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_planes_unpack_to_what_ggml_unpacks(kind: str) -> None:
    rows, inputs = 5, 512
    given = blocks(kind, rows, inputs)
    expected = torch.from_numpy(gguf.dequantize(given, gguf.GGMLQuantizationType[kind]))
    planes = (_q4_k if kind == "Q4_K" else _q4)(torch.from_numpy(given), inputs, kind)
    layout = [(shape, dtype) for shape, dtype in FORMATS["int4"].layout((rows, inputs))][:-1]
    assert [(tuple(plane.shape), plane.dtype) for plane in planes] == layout
    dense = FORMATS["int4"].unpack((*planes, torch.ones(rows)), (rows, inputs), torch.float32)
    if kind == "Q4_K":
        groups = expected.view(rows, -1, 32)
        scale, minimum = planes[1].float()[..., None], planes[2].float()[..., None]
        # Both numbers of a group are rounded to float16.
        bound = 2.0**-11 * (15 * scale.abs() + minimum.abs()) + 2.0**-20
        assert bool(((dense.view_as(groups) - groups).abs() <= bound).all())
    else:
        assert torch.equal(dense, expected)


def write_blocks(path: Path, model: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of blocks of one kind; the model gets their numbers."""
    import tests.weights.test_gguf as writing

    class Kinds:
        F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[kind]

    class Package:
        GGUFWriter, quantize, dequantize = gguf.GGUFWriter, gguf.quantize, gguf.dequantize
        GGMLQuantizationType = Kinds

    with monkeypatch.context() as patched:
        patched.setattr(writing, "gguf", Package)
        return write_gguf(path, model, quantized=True)


@pytest.mark.parametrize("inject", [True, False], ids=["injected", "plain"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_an_engine_answers_as_the_files_own_numbers(
    kind: str, inject: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    path = write_blocks(tmp_path / "tiny.gguf", model, kind, monkeypatch)
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": inject}
    quant = {"weight": {"format": "int8" if kind == "Q8_0" else "int4"}, "head": "none"}
    engine = slipstream.init_inference(path, quant=quant, **settings)
    ids = torch.randint(0, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    if kind == "Q8_0":  # packed again: as an engine of the dense numbers is
        folder = gguf_to_checkpoint(path, tmp_path / "dense")
        dense = AutoModelForCausalLM.from_pretrained(folder).eval()
        close(
            slipstream.init_inference(dense, quant=quant, **settings)(input_ids=ids).logits,
            engine(input_ids=ids).logits,
        )
    else:
        rounding = {**quant, "activation": {"enabled": True}}
        own, got = model.state_dict(), engine.state_dict()
        rounded = slipstream.init_inference(path, quant=rounding, **settings).state_dict()
        assert all(
            torch.equal(own[name], got[name]) and torch.equal(own[name], rounded[name]) for name in own
        )
        close(model(input_ids=ids).logits.detach(), engine(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["tiny.gguf", "TINY.GGUF"])
def test_the_command_takes_blocks_over_and_converts_nothing(
    name: str,
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    model = tiny_llama()
    path = write_blocks(tmp_path / name, model, "Q4_1", monkeypatch)
    made = run("quantize", path, tmp_path / "packed", "--head", "int4", "--embedding", "int4")
    assert made.exit_code == 0, made.output
    assert not (tmp_path / "cache").exists()
    engine = slipstream.init_inference(tmp_path / "packed", dtype=torch.float32)
    own, got = model.state_dict(), engine.state_dict()
    assert all(torch.equal(own[name], got[name]) for name in own if own[name].dim() == 2)
    folder = gguf_to_checkpoint(path, tmp_path / "dense")
    for word in ("hello", "he's <|im_end|>"):
        ids = [
            AutoTokenizer.from_pretrained(place)(word).input_ids for place in (folder, tmp_path / "packed")
        ]
        assert ids[0] == ids[1]
    for read in (GenerationConfig, AutoConfig):
        ends = [read.from_pretrained(place).eos_token_id for place in (folder, tmp_path / "packed")]
        assert ends == [2, 2]
    answer = run("generate", "--model", tmp_path / "packed", "-n", 3, "hello")
    assert answer.exit_code == 0, answer.output


def test_what_a_file_has_too_much_or_too_little_is_named(tmp_path: Path) -> None:
    model = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", model, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(WeightError, match=r"lacks model.layers.1.mlp.up_proj.weight"):
        slipstream.init_inference(path, quant="int4")
    path = write_gguf(tmp_path / "whole.gguf", model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(WeightError, match="has output.weight, which the model does not use"):
        GgufSource(path, model.config, {n: s for n, s in shapes.items() if n != "lm_head.weight"})
    with pytest.raises(WeightError, match=r"output_norm.weight has the shape \(64,\)"):
        GgufSource(path, model.config, shapes | {"model.norm.weight": (63,)})

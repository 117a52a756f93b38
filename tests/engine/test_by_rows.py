"""Matrices that a model stores transposed lie by rows once it is fused; nothing else changes for anybody."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.engine.pipeline import shared_copy
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.spec import Role
from tests.engine.test_drop_in import storages
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import close, inject, left_padded, make, pair, prompt, roads

MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
WIDE = {"n_embd": 64}

by_rows = pytest.mark.skipif(
    not slipstream.engine.build.offer(torch.float32)["linear"].by_rows,
    reason="no kernel here reads rows faster than columns",
)
pytestmark = by_rows


def matrices(model: Any) -> dict[str, nn.Parameter]:
    """The matrices that GPT-2 stores transposed."""
    found = ((f"transformer.h.{i}.{name}.weight", i, name) for i in range(2) for name in MATRICES)
    return {full: model.transformer.h[i].get_parameter(f"{name}.weight") for full, i, name in found}


def lie_by_rows(tensors: Any) -> bool:
    return all(tensor.mT.is_contiguous() and not tensor.is_contiguous() for tensor in tensors)


def planes(engine: Any) -> list[Tensor]:
    """Of the blocks' dense matrices."""
    blocks = [injected_state(m).block for m in engine.module.modules() if is_injected(m)]
    weights = [w for block in blocks for w in block.weights.matrices.values() if w.format == "plain"]
    return [plane for weight in weights for plane in weight.planes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_memory_is_by_rows_and_shapes_names_and_values_stay(dtype: torch.dtype) -> None:
    original = make("gpt2").to(dtype)
    engine = inject(original, dtype=dtype)
    found, expected = engine.state_dict(), original.state_dict()
    assert list(found) == list(expected)
    assert all(found[n].shape == t.shape and torch.equal(found[n], t) for n, t in expected.items())
    assert lie_by_rows(matrices(engine.module).values())
    assert len(planes(engine)) == 8 and all(plane.is_contiguous() for plane in planes(engine))
    dense = sum(p.numel() * p.element_size() for p in original.parameters())
    assert sum(storages(engine.module).values()) <= 1.02 * dense


@pytest.mark.parametrize("kind", ["PreTrainedModel", "engine", "file"])
def test_what_is_saved_loads_as_the_original(kind: str, tmp_path: Path) -> None:
    both = pair("gpt2")
    if kind == "PreTrainedModel":
        both.engine.module.save_pretrained(tmp_path)
    elif kind == "engine":
        both.engine.save_checkpoint(tmp_path)
    else:
        both.original.config.save_pretrained(tmp_path)
        torch.save(both.engine.module.state_dict(), tmp_path / "pytorch_model.bin")
    if kind == "file":
        state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    else:
        state = type(both.original).from_pretrained(tmp_path).state_dict()
    expected = both.original.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_a_description_that_the_engine_writes_loads_again(tmp_path: Path) -> None:
    original = make("gpt2")
    inject(original, save_mp_checkpoint_path=str(tmp_path / "made"))
    with torch.device("meta"):
        hollow = type(original)(original.config)
    engine = slipstream.init_inference(
        hollow,
        checkpoint=str(tmp_path / "made" / "ds_inference_config.json"),
        dtype=torch.float32,
        replace_with_kernel_inject=True,
    )
    close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_a_refresh_and_a_reload_are_followed_and_move_nothing(tmp_path: Path) -> None:
    engine, other = inject(make("gpt2")), make("gpt2", seed=1)
    where = [plane.data_ptr() for plane in planes(engine)]
    engine.refresh_weights(other.state_dict())
    close(other(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    engine.refresh_weights(inject(make("gpt2", seed=2)).state_dict())  # which lie by rows themselves
    third = make("gpt2", seed=2)
    close(third(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    other.save_pretrained(tmp_path)
    engine.load_checkpoint(str(tmp_path))
    close(other(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    assert [plane.data_ptr() for plane in planes(engine)] == where


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "whole": lambda weight: weight.mul_(-0.5),
    "a part": lambda weight: weight[3:9, ::2].zero_(),
    "from another layout": lambda weight: weight.copy_(weight.clone(memory_format=torch.contiguous_format)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_changed_in_place_count(name: str) -> None:
    both = pair("gpt2")
    with torch.no_grad():
        for model in (both.original, both.engine.module):
            CHANGES[name](model.transformer.h[1].mlp.c_fc.weight)
    close(both.original(input_ids=prompt()).logits.detach(), both.engine(input_ids=prompt()).logits)
    expected = both.original.generate(prompt(), max_new_tokens=4)
    with roads(both.engine) as counts:
        assert torch.equal(both.engine.generate(prompt(), max_new_tokens=4), expected)
    assert counts.taken == "engine"


def test_what_the_user_holds_of_a_parameter_goes_on_to_act() -> None:
    original = make("gpt2")
    model = copy.deepcopy(original)
    held = {name: weight.data_ptr() for name, weight in matrices(model).items()}
    own = matrices(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert lie_by_rows(own.values()) and all(own[name].data_ptr() != at for name, at in held.items())
    for weights in (own, matrices(original)):
        weights["transformer.h.0.mlp.c_proj.weight"].data.mul_(0.5)
    close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_models_over_the_same_memory_keep_theirs() -> None:
    original = make("gpt2")
    model = copy.deepcopy(original)
    other, state = shared_copy(model), model.state_dict()
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    expected = original(input_ids=prompt()).logits.detach()
    close(expected, engine(input_ids=prompt()).logits)
    assert torch.equal(other(input_ids=prompt()).logits.detach(), expected)
    assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in state.items())
    assert all(weight.is_contiguous() for weight in matrices(other).values())
    second = slipstream.init_inference(other, dtype=torch.float32, replace_with_kernel_inject=True)
    close(expected, second(input_ids=prompt()).logits)


def test_layers_that_share_a_parameter_go_on_sharing_it() -> None:
    original = make("gpt2")
    original.transformer.h[1].mlp.c_fc.weight = original.transformer.h[0].mlp.c_fc.weight
    engine = inject(original)
    close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    first, second = (layer.mlp.c_fc.weight for layer in engine.module.transformer.h)
    assert first.data_ptr() == second.data_ptr() and lie_by_rows([first, second])


@pytest.mark.parametrize("kind", ["between processes", "of one tensor"])
def test_memory_that_is_shared_stays_as_it_lies(kind: str) -> None:
    original = make("gpt2")
    model = copy.deepcopy(original)
    if kind == "between processes":
        model.share_memory()
    else:
        flat = torch.cat([p.data.flatten() for p in model.parameters()])
        for p, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            p.data = part.view(p.shape)
    held = {name: weight.data_ptr() for name, weight in matrices(model).items()}
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert {name: weight.data_ptr() for name, weight in matrices(engine.module).items()} == held
    close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_an_error_while_the_engine_is_built_leaves_the_model_as_it_lay() -> None:
    model = make("gpt2")
    where = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    model.transformer.h[1].mlp.act = nn.Sigmoid()  # no GPT-2 has this one
    with pytest.raises(slipstream.errors.InjectionError):
        slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    slipstream.inspect(make("gpt2"))
    assert {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()} == where


def test_a_checkpoint_is_laid_out_as_it_is_read(tmp_path: Path) -> None:
    original = make("gpt2")
    original.save_pretrained(tmp_path)
    engine = slipstream.init_inference(str(tmp_path), dtype=torch.float32, replace_with_kernel_inject=True)
    assert lie_by_rows(matrices(engine.module).values())
    ids, mask = left_padded()
    given = {"input_ids": ids, "attention_mask": mask}
    close(original(**given).logits.detach(), engine(**given).logits, mask=mask)
    state = engine.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in original.state_dict().items())


def test_packed_weights_are_the_same_from_either_layout(tmp_path: Path) -> None:
    original = make("gpt2", **WIDE)
    turned = copy.deepcopy(original)
    for weight in matrices(turned).values():
        weight.data = weight.data.mT.contiguous().mT
    for quant in ("int8", "int4"):
        one, other = (inject(model, quant=quant) for model in (original, turned))
        assert torch.equal(one(input_ids=prompt()).logits, other(input_ids=prompt()).logits)


def test_projections_that_stay_dense_beside_packed_ones_are_laid_out() -> None:
    original = make("gpt2", **WIDE)
    model = copy.deepcopy(original)
    quant = {"weight": {"num_bits": 8}, "qkv": {"enabled": False}}
    engine = slipstream.init_inference(
        model, quant=quant, dtype=torch.float32, replace_with_kernel_inject=True
    )
    blocks = [injected_state(m).block for m in engine.module.modules() if is_injected(m)]
    qkv = [block.weights.matrices[Role.QKV] for block in blocks]
    assert all(weight.format == "plain" and weight.planes[0].is_contiguous() for weight in qkv)
    assert lie_by_rows(layer.attn.c_attn.weight for layer in engine.module.transformer.h)


def test_the_original_code_and_a_copy_answer_as_before() -> None:
    both = pair("gpt2")
    for engine in (both.engine, copy.deepcopy(both.engine)):
        given = {"input_ids": prompt(), "output_attentions": True}
        expected, got = both.original(**given), engine(**given)
        close(expected.logits.detach(), got.logits)
        assert len(got.attentions) == len(expected.attentions)
        assert lie_by_rows(matrices(engine.module).values())
        engine.to(torch.float64)  # which no kernel multiplies
        assert lie_by_rows(matrices(engine.module).values())


STORED_TRANSPOSED = {f.name: (f, tiny) for f, tiny in VARIANTS if "transposed=True" in repr(f.recipes)}


@pytest.mark.parametrize("name", STORED_TRANSPOSED)
def test_every_family_that_stores_matrices_transposed_has_them_by_rows(name: str) -> None:
    family, tiny = STORED_TRANSPOSED[name]
    engine = slipstream.init_inference(
        peaked_model(tiny), dtype=torch.float32, replace_with_kernel_inject=True
    )
    states = [injected_state(m) for m in engine.module.modules() if is_injected(m)]
    pieces = [piece for state in states for plan in state.plans.values() for piece in plan.weight]
    assert any(piece.transposed for piece in pieces)
    if not any(piece.transposed and piece.experts for piece in pieces):  # stacks that lie flat stay
        assert all(plane.is_contiguous() for plane in planes(engine)), family.name


_MEASURED = """
import gc, torch, transformers, slipstream
from slipstream.devices import CpuDevice
from slipstream.weights.heap import give_back
def model(layers):
    config = transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=768, n_layer=layers, n_head=12)
    return transformers.GPT2LMHeadModel(config).eval()
def engine(model):
    return slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
engine(model(1))
large = model(12)
gc.collect()
give_back()
before = resident()
made = engine(large)
print((resident() - before) / sum(p.nbytes for p in large.transformer.h.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no Linux")
def test_memory_does_not_grow_by_what_was_laid_out() -> None:
    said = subprocess.run(
        [sys.executable, "-c", _MEASURED], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert float(said.stdout) < 0.04, (
        said.stdout
    )  # 0.01, which huge pages fill; 0.09 where nothing is given back

"""Where a device wants the rows of q, k and v (gate and up) in one run, nothing else changes for anybody."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from slipstream.devices import CpuDevice
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.spec import Role
from tests.engine.test_drop_in import storages
from tests.helpers.models import Pair, close, left_padded, pair, prompt, roads

KINDS = ["llama", "gpt2", "bloom", "mixtral", "dbrx"]


@pytest.fixture(params=KINDS)
def joined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """An engine on a CPU that has rows joined, as a GPU does."""
    monkeypatch.setattr(CpuDevice, "joins_rows", True)
    return pair(request.param)


def test_every_dense_matrix_is_one_contiguous_plane(joined: Pair) -> None:
    blocks = [injected_state(m).block for m in joined.engine.module.modules() if is_injected(m)]
    weights = [block.weights.matrices for block in blocks]
    assert len(weights) == 2 and all(Role.QKV in matrices for matrices in weights)
    for weight in (w for matrices in weights for w in matrices.values()):
        assert len(weight.planes) == 1 and weight.planes[0].is_contiguous()
        assert weight.planes[0].shape == weight.shape


def test_the_model_says_the_same_and_its_tensors_are_held_once(joined: Pair) -> None:
    ids, mask = left_padded()
    given = {"input_ids": ids, "attention_mask": mask}
    for engine in (joined.engine, copy.deepcopy(joined.engine)):
        close(joined.original(**given).logits.detach(), engine(**given).logits, mask=mask)
        with roads(engine) as counts:
            tokens = engine.generate(**given, max_new_tokens=6)
        assert counts.taken == "engine"
        assert torch.equal(tokens, joined.original.generate(**given, max_new_tokens=6))
        dense = sum(p.numel() * p.element_size() for p in joined.original.parameters())
        assert sum(storages(engine.module).values()) <= 1.02 * dense
        expected = joined.original.state_dict()
        state = engine.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())
        engine.to(torch.bfloat16)
        assert sum(storages(engine.module).values()) <= 1.02 * dense / 2


def test_a_saved_checkpoint_loads_as_the_original(joined: Pair, tmp_path: Path) -> None:
    joined.engine.save_checkpoint(tmp_path)
    again = type(joined.original).from_pretrained(tmp_path)
    expected = joined.original.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_values_changed_in_place_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "joins_rows", True)
    both = pair("llama")
    for model in (both.original, both.engine.module):
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.mul_(-1.0)
            model.model.layers[0].mlp.up_proj.weight.add_(0.1)
    close(both.original(input_ids=prompt()).logits.detach(), both.engine(input_ids=prompt()).logits)
    with roads(both.engine) as counts:
        tokens = both.engine.generate(prompt(), max_new_tokens=4)
    assert counts.taken == "engine"
    assert torch.equal(tokens, both.original.generate(prompt(), max_new_tokens=4))

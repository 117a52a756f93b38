"""Layers whose family defines the order of their branches (`courses`): properties of single calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.kernels.cpu import moe as native
from slipstream.ops import moe as plain
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.models import blocks_that_run

TOLERANCE = 1e-4
"""The promised bound for float32."""


def _both(name: str) -> tuple[Any, Any]:
    (variant,) = (v for v in VARIANTS if label(v) == name)
    original: Any = peaked_model(variant[1])
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}
    return original, slipstream.init_inference(copy.deepcopy(original), **settings)


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(3))


def test_each_row_has_the_adapter_of_its_language() -> None:
    original, engine = _both("xmod")
    ids = _ids(3, 7)
    outs = []
    with torch.no_grad():
        for languages in ([0, 1, 0], [1, 1, 1]):
            told = torch.tensor(languages)
            with blocks_that_run() as ran:
                outs.append(engine(ids, lang_ids=told).logits)
            assert len(ran.blocks) == original.config.num_hidden_layers
            torch.testing.assert_close(outs[-1], original(ids, lang_ids=told).logits, atol=1e-4, rtol=1e-4)
    assert float((outs[0][0] - outs[1][0]).abs().max()) > 0.1 and torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("name", ["doge", "doge few are heard, window, biases"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_mask_that_values_make_counts_those_of_the_cache(name: str, padded: bool) -> None:
    original, engine = _both(name)
    ids, mask = _ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    caches = [transformers.DynamicCache(config=original.config) for _ in range(2)]
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 10), (10, 11), (11, 12)):
            given = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], "use_cache": True}
            with blocks_that_run() as ran:
                got = engine(**given, past_key_values=caches[1]).logits
            assert len(ran.blocks) == original.config.num_hidden_layers
            expected = original(**given, past_key_values=caches[0]).logits
            real = mask[:, begin:end].bool()
            assert float((expected - got)[real].abs().max()) <= TOLERANCE


def test_experts_that_answer_what_they_are_asked_are_weighed_as_the_others() -> None:
    original, engine = _both("longcat_flash")
    ids, outs = _ids(2, 9), []
    for favour in (9.0, -9.0):  # identity experts are never chosen, then always
        for model in (original, engine.module):
            for layer in model.model.layers:
                bias = layer.mlp.router.e_score_correction_bias
                bias.zero_()[: original.config.n_routed_experts] = favour
        with torch.no_grad():
            outs.append(engine(ids).logits)
            assert float((original(ids).logits - outs[-1]).abs().max()) <= TOLERANCE
    assert float((outs[0] - outs[1]).abs().max()) > 0.1


def test_kernels_are_handed_as_many_experts_by_both_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    original, engine = _both("longcat_flash")
    mix, counts = plain.mix, set()

    def counted(x: Any, routed: Any, first: Any, second: Any, **how: Any) -> torch.Tensor:
        counts.add((first.shape[0], *(len(part) for part in (*first.planes, *second.planes))))
        return mix(x, routed, first, second, **how)

    for module in (plain, native):
        monkeypatch.setattr(module, "mix", counted)
    with torch.no_grad():
        engine(_ids(2, 9))
    assert counts == {(original.config.n_routed_experts,) * 3}

"""Experts with equal scores, of a router that was never trained or has rows twice: torch's choice counts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.families import FAMILIES, Family, Tiny
from tests.families.sweep import peaked_model

MIXTURES = [
    pytest.param(tiny, family, id=f"{family.name}-{tiny.label or 'plain'}")
    for family in FAMILIES.values()
    for tiny in family.tiny
    if tiny.model.endswith("ForCausalLM")
    and hasattr(transformers, tiny.model)
    and any("expert" in name for name in tiny.options)
]


@pytest.mark.parametrize("twice", [False, True], ids=["zeros", "rows twice"])
@pytest.mark.parametrize(("tiny", "family"), MIXTURES)
def test_the_choice_among_equals_is_torchs(tiny: Tiny, family: Family, twice: bool) -> None:
    original: Any = peaked_model(tiny)
    routers = [
        p
        for name, p in original.named_parameters()
        if p.dim() == 2 and any(part in name for part in ("router", "gate.weight", "gate.wg"))
    ]
    if not routers:
        pytest.skip("its router is not a matrix of that name")
    with torch.no_grad():
        for router in routers:
            if twice and router.shape[0] % 2 == 0:
                router[router.shape[0] // 2 :] = router[: router.shape[0] // 2]
            elif not twice:
                router.zero_()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    with torch.no_grad():
        expected, got = original(ids).logits, engine(ids).logits
    assert float((expected - got).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    first = (model.generate(ids, **options).logits[0] for model in (original, engine))
    expected, got = first
    assert float((expected - got).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.skipif(not hasattr(transformers, "Cohere2MoeConfig"), reason="an older transformers")
def test_sigmoids_that_saturate_do_not_rank_the_experts_of_cohere2() -> None:
    tiny = next(t for t in FAMILIES["cohere2_moe"].tiny if t.options.get("expert_selection_fn") != "softmax")
    options = {**tiny.options, "expert_selection_fn": "sigmoid", "norm_topk_prob": True}
    original: Any = peaked_model(replace(tiny, options=options))
    with torch.no_grad():
        for name, p in original.named_parameters():
            if name.endswith("mlp.gate.weight"):
                p[:, 0] = torch.linspace(5.5, 4, p.shape[0])
        original.get_input_embeddings().weight[7].mul_(0.1)[0] = 20
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    ids = torch.tensor([[5, 7, 9]])
    with torch.no_grad():
        expected, got = original(ids).logits, engine(ids).logits
    assert float((expected - got).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))

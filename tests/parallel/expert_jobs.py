"""What ranks that spread experts do in tests: each function runs on every rank of the pool at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import slipstream
from tests.families.sweep import NEW_TOKENS, VARIANTS, batch, label, peaked_model
from tests.helpers.models import make
from tests.parallel.jobs import parameter_bytes
from tests.parallel.pool import GROUPS, WORLD


def spreading(model: nn.Module, tp: int, ep: int, ranks: int, **settings: Any) -> slipstream.InferenceEngine:
    """An engine on the first ranks: by sizes where those are all there are, else by groups."""
    if ranks == WORLD:
        parallel: dict[str, Any] = {"tensor_parallel": {"tp_size": tp}, "moe": {"ep_size": ep}}
    else:
        assert ranks == ep and tp in (1, ranks)
        parallel = {"moe": {"ep_group": GROUPS[ep]}}
        parallel |= {"tensor_parallel": {"tp_group": GROUPS[tp]}} if tp > 1 else {}
    settings = {"dtype": torch.float32, "replace_with_kernel_inject": True, **parallel, **settings}
    return slipstream.init_inference(model, **settings)


def sweep(index: int, tp: int, ep: int, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One tiny model beside itself in one process: ranks with one call, then each team with its own."""
    original = peaked_model(VARIANTS[index][1])
    engine = spreading(copy.deepcopy(original), tp, ep, ranks, **settings)
    reference: Any = original
    if settings:
        alone = {"dtype": torch.float32, "replace_with_kernel_inject": True, **settings}
        reference = slipstream.init_inference(copy.deepcopy(original), **alone)
    ids, left, right = batch(original.get_input_embeddings().weight.shape[0])
    team = dist.get_rank() // tp
    with torch.no_grad():
        errors = [_off(reference, engine, ids, mask) for mask in (left, right)]
        options: dict[str, Any] = {"attention_mask": left, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        same = [torch.equal(reference.generate(ids, **options), engine.generate(ids, **options))]
        # Rows, lengths and new tokens of its own for each team; one of them is over long before the others.
        own, seen = ids[: 3 - team % 3, team:], left[: 3 - team % 3, team:]
        errors.append(_off(reference, engine, own, seen))
        options |= {"attention_mask": seen, "max_new_tokens": NEW_TOKENS - 3 * (team % 3)}
        same.append(torch.equal(reference.generate(own, **options), engine.generate(own, **options)))
    return {"error": max(errors), "same": all(same), "level": engine.report().level}


def _off(reference: Any, engine: Any, ids: Any, mask: Any) -> float:
    expected = reference(input_ids=ids, attention_mask=mask).logits
    got = engine(input_ids=ids, attention_mask=mask).logits
    return float((expected - got).abs()[mask.bool()].max())


def rounded(index: int) -> list[tuple[float, float]]:
    """In bfloat16, by token: how near its choice of experts is to another one, and how far ranks are off."""
    original = peaked_model(VARIANTS[index][1])
    engine = spreading(copy.deepcopy(original), 1, 2, 2, dtype=torch.bfloat16)
    alone = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.bfloat16, replace_with_kernel_inject=True
    )
    ids, left, right = batch(original.get_input_embeddings().weight.shape[0])
    chosen, rows = original.config.num_experts_per_tok, []
    with torch.no_grad():
        for mask in (left, right):
            inputs = {"input_ids": ids, "attention_mask": mask}
            scores = original(**inputs, output_router_logits=True).router_logits
            ordered = torch.stack(scores).sort(-1, descending=True).values
            margins = (ordered[..., chosen - 1] - ordered[..., chosen]).amin(0).view(mask.shape)
            errors = (alone(**inputs).logits - engine(**inputs).logits).abs().amax(-1)
            seen = mask.bool()
            rows += zip(margins[seen].tolist(), errors[seen].tolist(), strict=True)
    return rows


def sampled(index: int) -> list[Any]:
    """Tokens that two ranks with one call sample, then those of a call of its own, beside one process's."""
    original = peaked_model(VARIANTS[index][1])
    engine = spreading(copy.deepcopy(original), 1, 2, 2)
    alone = slipstream.init_inference(original, dtype=torch.float32, replace_with_kernel_inject=True)
    torch.manual_seed(100 + dist.get_rank())
    ids, left, _ = batch(engine.get_input_embeddings().weight.shape[0])
    options: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 1.5, "max_new_tokens": 10}
    shared = engine.generate(ids, attention_mask=left, **options).tolist()
    own, rows = [], ids[dist.get_rank() :, 6:]
    for one in (engine, alone):
        torch.manual_seed(7 + dist.get_rank())
        own.append(one.generate(rows, **options).tolist())
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    own += [one.generate(rows, **beams).tolist() for one in (engine, alone)]
    return [shared, own]


def failing(index: int) -> str:
    """Calls of their own, of which the first rank's is refused; what each rank says of its own."""
    original = peaked_model(VARIANTS[index][1])
    engine = spreading(copy.deepcopy(original), 1, 2, 2, max_out_tokens=24)
    ids = torch.arange(5, 25 if dist.get_rank() == 0 else 15)[None]
    try:
        got = engine.generate(ids, max_new_tokens=8, do_sample=False)
    except slipstream.TokenLimitError as error:
        return f"refused: {error}"
    return f"same: {torch.equal(got, original.generate(ids, max_new_tokens=8, do_sample=False))}"


def interrupted(index: int) -> str:
    """Calls of their own, of which the first rank's is interrupted after a few tokens."""
    original = peaked_model(VARIANTS[index][1])
    engine = spreading(copy.deepcopy(original), 1, 2, 2)
    first = dist.get_rank() == 0
    ids = torch.arange(5, 20 if first else 15)[None]
    try:
        got = engine.generate(
            ids, max_new_tokens=8, do_sample=False, streamer=_Interrupting() if first else None
        )
    except KeyboardInterrupt:
        return "interrupted"
    return f"same: {torch.equal(got, original.generate(ids, max_new_tokens=8, do_sample=False))}"


class _Interrupting:
    """A streamer at whose third token the user has seen enough."""

    def __init__(self) -> None:
        self.tokens = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens > 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


def apart_with_maps(index: int) -> str:
    """Attention maps in calls of their own, which no rank can make alone."""
    model = peaked_model(VARIANTS[index][1])
    model.set_attn_implementation("eager")
    engine = spreading(model, 1, 2, 2)
    ids = torch.tensor([[5, 6, 7 + dist.get_rank()]])
    try:
        engine(ids, output_attentions=True)
    except slipstream.RequestError as error:
        return str(error)
    return "served"


def state_dicts(index: int, tp: int, ep: int, ranks: int) -> float:
    """Largest difference between the model's tensors and those that the ranks put together again."""
    model = peaked_model(VARIANTS[index][1])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = spreading(model, tp, ep, ranks).state_dict()
    assert found.keys() == expected.keys()
    return max(float((found[name].float() - tensor.float()).abs().max()) for name, tensor in expected.items())


def refused(index: int, settings: dict[str, Any]) -> None:
    """Settings that no engine is built with."""
    slipstream.init_inference(peaked_model(VARIANTS[index][1]), **{"dtype": torch.float32, **settings})


def too_many() -> None:
    """More places than experts."""
    spreading(make("mixtral", num_local_experts=3), 1, 4, 4)


def grouped(tp: list[list[int]], ep: list[list[int]], slices: list[list[int]] | None = None) -> str:
    """An engine upon groups that a user made of four ranks; its report."""
    own = [_made(parts) for parts in (tp, ep, *([slices] if slices else []))]
    index = next(i for i, variant in enumerate(VARIANTS) if label(variant) == "mixtral")
    experts = {"ep_group": own[1]} | ({"ep_mp_group": own[2]} if slices else {})
    original = peaked_model(VARIANTS[index][1])
    engine = slipstream.init_inference(
        copy.deepcopy(original),
        dtype=torch.float32,
        replace_with_kernel_inject=True,
        tensor_parallel={"tp_group": own[0]},
        moe=experts,
    )
    ids, left, _ = batch(original.get_input_embeddings().weight.shape[0])
    assert _off(original, engine, ids, left) <= 1e-4
    return str(engine.report())


def _made(parts: list[list[int]]) -> Any:
    made = [dist.new_group(ranks) for ranks in parts]
    return next(group for group, ranks in zip(made, parts, strict=True) if dist.get_rank() in ranks)


def residual() -> float:
    """Error of a model with residual experts, which a family of the user's describes, on two ranks."""
    from tests.parallel.residual import FAMILY, Layer, Model

    original = Model().eval()
    engine = spreading(
        copy.deepcopy(original), 1, 2, 2, replace_with_kernel_inject=False, injection_policy={Layer: FAMILY}
    )
    assert engine.report().level == "block"
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        return float((engine(x) - original(x)).abs().max())


def held(index: int, tp: int, ep: int, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a rank holds, beside what one process holds."""
    model = peaked_model(VARIANTS[index][1])
    experts = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if ".experts." in n)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = spreading(model, tp, ep, ranks, **settings)
    return {
        "experts": experts,
        "whole": whole,
        "own": parameter_bytes(engine),
        "text": str(engine.report()),
        "family": label(VARIANTS[index]),
    }

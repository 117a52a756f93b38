"""Where torch's operations are traced, transformed or counted, layers run their own code, which has all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from slipstream.devices.record import Recorder
from slipstream.model.fused.state import injected_state, is_injected
from tests.helpers.models import Pair, close, pair, prompt, roads

KINDS = ("llama", "gpt2", "bloom", "bert", "distilbert")


class _Logits(nn.Module):
    """A model of ids, without a cache, that answers with a tensor."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, return_dict=False)[0]
        return logits


def _pair(kind: str, **settings: Any) -> Pair:
    given = {} if "bert" in kind else {"use_cache": False}
    return pair(kind, attn_implementation="eager", settings=settings, **given)


def _callers(two: Pair) -> tuple[Any, Any]:
    return two.engine, two.engine.module


def _declined(two: Pair) -> list[int]:
    return [injected_state(layer).declined for layer in two.engine.module.modules() if is_injected(layer)]


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_computes_with_what_it_is_given(kind: str, quant: str | None) -> None:
    two = _pair(kind, quant=quant) if quant else _pair(kind)
    for model in _callers(two):
        with torch.no_grad():
            traced = torch.jit.trace(_Logits(model), (prompt(),), check_trace=False)
            close(two.engine(prompt(seed=8)).logits, traced(prompt(seed=8)), atol=1e-3)


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("kind", ["bloom", "bert", "distilbert"])
def test_so_does_a_graph_of_make_fx(kind: str, quant: str | None) -> None:
    two = _pair(kind, quant=quant) if quant else _pair(kind)
    for model in _callers(two):
        with torch.no_grad():
            graph = make_fx(_Logits(model))(prompt())
            close(two.engine(prompt(seed=8)).logits, graph(prompt(seed=8)), atol=1e-3)


def _embedded(two: Pair) -> tuple[Tensor, Tensor]:
    """What enters the layers, and a direction."""
    x = two.original.get_input_embeddings()(prompt()).detach()
    return x, torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_derivatives_go_forwards(kind: str, quiet: bool) -> None:
    two = _pair(kind)
    x, direction = _embedded(two)

    def tangent(model: Any) -> Tensor:
        with torch.set_grad_enabled(not quiet), forward_ad.dual_level():
            logits = model(inputs_embeds=forward_ad.make_dual(x, direction)).logits
            return forward_ad.unpack_dual(logits).tangent.detach().clone()

    for model in _callers(two):
        close(tangent(two.original), tangent(model), atol=1e-2)


@pytest.mark.parametrize("quant", [None, "int8"])
def test_functions_of_functions_work(quant: str | None) -> None:
    two = _pair("llama", quant=quant) if quant else _pair("llama")
    two.original.load_state_dict(two.engine.module.state_dict())
    x, direction = _embedded(two)

    def push(model: Any) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = torch.func.jvp(
            lambda t: model(inputs_embeds=t).logits, (x,), (direction,)
        )
        return out[0].detach(), out[1].detach()

    def rows(model: Any) -> Tensor:
        with torch.no_grad():
            return torch.func.vmap(lambda ids: model(ids[None]).logits[0])(prompt())

    close(push(two.original), push(two.engine.module), atol=1e-2)
    for model in _callers(two):
        close(rows(two.original), rows(model), atol=1e-3)


def test_rounded_inputs_have_a_derivative_all_the_same() -> None:
    two = _pair("llama", quant={"weight": {"format": "int8"}, "activation": {"enabled": True}})
    x, direction = _embedded(two)
    pushed = torch.func.jvp(lambda t: two.engine.module(inputs_embeds=t).logits, (x,), (direction,))[1]
    assert pushed.abs().max() > 1


def test_operations_are_counted() -> None:
    two = _pair("llama")

    def count(model: Any, ask: Callable[[Any], Any]) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            ask(model)
        return int(counter.get_total_flops())

    for model in _callers(two):
        for ask in (lambda m: m(prompt()), lambda m: m.generate(prompt(), max_new_tokens=3, use_cache=True)):
            assert count(two.original, ask) == count(model, ask) > 0


def test_afterwards_blocks_run_again() -> None:
    two = _pair("llama")
    with torch.no_grad():
        torch.jit.trace(_Logits(two.engine), (prompt(),), check_trace=False)
    before = _declined(two)
    close(two.original(prompt()).logits.detach(), two.engine(prompt()).logits)
    assert _declined(two) == before == [1, 1]
    with roads(two.engine) as counts:
        two.engine.generate(prompt(), max_new_tokens=3, use_cache=True)
    assert counts.taken == "engine"


def test_a_recording_of_our_own_is_of_blocks() -> None:
    two = _pair("llama")
    inner, x = two.engine.module.model, torch.randn(1, 5, 32)
    with torch.no_grad():
        angles = inner.rotary_emb(x, torch.arange(5)[None])
        with Recorder():
            inner.layers[0](x, position_embeddings=angles)
    assert _declined(two) == [0, 0]

"""`torch.compile` upon an engine, and upon a model with fused layers: both go on as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from slipstream.model.fused.defer import current
from slipstream.model.fused.watch import wants_original
from tests.helpers.models import close, inject, make, pair, prompt


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_an_engine_is_left_alone(kind: str) -> None:
    both, counter = pair(kind), CompileCounter()
    compiled = torch.compile(both.engine, backend=counter)
    for _ in range(2):
        close(both.original(input_ids=prompt())[0].detach(), compiled(input_ids=prompt())[0])
    assert counter.frame_count == 0


@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_fused_layers_are_left_alone(kind: str) -> None:
    both = pair(kind)
    expected = both.original(input_ids=prompt())[0].detach()
    compiled = torch.compile(both.engine.module, backend="eager")
    for _ in range(2):
        close(expected, compiled(input_ids=prompt())[0].detach())
        with torch.no_grad():  # where layers wait for each other, if nobody compiles
            close(expected, compiled(input_ids=prompt())[0])
    assert current() is None
    close(expected, both.engine(input_ids=prompt())[0])


def test_a_compiled_forward_that_was_interrupted_is_no_part_of_the_next_one() -> None:
    both = pair("llama")
    model, interrupts = both.engine.module, [False]

    def interrupt(*_: Any) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt

    model.model.layers[1].register_forward_pre_hook(interrupt)
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=prompt(), output_attentions=True)
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        compiled(input_ids=prompt(), output_attentions=True)
    interrupts[0] = False
    seen: list[bool] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(wants_original()))
    close(both.original(input_ids=prompt())[0].detach(), model(input_ids=prompt())[0].detach())
    assert seen == [False]


def test_packed_layers_are_left_alone() -> None:
    both = pair("llama", settings={"quant": "int8"})
    expected = both.engine(input_ids=prompt()).logits
    compiled = torch.compile(both.engine.module, backend="eager")
    with torch.no_grad():
        close(expected, compiled(input_ids=prompt()).logits)


def test_an_engine_is_compiled_as_deepspeeds_is() -> None:
    both, counter = pair("llama", settings={"replace_with_kernel_inject": True}), CompileCounter()
    engine = both.engine
    assert not engine.is_compiled
    engine.compile(counter, compile_kwargs={"dynamic": False})
    engine.compile(backend="no such backend")  # the second one does nothing
    assert engine.is_compiled
    close(both.original(input_ids=prompt())[0].detach(), engine(input_ids=prompt())[0])
    assert counter.frame_count == 0
    twin = copy.deepcopy(engine)
    assert not twin.is_compiled
    close(engine(input_ids=prompt())[0], twin(input_ids=prompt())[0])
    engine.destroy()
    assert not engine.is_compiled


def test_layers_that_run_their_own_code_are_compiled() -> None:
    original, counter = make("llama"), CompileCounter()
    engine = inject(original, replace_with_kernel_inject=False)
    engine.compile(backend=counter, fullgraph=False)
    close(original(input_ids=prompt())[0].detach(), engine(input_ids=prompt())[0])
    assert counter.frame_count > 0

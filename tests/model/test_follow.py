"""A layer that is handed what the one before it was is not asked again; another one is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels.cpu.library import refuse
from slipstream.model.block.layer_call import LayerSignature
from tests.helpers.models import Pair, blocks_that_run, close, pair, prompt

pytestmark = pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))


@pytest.fixture(scope="module")
def bert() -> Pair:
    return pair("bert", "BertModel", num_hidden_layers=4)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each call of a layer whose arguments were read."""
    seen: list[str] = []
    own = LayerSignature.read

    def counted(self: LayerSignature, args: Any, kwargs: Any, spec: Any) -> Any:
        seen.append(self.hidden)
        return own(self, args, kwargs, spec)

    monkeypatch.setattr(LayerSignature, "read", counted)
    return seen


def told(**more: Tensor) -> dict[str, Tensor]:
    """Inputs with places, upon which the model's own loop runs: it does not answer at once."""
    return {"input_ids": prompt(2, 9), "position_ids": torch.arange(9)[None], **more}


def test_one_layer_is_asked_for_all(bert: Pair, read: list[str]) -> None:
    inputs = told()
    with torch.no_grad():
        close(bert.original(**inputs), bert.engine(**inputs))
    assert len(read) == 1


class Loop(nn.Module):
    """Hands its layers a mask from the middle on, by place or by name."""

    def __init__(self, layers: Any, by_name: bool) -> None:
        super().__init__()
        self.layer, self.by_name = layers, by_name

    def forward(self, x: Tensor, mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        hidden = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool)
        hidden[..., 4:, 2] = False
        for index, layer in enumerate(self.layer):
            given = hidden if index >= 2 else None
            x = layer(x, attention_mask=given) if self.by_name else layer(x, given)
        return (x,)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_mask_that_changes_on_the_way_is_read(bert: Pair, by_name: bool, read: list[str]) -> None:
    models = copy.deepcopy(bert.original), copy.deepcopy(bert.engine)
    answers = []
    for model, base in ((models[0], models[0]), (models[1], models[1].module)):
        loop = Loop(base.encoder.layer, by_name)

        class Encoder(nn.Module):
            def forward(self, x: Tensor, loop: Loop = loop, **kwargs: Any) -> Any:
                from transformers.modeling_outputs import BaseModelOutputWithPast

                return BaseModelOutputWithPast(last_hidden_state=loop(x)[0])

        base.encoder = Encoder()
        with torch.no_grad():
            answers.append(model(input_ids=prompt(2, 9)).last_hidden_state)
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)
    assert len(read) >= 2


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_layer_that_is_changed_runs_its_own_code(bert: Pair, place: int) -> None:
    models = copy.deepcopy(bert.original), copy.deepcopy(bert.engine)
    for layers in (models[0].encoder.layer, models[1].module.encoder.layer):
        layers[place].intermediate.dense.register_forward_hook(lambda module, args, out: out * 0.5)
    inputs = {"input_ids": prompt(2, 9)}
    with torch.no_grad():
        close(models[0](**inputs), models[1](**inputs))


def test_layers_of_several_kinds_are_each_read() -> None:
    models = pair("mistral", num_hidden_layers=3)
    inputs = {"input_ids": prompt(2, 12)}
    with torch.no_grad():
        expected = models.original(**inputs, use_cache=False)
    with blocks_that_run() as ran:
        close(expected, models.engine(**inputs, use_cache=False))
    assert sum(ran.calls) == 3


def test_a_second_forward_is_asked_anew(bert: Pair, read: list[str]) -> None:
    for row in (0, 1):
        inputs = told()
        if row:
            inputs["attention_mask"] = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
        with torch.no_grad():
            close(bert.original(**inputs), bert.engine(**inputs), mask=inputs.get("attention_mask"))
    assert len(read) == 2

"""Norms and gated feed-forwards of unknown layers: later changes take effect, and others keep their code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream

WIDTH, WORDS = 64, 50


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.eps, self.gain, self.mode, self.limit = 1e-5, 1.0, "rms", torch.inf

    def forward(self, x: Tensor) -> Tensor:
        if self.mode != "rms":
            return x
        x = x.clamp(-self.limit, self.limit)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight * self.gain


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96)
        self.down = nn.Linear(96, WIDTH)
        self.act: Callable[[Tensor], Tensor] = F.silu
        self.options = {"scale": 1.0}
        self.limit = torch.inf

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).clamp(max=self.limit)
        return self.down(self.act(gate) * self.up(x)) * self.options["scale"]


class Keeping(FeedForward):
    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.act(self.gate(x)) * self.up(x)
        return self.down(self.seen)


class KeepingNorm(Norm):
    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class Layer(nn.Module):
    def __init__(self, norm: type[nn.Module], feed: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.feed = norm(), feed()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


class Net(nn.Module):
    def __init__(self, norm: type[nn.Module] = Norm, feed: type[nn.Module] = FeedForward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(norm, feed) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


IDS = torch.arange(80).reshape(2, 40) % WORDS

CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a norm's eps": ("norm", lambda norm: setattr(norm, "eps", 1.0)),
    "a norm's factor": ("norm", lambda norm: setattr(norm, "gain", 2.0)),
    "a norm's mode": ("norm", lambda norm: setattr(norm, "mode", "none")),
    "a norm's own forward": ("norm", lambda norm: setattr(norm, "forward", lambda x: 3 * x)),
    "a feed-forward's function": ("feed", lambda feed: setattr(feed, "act", F.relu)),
    "a feed-forward's options": ("feed", lambda feed: feed.options.update(scale=3.0)),
    "a feed-forward's limit": ("feed", lambda feed: setattr(feed, "limit", 0.1)),
}


def inject(model: nn.Module, **settings: Any) -> slipstream.InferenceEngine:
    return slipstream.init_inference(
        model, dtype=torch.float32, replace_with_kernel_inject=True, injection_check="error", **settings
    )


def answers(model: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(IDS)
    return output


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_takes_effect(change: tuple[str, Callable[[Any], None]]) -> None:
    model = Net().eval()
    original, engine = copy.deepcopy(model), inject(model)
    assert "1 gated feed-forward" in str(engine.report())
    before = answers(engine)
    torch.testing.assert_close(before, answers(original), atol=1e-4, rtol=1e-4)
    part, apply = change
    for one in (original, engine.module):
        for layer in one.layers:
            apply(getattr(layer, part))
    torch.testing.assert_close(answers(engine), answers(original), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(answers(engine), before, atol=1e-2)


@pytest.mark.parametrize("kind", [Norm, FeedForward])
def test_another_forward_of_the_class_takes_effect(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = inject(Net().eval())
    answers(engine)
    monkeypatch.setattr(kind, "forward", lambda self, x: 3 * x)
    torch.testing.assert_close(answers(engine), answers(Net().eval()), atol=1e-4, rtol=1e-4)


def test_a_copy_watches_its_own_attributes() -> None:
    engine = inject(Net().eval())
    before, twin = answers(engine), copy.deepcopy(engine)
    twin.module.layers[0].norm.gain = 2.0
    assert torch.equal(answers(engine), before) and not torch.allclose(answers(twin), before, atol=1e-2)


@pytest.mark.parametrize("part", ["norm", "feed"])
def test_what_clamps_large_values_runs_its_own_code(part: str) -> None:
    model = Net().eval()
    for layer in model.layers:
        getattr(layer, part).limit = 100.0 if part == "norm" else 20.0
        layer.norm.weight.data *= 20
    model.table.weight.data[:, 3] = 500
    original, engine = copy.deepcopy(model), inject(model)
    assert f"layers.0.{part} runs its own code" in str(engine.report())
    torch.testing.assert_close(answers(engine), answers(original), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kinds", [(Norm, Keeping), (KeepingNorm, FeedForward)], ids=["feed", "norm"])
def test_what_keeps_its_values_runs_its_own_code(kinds: tuple[type[nn.Module], type[nn.Module]]) -> None:
    model = Net(*kinds).eval()
    part = "feed" if kinds[1] is Keeping else "norm"
    engine = inject(model)
    assert all(getattr(layer, part).seen is None for layer in model.layers)
    assert "its forward sets seen" in str(engine.report())
    answers(engine)
    assert all(getattr(layer, part).seen.shape[:2] == IDS.shape for layer in model.layers)

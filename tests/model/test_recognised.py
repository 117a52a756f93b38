"""Norms and gated feed-forwards are recognised by what they compute, whatever they are called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.engine import build
from slipstream.model.parts.gated_feed_forwards import Gated
from slipstream.model.parts.parts import _STATE, is_swapped
from slipstream.ops import OPS
from slipstream.ops.activation import ACTIVATIONS

WIDTH, INNER = 48, 80

pytestmark = pytest.mark.filterwarnings("ignore:replace_with_kernel_inject=True replaced nothing")


class Scaled(nn.Module):
    """An RMSNorm by another name, of other names."""

    def __init__(self, eps: float, *, shows: bool = True) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(WIDTH))
        self.hidden_eps = (eps,)
        if shows:
            self.tiny = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (self.gamma * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.hidden_eps[0])).to(
            x.dtype
        )


class Centred(Scaled):
    """A LayerNorm whose weight is stored less one, with its bias first."""

    def __init__(self, eps: float, *, shows: bool = True) -> None:
        super().__init__(eps, shows=shows)
        del self.gamma
        self.beta = nn.Parameter(torch.randn(WIDTH))
        self.gamma = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float() - x.float().mean(-1, keepdim=True)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.hidden_eps[0])
        return ((1 + self.gamma) * h + self.beta).to(x.dtype)


class GatedBefore(Scaled):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * F.silu(gate))


class GatedAfter(Scaled):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * torch.sigmoid(gate)


class Outside(Scaled):
    """Its eps is added to the root."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x / (x.square().mean(-1, keepdim=True).sqrt() + 0.1)


class Feed(nn.Module):
    """A gated feed-forward whose parts say nothing by their names."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu, *, bias: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(INNER, WIDTH, bias=bias)
        self.b = nn.Linear(WIDTH, INNER, bias=bias)
        self.c = nn.Linear(WIDTH, INNER, bias=bias)
        self.drop = nn.Dropout(0.5)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.a(self.activation(self.c(x)) * self.b(x)))  # type: ignore[no-any-return]


class Halves(nn.Module):
    def __init__(self, *, up_first: bool) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.up_first = up_first

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, dim=-1)
        gate, up = (second, first) if self.up_first else (first, second)
        return self.out(F.gelu(gate) * up)  # type: ignore[no-any-return]


class Square(nn.Module):
    """Three linears of one shape: which is which shows in what they compute alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.three(x)) * self.one(x))  # type: ignore[no-any-return]


class Odd(Feed):
    """Something is added that no gated feed-forward has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Layer(nn.Module):
    def __init__(self, part: nn.Module, *, gated: bool = False) -> None:
        super().__init__()
        self.part, self.fc = part, nn.Linear(WIDTH, WIDTH)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.part(x, x) if self.gated else self.part(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """It runs on tokens, so that its parts are proved on what they hear."""

    def __init__(self, make: Callable[[], nn.Module], *, gated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Layer(make(), gated=gated) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def ids(rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def engine_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> slipstream.InferenceEngine:
    return slipstream.init_inference(model, dtype=dtype, replace_with_kernel_inject=True)


@pytest.fixture(autouse=True, params=[True, False], ids=["kernels", "reference"])
def _no_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's kernels, where there are any, and without."""
    if not request.param:
        for root in ("build", "settings"):
            monkeypatch.setattr(f"slipstream.engine.{root}.kernels_for", lambda device: ())


def has_kernels() -> bool:
    return build.offer(torch.float32)["norm"].name != "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 3e-3])
@pytest.mark.parametrize("kind", [Scaled, Centred])
@pytest.mark.parametrize("shows", [True, False])
def test_a_norm_is_known_by_its_formula_and_its_eps_is_found(
    kind: type[Scaled], eps: float, shows: bool, dtype: torch.dtype
) -> None:
    model = Model(lambda: kind(eps, shows=shows)).eval()
    exact = copy.deepcopy(model)
    engine = engine_of(model, dtype)
    row = engine.report().layers[0]
    waits = kind is Centred and not is_swapped(model.layers[0].part)  # an offset gains by a kernel alone
    assert row.parts.get("part") == (None if waits else "norm") or (eps == 1e-12 and not shows)
    own = copy.deepcopy(exact).to(dtype)
    x = 1e-2 * torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        expected = exact.layers[1].part(x.float())
        theirs = float((own.layers[1].part(x).float() - expected).square().mean().sqrt())
        ours = float((engine.module.layers[1].part(x).float() - expected).square().mean().sqrt())
    assert ours <= 1.5 * theirs + 1e-6


@pytest.mark.parametrize("kind", [GatedBefore, GatedAfter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm_multiplies_before_or_after(kind: type[Scaled], dtype: torch.dtype) -> None:
    model = Model(lambda: kind(1e-5), gated=True).eval()
    expected = copy.deepcopy(model).to(dtype)(ids())
    engine = engine_of(model, dtype)
    assert is_swapped(model.layers[0].part) == has_kernels()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(engine(ids()), expected, rtol=tolerance, atol=tolerance)
    if kind is GatedBefore:  # a call with one tensor is the module's own
        x = torch.randn(3, WIDTH).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(model.layers[0].part(x), kind.forward(model.layers[0].part, x))


def test_a_norm_whose_eps_stands_elsewhere_keeps_its_own_code_and_says_so() -> None:
    model = Model(lambda: Outside(1e-5)).eval()
    expected = copy.deepcopy(model)(ids())
    torch.testing.assert_close(engine_of(model)(ids()), expected)
    assert not is_swapped(model.layers[0].part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(dict.fromkeys(ACTIVATIONS)))
def test_a_gated_feed_forward_is_known_by_its_activation(name: str, bias: bool, dtype: torch.dtype) -> None:
    model = Model(lambda: Feed(ACTIVATIONS[name], bias=bias)).eval()
    expected = copy.deepcopy(model).to(dtype)(ids())
    engine = engine_of(model, dtype)
    assert engine.report().layers[1].parts["part"] == "gated feed-forward"
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(engine(ids()), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [3, 500])
@pytest.mark.parametrize("make", [Feed, lambda: Halves(up_first=False)])
def test_rows_of_another_width_fail_as_in_the_original(make: Callable[[], nn.Module], rows: int) -> None:
    model = Model(make).eval()
    part = engine_of(model).module.layers[1].part
    assert is_swapped(part)
    for width in (WIDTH - 1, WIDTH + 1, 2 * WIDTH):
        for call in (copy.deepcopy(Model(make)).layers[1].part, part):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                call(torch.randn(rows, width))


@pytest.mark.parametrize("make", [lambda: Halves(up_first=False), lambda: Halves(up_first=True), Square])
def test_a_feed_forward_of_halves_or_squares_is_known(make: Callable[[], nn.Module]) -> None:
    model = Model(make).eval()
    expected = copy.deepcopy(model)(ids())
    engine = engine_of(model)
    assert is_swapped(model.layers[0].part)
    assert engine.report().layers[0].parts["part"] == "gated feed-forward"
    torch.testing.assert_close(engine(ids()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [Feed, lambda: Halves(up_first=False), lambda: Halves(up_first=True), lambda: Feed(bias=True)]
)
def test_many_rows_of_a_gated_feed_forward_run_the_op(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model = Model(make).eval()
    expected = copy.deepcopy(model).to(dtype)(ids(3, 40))
    engine = engine_of(model, dtype)
    part = engine.module.layers[0].part
    runs: list[int] = []

    def counted(rows: Tensor, *weights: Any, **how: Any) -> Tensor:
        runs.append(len(rows))
        out: Tensor = OPS["feed_forward"].reference(rows, *weights, **how)
        return out

    part.__dict__[_STATE] = replace(part.__dict__[_STATE], feed=counted)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(engine(ids(3, 40)), expected, rtol=tolerance, atol=tolerance)
    engine(ids())
    # Few rows do not, nor those whose gate and up have biases apart.
    assert runs == ([] if isinstance(part, Feed) and part.b.bias is not None else [120])


def test_what_is_no_gated_feed_forward_keeps_its_own_code() -> None:
    model = Model(Odd).eval()
    expected = copy.deepcopy(model)(ids())
    engine = engine_of(model)
    assert not is_swapped(model.layers[0].part)
    torch.testing.assert_close(engine(ids()), expected)
    assert "no gated feed-forward" in engine.report().layers[0].refused["part"]
    assert "part runs its own code: no gated" in str(engine.report())


def test_weights_that_show_nothing_are_not_taken_for_a_formula() -> None:
    def make() -> Feed:
        feed = Feed()
        nn.init.zeros_(feed.a.weight)
        return feed

    model = Model(make).eval()
    engine_of(model)
    assert not is_swapped(model.layers[0].part)


def test_a_hook_within_a_feed_forward_fires_and_a_changed_part_is_heard() -> None:
    model = Model(Feed).eval()
    plain = copy.deepcopy(model)
    engine = engine_of(model)
    seen: list[torch.Size] = []
    handle = model.layers[0].part.c.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    torch.testing.assert_close(engine(ids()), plain(ids()), rtol=1e-5, atol=1e-5)
    assert seen == [torch.Size((2, 5, INNER))]
    handle.remove()
    for changed in (model, plain):
        torch.manual_seed(3)
        changed.layers[0].part.c = nn.Linear(WIDTH, INNER, bias=False).eval()
        changed.layers[1].part.drop = nn.Hardtanh(-0.1, 0.1)
        changed.layers[1].part.b.weight.data *= 2
    torch.testing.assert_close(engine(ids()), plain(ids()), rtol=1e-5, atol=1e-5)


def test_a_copy_has_parts_of_its_own_and_training_its_own_code() -> None:
    model = Model(Feed).eval()
    plain = copy.deepcopy(model)
    engine_of(model)
    copied = copy.deepcopy(model)
    copied.layers[0].part.c.weight.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(model(ids()), plain(ids()), rtol=1e-5, atol=1e-5)
        plain.layers[0].part.c.weight.data.zero_()
        torch.testing.assert_close(copied(ids()), plain(ids()), rtol=1e-5, atol=1e-5)
    state = vars(copied.layers[0].part).get(_STATE)
    if isinstance(state, Gated):
        assert state.linears is not None
        assert state.linears[0] is copied.layers[0].part.c
    model.layers[0].part.train()
    model(ids()).sum().backward()
    assert model.layers[0].part.c.weight.grad is not None


@pytest.mark.parametrize("format_", ["int8", "int4"])
def test_packed_linears_are_read_as_they_are_packed(format_: str) -> None:
    model = Model(Feed).eval()
    engine = (
        slipstream.init_inference(model, dtype=format_, replace_with_kernel_inject=True)
        if format_ == "int8"
        else slipstream.init_inference(
            model, dtype=torch.float32, quant={"weight": {"num_bits": 4}}, replace_with_kernel_inject=True
        )
    )
    dense = Model(Feed).eval()
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        own = engine(ids()).float()
    torch.testing.assert_close(own, dense(ids()), rtol=3e-2, atol=3e-2)


def test_refreshed_weights_are_heard() -> None:
    model = Model(Feed).eval()
    engine = engine_of(model)
    torch.manual_seed(9)
    other = Model(Feed).eval()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    engine.refresh_weights(other)
    torch.testing.assert_close(engine(ids()), other(ids()), rtol=1e-5, atol=1e-5)

"""Level `module`: single norms and linears run the engine's ops, none unproven and none for nothing."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.layers import find_layers
from slipstream.model.parts.parts import Part, fuse_parts, is_swapped, judge_parts
from slipstream.ops import OPS, bind_ops
from slipstream.ops.bind import Facts, Kernel

WIDTH = 48


class PlainRMSNorm(nn.Module):
    def __init__(self, width: int = WIDTH, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class OffsetRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (1.0 + self.weight.float())).to(hidden_states.dtype)


class CenteredLayerNorm(PlainRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states - hidden_states.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class HalvedRMSNorm(PlainRMSNorm):
    """Named like one, and something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 0.5 * super().forward(hidden_states)


class IgnoredEpsRMSNorm(PlainRMSNorm):
    """Its eps is not the one that it shows."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + 1e-2)
        return self.weight * x


class FailingRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError("not on this machine")


class UnlikeRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).abs()


class OptionalRMSNorm(PlainRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        out = super().forward(hidden_states)
        return out if gate is None else out * gate


class Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.native = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.native(self.norm(x)))


def layers_of(count: int) -> list[Layer]:
    return [Layer(PlainRMSNorm()) for _ in range(count)]


class Stack(nn.Module):
    def __init__(self, norm_class: type[nn.Module] = PlainRMSNorm, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(norm_class()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def engine_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> slipstream.InferenceEngine:
    return slipstream.init_inference(model, dtype=dtype, replace_with_kernel_inject=True)


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("norm_class", [PlainRMSNorm, CenteredLayerNorm, OptionalRMSNorm, IgnoredEpsRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_recognised_by_what_it_computes(norm_class: type[nn.Module], dtype: torch.dtype) -> None:
    model = Stack(norm_class).eval()
    expected = copy.deepcopy(model).to(dtype)(hidden(dtype))
    engine = engine_of(model, dtype)
    assert is_swapped(model.layers[0].norm)
    row = engine.report().layers[0]
    assert (engine.report().level, row.level, row.kernels) == ("module", "module", {"norm": "reference"})
    assert row.max_error is not None
    # One rounding of outputs of size one in place of two.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(engine(hidden(dtype)), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm_class", [HalvedRMSNorm, FailingRMSNorm, UnlikeRMSNorm])
def test_what_no_formula_fits_keeps_its_own_code(norm_class: type[nn.Module]) -> None:
    model = Stack(norm_class)
    with pytest.warns(UserWarning, match="replaced nothing"):
        engine = engine_of(model)
    assert not is_swapped(model.layers[0].norm)
    assert engine.report().level == "none"


def test_a_swapped_module_stays_what_it_was() -> None:
    model = Stack()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = engine_of(model)
    norm = model.layers[1].norm
    assert isinstance(norm, PlainRMSNorm)
    assert type(norm).__name__ == "PlainRMSNorm"
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    twice = Stack().eval()
    twice.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    torch.testing.assert_close(engine(hidden()), twice(hidden()))
    copied = copy.deepcopy(model)
    copied.layers[0].norm.weight.data.zero_()
    assert not torch.equal(copied(hidden()), model(hidden()))


def test_arguments_that_the_op_does_not_take_reach_the_original() -> None:
    model = Stack(OptionalRMSNorm)
    plain = copy.deepcopy(model.layers[0].norm)
    engine_of(model)
    gate = torch.rand(2, 5, WIDTH)
    torch.testing.assert_close(model.layers[0].norm(hidden(), gate), plain(hidden(), gate))
    torch.testing.assert_close(model.layers[0].norm(hidden(), gate=gate), plain(hidden(), gate))
    torch.testing.assert_close(model.layers[0].norm(hidden_states=hidden()), plain(hidden()))


def test_a_module_in_training_runs_its_own_code() -> None:
    model = Stack(SwitchableRMSNorm)
    engine_of(model)
    model.layers[0].norm.train()
    model.layers[0].norm.fails = True
    with pytest.raises(NotImplementedError):
        model(hidden())
    model.layers[0].norm.eval()
    with torch.no_grad():
        model(hidden())
    with pytest.raises(NotImplementedError):  # autograd goes through its own code, too
        model(hidden())


class SwitchableRMSNorm(PlainRMSNorm):
    fails = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.fails:
            raise NotImplementedError
        return super().forward(hidden_states)


def test_nothing_is_swapped_unless_kernels_are_asked_for() -> None:
    model = Stack()
    engine = slipstream.init_inference(model, dtype=torch.float32)
    assert not any(is_swapped(module) for module in model.modules())
    assert engine.report().level == "none"
    assert engine.report().layers[0].reason == "replace_with_kernel_inject is False"


def test_what_torch_does_as_well_is_left_alone() -> None:
    model = Stack()
    engine_of(model)
    assert not is_swapped(model.layers[0].native)
    assert not is_swapped(model.layers[0].linear)


def test_a_model_with_swapped_parts_belongs_to_its_engine() -> None:
    model = Stack()
    engine_of(model)
    with pytest.raises(slipstream.InjectionError, match="belongs to an engine"):
        engine_of(model)


def test_inspect_names_the_parts_and_changes_nothing() -> None:
    model = Stack()
    report = slipstream.inspect(model)
    assert (report.level, report.layers[0].kernels) == ("module", {"norm": "reference"})
    assert not any(is_swapped(module) for module in model.modules())


def test_a_hooked_module_keeps_its_hooks_and_a_replaced_forward_is_left_alone() -> None:
    model = Stack()
    seen: list[torch.Size] = []
    model.layers[0].norm.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    own = model.layers[1].norm
    own.forward = lambda x: 3 * PlainRMSNorm.forward(own, x)
    expected = copy.deepcopy(model).eval()
    expected.layers[1].norm.forward = lambda x: 3 * PlainRMSNorm.forward(own, x)
    want = expected(hidden())
    seen.clear()
    engine = engine_of(model)
    torch.testing.assert_close(engine(hidden()), want)
    assert len(seen) == 1
    assert not is_swapped(own)


def _kernel(op: str, scale: float) -> Kernel:
    def run(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return scale * OPS[op].reference(x, *args, **kwargs)

    return Kernel(op, "swift", "cpu", lambda facts: None, run)


def swap_parts(model: nn.Module, *kernels: Kernel) -> dict[str, Part]:
    """What `init_inference` does to a model without families, with other kernels than the registered ones."""
    facts = Facts(torch.device("cpu"), torch.float32)
    settings = Settings(torch.float32, "error", lambda spec: bind_ops(replace(facts, spec=spec), kernels))
    layers = find_layers(model)
    verdicts = {found.name: Verdict(None, reason="") for found in layers}
    parts = judge_parts(model, layers, verdicts, settings, all_layers=True)
    fuse_parts(layers, parts)
    return parts


class Tower(nn.Module):
    """Around a model that a family knows."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=64, **sizes))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)


def _bent() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.ReLU()]


SEQUENTIALS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "layers": (lambda: nn.Sequential(*layers_of(2)), ["0", "1"]),
    "layers of torch's": (
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(8, 2) for _ in "ab")),
        ["0", "1"],
    ),
    "one layer": (lambda: nn.Sequential(*layers_of(1)), []),
    "layers and a norm": (lambda: nn.Sequential(*layers_of(2), PlainRMSNorm()), []),
    "linears": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), []),
    "linears and what bends": (lambda: nn.Sequential(*_bent(), *_bent()), []),
    "both, in sequentials": (lambda: nn.Sequential(nn.Sequential(*_bent()), nn.Sequential(*_bent())), []),
    "convolutions": (lambda: nn.Sequential(Convolutions(), Convolutions()), []),
    "sequentials of layers": (
        lambda: nn.Sequential(nn.Sequential(*layers_of(2)), nn.Sequential(*layers_of(2))),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "stages": (lambda: nn.Sequential(Stack(), Stack()), ["0", "1"]),
    "known models": (
        lambda: nn.Sequential(Tower(), Tower()),
        [f"{i}.model.layers.{j}" for i in range(2) for j in range(2)],
    ),
}


@pytest.mark.parametrize("case", SEQUENTIALS)
def test_a_sequential_of_one_class_with_parts_is_a_list_of_layers(case: str) -> None:
    make, names = SEQUENTIALS[case]
    assert [found.name for found in find_layers(make())] == names


def test_parts_of_layers_in_a_sequential_are_swapped_as_those_in_a_list() -> None:
    model = Stack(depth=3).eval()
    expected = copy.deepcopy(model)(hidden())
    listed = engine_of(copy.deepcopy(model)).report()
    sequential = nn.Sequential(OrderedDict((f"layer_{i}", own) for i, own in enumerate(model.layers))).eval()
    engine = engine_of(sequential)
    torch.testing.assert_close(engine(hidden()), expected)
    assert is_swapped(sequential[0].norm) and engine.report().level == "module"
    rows = engine.report().layers
    assert [row.name for row in rows] == ["layer_0", "layer_1", "layer_2"]
    assert [row.kernels for row in rows] == [row.kernels for row in listed.layers]


@pytest.mark.parametrize(("scale", "swapped"), [(1.0, True), (1.1, False)])
def test_a_linear_is_swapped_where_a_kernel_is_bound_and_right(scale: float, swapped: bool) -> None:
    model = Stack().eval()
    expected = copy.deepcopy(model)(hidden())
    parts = swap_parts(model, _kernel("linear", scale))
    assert is_swapped(model.layers[0].linear) == swapped
    assert parts["layers.0"].kernels.get("linear") == ("swift" if swapped else None)
    torch.testing.assert_close(model(hidden()), expected)


@pytest.mark.parametrize("scale", [1.0, 1.1])
@pytest.mark.parametrize("norm_class", [PlainRMSNorm, OffsetRMSNorm])
def test_norms_are_swapped_where_a_kernel_is_bound_and_right(
    norm_class: type[nn.Module], scale: float
) -> None:
    model = Stack(norm_class).eval()
    expected = copy.deepcopy(model)(hidden())
    parts = swap_parts(model, _kernel("norm", scale))
    assert is_swapped(model.layers[0].norm) == (scale == 1.0)
    assert not is_swapped(model.layers[0].native)  # torch's own LayerNorm is as fast on the CPU
    part = parts["layers.0"]
    assert ("norm" in part.kinds, "differs in" in part.refused.get("norm", "")) == (
        scale == 1.0,
        scale != 1.0,
    )
    torch.testing.assert_close(model(hidden()), expected)


def test_a_norm_with_an_offset_waits_for_a_kernel_or_a_policy() -> None:
    model = Stack(OffsetRMSNorm).eval()
    expected = copy.deepcopy(model)(hidden())
    assert not swap_parts(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, injection_policy={Layer: "linear"})
    assert is_swapped(model.layers[0].norm)
    torch.testing.assert_close(engine(hidden()), expected)


def test_a_shared_norm_is_swapped_once() -> None:
    model = Stack()
    model.layers[1].norm = model.layers[0].norm
    expected = copy.deepcopy(model).eval()(hidden())
    torch.testing.assert_close(engine_of(model)(hidden()), expected)


def test_nothing_replaced_is_a_warning_that_names_the_layers() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 2)
    with pytest.warns(UserWarning, match="TransformerEncoderLayer"):
        engine = engine_of(model)
    assert "TransformerEncoderLayer" in engine.report().notes[-1]
    with pytest.warns(
        UserWarning,
        match="Linear has no layers that repeat .in an nn.ModuleList, or an nn.Seq",
    ):
        engine_of(nn.Linear(3, 3))


def test_a_model_that_fails_on_tokens_is_left_at_a_lower_level() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )

    class Odd(transformers.LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):  # type: ignore[no-untyped-def]
            if "pixels" not in kwargs:
                raise ValueError("pixels are needed")
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    torch.manual_seed(0)
    model = Odd(config).eval()
    ids = torch.randint(0, 64, (2, 7))
    expected = copy.deepcopy(model)(input_ids=ids, pixels=1).last_hidden_state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = engine_of(model)
    row = engine.report().layers[0]
    assert row.level == "module"
    assert "pixels are needed" in row.reason
    torch.testing.assert_close(engine(input_ids=ids, pixels=1).last_hidden_state, expected)


class EitherLayerNorm(nn.LayerNorm):
    """Its channels are the last axis, or the second one."""

    def __init__(self, *, first: bool) -> None:
        super().__init__(WIDTH)
        self.data_format = "channels_first" if first else "channels_last"

    def forward(self, features: Tensor) -> Tensor:
        if self.data_format == "channels_last":
            return super().forward(features)
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TwoFormats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = EitherLayerNorm(first=False), EitherLayerNorm(first=True)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.first(self.last(x)))  # type: ignore[no-any-return]


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TwoFormats()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]


class EmptyLayer(nn.Module):
    """Between its linears there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_linear_without_inputs_answers_its_bias() -> None:
    model = Stack()
    model.layers = nn.ModuleList([EmptyLayer(), EmptyLayer()])
    inputs = [hidden(), hidden()[0], hidden()[0, 0], hidden()[:0]]
    expected = [model.eval()(x) for x in inputs]
    swap_parts(model, _kernel("linear", 1.0))
    assert is_swapped(model.layers[0].up)
    for x, answer in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model(x), answer)


def test_norms_of_one_class_that_are_set_otherwise_are_proven_apart() -> None:
    torch.manual_seed(0)
    holder = Holder().eval()
    for parameter in holder.parameters():
        nn.init.normal_(parameter, std=0.2)
    # As many rows and columns as channels: what is wrong has the right shape.
    x = torch.randn(1, WIDTH, WIDTH, WIDTH)
    with torch.no_grad():
        expected = holder(x)
        engine = slipstream.init_inference(holder, dtype=torch.float32, replace_with_kernel_inject=True)
        got = engine(x)
    assert float((expected - got).abs().max()) < 1e-5

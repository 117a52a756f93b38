"""Recurrences in the native stack: every kind, shape, weight format and instruction set; bad structs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.errors import DeviceError
from slipstream.families import Family, Tiny
from slipstream.formats import FORMATS
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.binding import bind_stack
from slipstream.kernels.cpu.library import EMULATED, ISAS, Library, load
from slipstream.model.frame.run_stack import run_stack
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.libraries import library
from tests.kernels.test_stack import (
    CHUNK,
    DECODE,
    MANY,
    PREFILL,
    SINGLE,
    TOLERANCE,
    Rounds,
    accepted,
    squared_errors,
)

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

ILL_CONDITIONED = 1e-3
"""Norms of few numbers divide by what may be small: from float64, the reference itself differs by 2.3e-4 in a
state space of 8 groups, and the library by 1.6e-4 to 4.7e-4."""

NAMES = (
    "lfm2 convolutions",
    "qwen3_next mixed",
    "qwen3_5_text mixed",
    "bamba state spaces",
    "nemotron_h",
    "olmo_hybrid",
    "falcon_h1 multipliers",
    "falcon_h1 biases",
    "mamba",
    "falcon_mamba",
    "mamba2",
    "jamba state spaces",
)
WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {
    "jamba state spaces": {"num_experts": 1},
    "qwen3_next mixed": {"mlp_only_layers": [0, 1, 2]},
    "nemotron_h": {"layers_block_type": ["mlp", "linear_attention", "mlp", "full_attention"]},
}


def variant(name: str, **options: Any) -> tuple[Family, Tiny]:
    family, tiny = next(v for v in VARIANTS if label(v) == name)
    return family, replace(tiny, options={**tiny.options, **options})


def every_step(rounds: Rounds, tolerance: float) -> None:
    for spans in (PREFILL, CHUNK, DECODE, SINGLE, MANY, ((0, 40, 3), (3, 36, 1))):
        assert rounds.error(spans) <= tolerance


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", NAMES)
def test_every_instruction_set(name: str, isa: str) -> None:
    library(isa)  # or nothing is built for it
    every_step(Rounds(accepted(variant(name), torch.float32), isa), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", NAMES)
def test_16_bits_are_as_close_to_float32_as_the_reference_s(name: str, isa: str, dtype: torch.dtype) -> None:
    # A state passes on what rounding has changed, so that two right answers differ by more than in attention.
    library(isa)
    tiny = variant(name, **WITHOUT_EXPERTS.get(name, {}))[1]
    ours, theirs = squared_errors(peaked_model(tiny).to(dtype), dtype, isa)
    assert 0 < ours <= 1.2 * theirs


@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfm2 convolutions", {"conv_L_cache": 2, "hidden_size": 36}),
        ("lfm2 convolutions", {"conv_L_cache": 8, "hidden_size": 132}),
        ("qwen3_next mixed", {"linear_num_key_heads": 1, "linear_num_value_heads": 3}),
        ("qwen3_next mixed", {"linear_value_head_dim": 77, "linear_conv_kernel_dim": 2}),
        ("qwen3_5_text mixed", {"linear_value_head_dim": 64, "linear_key_head_dim": 33}),
        ("qwen3_5_text mixed", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 7}),
        ("bamba state spaces", {"mamba_n_groups": 8, "mamba_d_conv": 3}),
        ("nemotron_h", {"time_step_min": 0.5}),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "mlp"]}),
        ("bamba state spaces", {"mamba_n_groups": 1, "mamba_d_state": 19, "mamba_conv_bias": False}),
        (
            "falcon_h1 multipliers",
            {"num_key_value_heads": 1, "head_dim": 22, "mamba_n_heads": 8, "mamba_d_head": 8},
        ),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        ("falcon_h1 multipliers", {"mamba_rms_norm": True, "mamba_n_groups": 1}),
        ("falcon_h1", {"mamba_d_ssm": 132, "mamba_n_heads": 2, "mamba_d_head": 66, "intermediate_size": 33}),
        ("mamba", {"hidden_size": 36, "expand": 5, "intermediate_size": 180, "state_size": 19}),
        ("mamba no bias of the convolution", {"time_step_rank": 1, "conv_kernel": 2, "state_size": 1}),
        ("falcon_mamba", {"intermediate_size": 33, "expand": 1, "conv_kernel": 8, "state_size": 100}),
        ("jamba state spaces", {"mamba_expand": 1, "mamba_d_state": 16, "mamba_dt_rank": 33}),
        ("mamba2", {"n_groups": 1, "state_size": 20}),
    ],
    ids=str,
)
def test_every_shape(name: str, options: dict[str, int], isa: str) -> None:
    library(isa)
    every_step(Rounds(accepted(variant(name, **options), torch.float32), isa), ILL_CONDITIONED)


@pytest.mark.parametrize("quant", [name for name in FORMATS if name != "plain" and name in abi.FORMATS])
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
@pytest.mark.parametrize("name", ["lfm2 convolutions", "qwen3_5_text mixed", "jamba state spaces"])
def test_packed_weights_around_recurrences(name: str, isa: str, quant: str) -> None:
    library(isa)
    rounds = Rounds(accepted(variant(name), torch.float32, quant), isa)
    assert any(
        weight.format != "plain" for block in rounds.blocks if block.part for weight in block.part.projections
    )
    every_step(rounds, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "change",
    [
        {"width": 1},
        {"width": 9},
        {"channels": 65},
        {"key_heads": 3},
        {"value_dim": 17},
        {"key_dim": 0},
        {"num_projections": 7},
        {"projections": None},
        {"kernel": None},
        {"speed": None},
        {"rule": 3},
        {"rule": 4},
        {"rule": -1},
        {"rule": 0},
        {"norm_width": 5},
        {"gate_first": 2},
        {"states": None},
        {"num_states": 3},
        {"heads_first": 1},
        {"table": 0},
        {"branches": 3},
        {"branches": -1},
        {"branches": 2},
        {"least_step": -1.0},
    ],
    ids=str,
)
def test_calls_that_contradict_a_recurrence_are_refused(
    change: dict[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(accepted(variant("qwen3_5_text mixed"), torch.float32), "baseline")
    refuses_when_changed(rounds, change, monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        {"key_heads": 2},
        {"value_heads": 2},
        {"value_dim": 64},
        {"channels": 64},
        {"key_dim": 0},
        {"key_dim": 7},
        {"key_dim": 257},
        {"shift": 64},
        {"speed": None},
        {"gate_first": 1},
        {"rule": 2},
        {"rule": 0},
    ],
    ids=str,
)
def test_calls_that_contradict_a_selective_state_space_are_refused(
    change: dict[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(accepted(variant("mamba"), torch.float32), "baseline")
    refuses_when_changed(rounds, change, monkeypatch)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("mixed", {"outputs": 21}),
        ("mixed", {"inputs": 127}),
        ("mixed", {"outputs": 0}),
        ("steps", {"inputs": 5}),
        ("steps", {"outputs": 127}),
        ("steps", {"outputs": 0}),
        ("step_norm", {"count": 7}),
        ("key_norm", {"kind": 9}),
        ("v", {"channel": 1}),
        ("gate", {"start": 129}),
    ],
    ids=str,
)
def test_other_products_within_a_selective_state_space_are_refused(
    part: str, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "jamba state spaces" if part.endswith("norm") else "mamba"
    rounds = Rounds(accepted(variant(name), torch.float32), "baseline")
    refuses_when_changed(rounds, change, monkeypatch, part)


@pytest.mark.parametrize("change", [{"outputs": 63}, {"inputs": 65}, {"outputs": 0}], ids=str)
def test_another_matrix_of_the_output_is_refused(
    change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(accepted(variant("falcon_h1 multipliers"), torch.float32), "baseline")
    refuses_when_changed(rounds, change, monkeypatch, "out")


@pytest.mark.parametrize("part", ["q", "k", "v", "gate", "rate", "decay"])
@pytest.mark.parametrize(
    "change", [{"matrix": 4}, {"matrix": -1}, {"start": 1 << 20}, {"start": -1}, {"step": 1 << 20}], ids=str
)
def test_inputs_outside_of_the_projections_are_refused(
    part: str, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(accepted(variant("qwen3_5_text mixed"), torch.float32), "baseline")
    refuses_when_changed(rounds, change, monkeypatch, part)


@pytest.mark.parametrize(
    "change",
    [
        {"beside": 0},
        {"beside": 2},
        {"beside": -1},
        {"post": 1},
        {"parallel": 1},
        {"residual_from_norm": 1},
        {"kv_heads": 3},
        {"branches": 2},
        {"states": None},
    ],
    ids=str,
)
def test_calls_that_contradict_a_recurrence_beside_attention_are_refused(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(accepted(variant("falcon_h1 multipliers"), torch.float32), "baseline")
    refuses_when_changed(rounds, change, monkeypatch)


ORDERS = ("branches", "beside", "post", "parallel", "residual_from_norm")
OF_BLOCKS = (*ORDERS, "table", "kv_heads")


def refuses_when_changed(
    rounds: Rounds, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch, part: str | None = None
) -> None:
    own = Library.run

    def changed(self: Library, name: str, call: Any) -> None:
        if name != "stack":
            return own(self, name, call)
        recurrence = call.blocks[0].recurrence.contents
        owners = {
            **dict.fromkeys(OF_BLOCKS, call.blocks[0]),
            **dict.fromkeys(("states", "num_states", "heads_first"), call.step),
        }
        before = []
        for field, value in change.items():
            owner = owners.get(field, recurrence if part is None else getattr(recurrence, part))
            before.append((owner, field, getattr(owner, field)))
            setattr(owner, field, value)
        try:
            own(self, name, call)
        finally:
            for owner, field, value in before:
                setattr(owner, field, value)

    with monkeypatch.context() as patch:
        patch.setattr(Library, "run", changed)
        with pytest.raises(DeviceError, match="refuses its arguments"):
            rounds.error(PREFILL)
    assert all(bool(t.isnan().all()) for kept in rounds.caches[1].layers for t in kept.parts)
    assert rounds.error(PREFILL) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [[1, 0, 2, 3], [0, 1, 1, 3], [-1, 1, 2, 3], [0, 1, 2, 4]], ids=str)
def test_rows_of_states_that_coincide_or_do_not_exist_are_refused(rows: list[int]) -> None:
    rounds = Rounds(accepted(variant("lfm2 convolutions"), torch.float32), "baseline")
    step, x = rounds.step(PREFILL)
    step = replace(step, states=torch.tensor(rows, dtype=torch.int32))
    tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])
    with pytest.raises(DeviceError, match="refuses its arguments"):
        rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, tables)


def test_a_replaced_tensor_of_a_mixer_counts() -> None:
    rounds = Rounds(accepted(variant("qwen3_next mixed"), torch.float32), "baseline")
    assert rounds.error(PREFILL) <= TOLERANCE[torch.float32]
    for block in rounds.blocks:
        if block.part is not None:
            mixer: Any = block.part.module  # type: ignore[attr-defined]
            mixer.A_log = torch.nn.Parameter(mixer.A_log.detach() + 0.5, requires_grad=False)
            mixer.out_proj.weight = torch.nn.Parameter(
                mixer.out_proj.weight.detach() * 0.5, requires_grad=False
            )
            mixer.conv1d.weight.data = mixer.conv1d.weight.data.clone() * 2
    assert rounds.error(CHUNK) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "norm.weight", "conv1d.weight"])
def test_a_tensor_of_another_shape_is_not_read(name: str) -> None:
    rounds = Rounds(accepted(variant("qwen3_next mixed"), torch.float32), "baseline")
    part: Any = rounds.blocks[0].part
    owner, _, leaf = name.rpartition(".")
    module = part.module.get_submodule(owner)
    setattr(module, leaf, torch.nn.Parameter(getattr(module, leaf).detach()[:-1], requires_grad=False))
    step, x = rounds.step(PREFILL)
    with pytest.raises(AssertionError, match="left to the reference"):
        rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, {})


def test_a_mixer_with_large_linears_is_described_anew() -> None:
    # The engine makes large linears outside of blocks run its own product: their class is then another one.
    rounds = Rounds(accepted(variant("lfm2 convolutions", hidden_size=320), torch.float32), "baseline")
    part: Any = next(block.part for block in rounds.blocks if block.part is not None)
    assert type(part.module.in_proj).forward is not torch.nn.Linear.forward
    assert rounds.error(PREFILL) <= TOLERANCE[torch.float32]
    part.module.in_proj.weight.data = part.module.in_proj.weight.data * 0.5
    assert rounds.error(CHUNK) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "other", [torch.nn.Identity(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)], ids=str
)
def test_another_module_in_place_of_a_convolution_is_refused(other: torch.nn.Module) -> None:
    rounds = Rounds(accepted(variant("lfm2 convolutions"), torch.float32), "baseline")
    part: Any = rounds.blocks[0].part
    part.module.conv = other
    assert part.refuses() == f"{type(other).__name__} in place of a convolution"


def test_one_layer_at_a_time() -> None:
    rounds = Rounds(accepted(variant("lfm2 convolutions"), torch.float32), "baseline")
    for spans in (PREFILL, CHUNK):
        step, x = rounds.step(spans)
        tables = rounds.runner.frame.angles(step.positions, [block.spec.rope for block in rounds.blocks])
        one_by_one = x
        for block, kept in zip(rounds.blocks, rounds.caches[0].layers, strict=True):
            one_by_one = rounds.stack([block], one_by_one, step, [kept], tables)
        together = rounds.stack(rounds.blocks, x, step, rounds.caches[1].layers, tables)
        torch.testing.assert_close(one_by_one, together)


def test_a_cache_in_int8_leaves_states_in_float32() -> None:
    rounds = Rounds(accepted(variant("qwen3_5_text mixed"), torch.float32), "baseline", torch.int8)
    for spans in (PREFILL, CHUNK, DECODE):
        assert rounds.error(spans) <= 1.1 / 127


def test_layers_that_keep_nothing_are_left_to_the_reference() -> None:
    rounds = Rounds(accepted(variant("nemotron_h"), torch.float32), "baseline")
    without = [block for block in rounds.blocks if block.spec.branches == "feed_forward"]
    assert without and len(without) < len(rounds.blocks)
    bound = bind_stack(without, run_stack)
    assert bound.run is run_stack
    assert "no layer has attention or a recurrence" in bound.refused.values()


@pytest.mark.parametrize("name", ["x_proj.weight", "dt_proj.weight", "A_log", "D"])
def test_a_selective_state_space_reads_tensors_anew(name: str) -> None:
    rounds = Rounds(accepted(variant("mamba"), torch.float32), "baseline")
    assert rounds.error(PREFILL) <= TOLERANCE[torch.float32]
    for block in rounds.blocks:
        part: Any = block.part
        part.module.get_parameter(name).data = part.module.get_parameter(name).data * 0.5
    assert rounds.error(CHUNK) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["x_proj.weight", "dt_proj.weight", "A_log", "D"])
def test_a_selective_state_space_of_another_shape_is_refused(name: str) -> None:
    rounds = Rounds(accepted(variant("mamba"), torch.float32), "baseline")
    part: Any = rounds.blocks[0].part
    assert part.refuses() is None
    tensor = part.module.get_parameter(name)
    tensor.data = tensor.data[:-1]
    assert part.refuses() is not None


def test_selective_state_spaces_are_exact_for_long_sequences() -> None:
    # Softplus and decays over their whole range, against the reference in float64.
    rounds = Rounds(accepted(variant("mamba"), torch.float32), "baseline")
    for block in rounds.blocks:
        module: Any = block.part.module  # type: ignore[union-attr]
        with torch.no_grad():
            module.dt_proj.bias.copy_(torch.linspace(-30.0, 30.0, len(module.dt_proj.bias)))
            module.A_log.copy_(torch.linspace(-20.0, 4.0, module.A_log.numel()).view_as(module.A_log))
    for spans in (PREFILL, CHUNK, DECODE):
        assert rounds.error(spans) <= TOLERANCE[torch.float32]

"""Decode steps in the fewest launches say what the layers say op by op."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from slipstream.devices import CpuDevice
from slipstream.engine.generation.runner import Runner, make_step
from slipstream.engine.generation.schedule import Chunk
from slipstream.kernels.triton.stack import TritonStack, bind_stack, refuse_block
from slipstream.kernels.triton.target import interpreted
from slipstream.model.block.paged_cache import BLOCK_SIZE
from slipstream.model.frame.run_stack import run_stack
from slipstream.ops.kv_cache import Int8Cache
from slipstream.spec import Role
from tests.gpu.place import DEVICE
from tests.helpers.models import KINDS, pair

_LLAMA = KINDS["llama"][2]
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16},
    ),
}


def made(kind: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Runner:
    """The engine road of a tiny model whose matrices lie as on a GPU."""
    monkeypatch.setattr(CpuDevice, "joins_rows", True)
    for name, value in MORE.items():
        monkeypatch.setitem(KINDS, name, value)
    runner: Runner = pair(kind, settings=settings).engine._built.runner
    return runner


def step_of(lengths: tuple[int, ...], device: torch.device = DEVICE) -> Any:
    """A decode step after which the sequences have these lengths, in blocks of no order."""
    free = list(range(1, 40))[::-1]
    blocks = [[free.pop(3) for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
    chunks = [Chunk(row, length - 1, 1, True) for row, length in enumerate(lengths)]
    ids = torch.arange(5, 5 + len(lengths))
    return make_step(chunks, lambda chunk: ids[chunk.row, None], blocks, device)


def filled(runner: Runner) -> Any:
    """A cache of random keys and values."""
    cache = runner.make_cache(40)
    generator = torch.Generator().manual_seed(5)
    for part in (part for kept in cache.layers for part in kept.pages):
        shape = tuple(part.shape)
        if isinstance(part, Int8Cache):
            part.codes.copy_(torch.randint(-127, 128, shape, generator=generator).to(torch.int8))
            part.scales.copy_(torch.rand(shape[:3], generator=generator) / 100)
        else:
            part.copy_(torch.randn(shape, generator=generator))
    return cache


def tensors(cache: Any) -> list[Tensor]:
    parts = [part for kept in cache.layers for part in kept.pages]
    return [t for p in parts for t in ((p.codes, p.scales) if isinstance(p, Int8Cache) else (p,))]


def test_what_nobody_has_thought_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    block = copy.copy(made("llama", monkeypatch).blocks[0])
    assert refuse_block(block) is None
    spec = block.spec
    block.spec = replace(spec, clamp="end")
    assert "clamp='end'" in str(refuse_block(block))
    block.spec = spec
    vectors = {**block.weights.vectors, Role.ATTN_SCALE: block.weights.vectors[Role.ATTN_NORM]}
    block.weights = replace(block.weights, vectors=vectors)
    assert "attn_scale" in str(refuse_block(block))


_FREE = {"aten::view", "aten::empty", "aten::select", "aten::slice", "aten::t", "aten::detach", "aten::alias"}
_FREE |= {"aten::new_empty", "aten::empty_like", "aten::_unsafe_view", "aten::transpose"}


class _Operations(TorchDispatchMode):
    """Names of what torch launches beside our own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not name.startswith("slipstream::") and name not in _FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    """What is launched: kernels by their names, then torch's operations."""
    found: list[str] = []
    run = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Operations() as operations:
        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        yield found
        found += operations.names


@torch.no_grad()
def compare(runner: Runner, lengths: tuple[int, ...], tolerance: float = 2e-5) -> list[str]:
    """What was launched for a decode step that agrees with the one of the reference."""
    step, cache = step_of(lengths), filled(runner)
    twin = copy.deepcopy(cache)
    assert all(refuse_block(block) is None for block in runner.blocks)
    x = runner.frame.enter(step.token_ids, step.positions)
    tables = runner.frame.angles(step.positions, [block.spec.rope for block in runner.blocks])
    expected = run_stack(runner.blocks, x, step, cache.layers, tables)
    stack = bind_stack(runner.blocks, run_stack)
    assert stack.name == "triton" and not stack.refused
    with launches() as found:
        got = stack.run(runner.blocks, x, step, twin.layers, tables)
    assert got.dtype == expected.dtype
    error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert float(error) <= tolerance
    for ours, theirs in zip(tensors(twin), tensors(cache), strict=True):
        off = (ours.float() - theirs.float()).abs().max()
        # Of int8 a code may round to its neighbour, where float32 sums were taken in another order.
        assert float(off) <= (
            1 if ours.dtype == torch.int8 else tolerance * 8 * float(theirs.float().abs().max())
        )
    return found


EACH = {"llama": 5, "gpt2": 5, "gptj": 5, "qwen3": 5, "gemma2": 7}
"""Launches of a layer: gemma2's two norms behind the branches are two more."""


@pytest.mark.parametrize("kind", [*EACH, "gpt_oss"])
def test_a_decode_step_of_each_kind_of_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made(kind, monkeypatch)
    compare(runner, (1, 70))
    found = compare(runner, (70,))
    if interpreted() and kind in EACH:
        # And one for the whole step: the counters of arrivals are cleared.
        assert len(found) == EACH[kind] * len(runner.blocks) + 1, found
        assert found[-1] == "aten::zeros"


@pytest.mark.parametrize("packed", ["int8", "int4", "fp8", "fp6"])
def test_packed_weights_of_one_row_and_of_more_than_a_few(
    packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = made("llama", monkeypatch, quant=packed)
    # Blocks that unpack round their weights to float32's neighbours.
    compare(runner, (40,), 2e-4)
    if packed in ("int4", "fp6"):
        compare(runner, (5, 1, 9, 40, 33), 2e-4)


def test_more_than_a_few_rows_of_dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(made("gpt2", monkeypatch), (1, 40, 33, 2, 3))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_cache_in_int8(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(made(kind, monkeypatch, kv_cache_dtype="int8"), (1, 65), 1e-3)


def test_bfloat16_rounds_no_worse_than_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    compare(made("llama", monkeypatch, dtype=torch.bfloat16), (3, 40), 0.03)


def test_a_prompt_and_a_refused_layer_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = made("bloom", monkeypatch)
    step, cache = step_of((9,)), filled(runner)
    seen: list[int] = []

    def counted(blocks: Any, *rest: Any) -> Tensor:
        seen.append(len(blocks))
        return run_stack(blocks, *rest)

    x = runner.frame.enter(step.token_ids, step.positions)
    strange = [copy.copy(block) for block in runner.blocks]
    strange[1].spec = copy.copy(strange[1].spec)
    object.__setattr__(strange[1].spec, "place", "post")
    bound = bind_stack(strange, run_stack)
    assert bound.name == "triton" and "1 of 2 layers" in bound.refused["triton"]
    TritonStack(counted)(strange, x, step, cache.layers, {})
    assert seen == [1]
    prompt = make_step([Chunk(0, 0, 3, True)], lambda chunk: torch.arange(3), [[1]], DEVICE)
    TritonStack(counted)(
        runner.blocks, runner.frame.enter(prompt.token_ids, prompt.positions), prompt, cache.layers, {}
    )
    assert seen == [1, 2]

"""Heads around fused layers run the library's product where rows are few, and answer as they did."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from slipstream.kernels.cpu.library import Library, refuse
from slipstream.model.frame.outer_linears import MOST_ROWS, _Around
from slipstream.model.fused.state import injected_state
from slipstream.model.parts.parts import is_swapped
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import Pair, close, inject, make, pair, prompt

pytestmark = pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))

VOCABULARY = 8200  # times 32 channels of float32: more than a megabyte


@pytest.fixture(scope="module")
def bert() -> Pair:
    return pair("bert", vocab_size=VOCABULARY)


class Calls:
    """How many rows each product of the library had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        run = Library.run

        def counted(library: Library, name: str, call: Any, threads: int | None = None) -> None:
            if name == "linear":
                self.rows.append(call.rows)
            run(library, name, call, threads)

        monkeypatch.setattr(Library, "run", counted)


@pytest.mark.parametrize("shape", [(1, 1), (4, 8), (3, 11)])
def test_a_head_multiplies_few_rows_by_the_library_and_many_by_torch(
    bert: Pair, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"input_ids": prompt(*shape, vocabulary=VOCABULARY)}
    calls = Calls(monkeypatch)
    with torch.no_grad():
        close(bert.original(**inputs), bert.engine(**inputs))
    rows = shape[0] * shape[1]
    assert calls.rows == ([rows] if rows <= MOST_ROWS else [])


def test_small_linears_and_those_of_layers_stay(bert: Pair) -> None:
    swapped = [name for name, module in bert.engine.module.named_modules() if is_swapped(module)]
    assert swapped == ["cls.predictions.decoder"]


@pytest.mark.parametrize("rows", [1, 2 * MOST_ROWS])
def test_linears_of_a_convolution_do_as_a_head_does_beside_one_torch_thread(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = next(t for f, t in VARIANTS if f.name == "lfm2" and t.label == "convolutions")
    original = peaked_model(replace(tiny, options={**tiny.options, "hidden_size": 512}))
    engine = inject(copy.deepcopy(original))
    own = ["layers.0.conv.in_proj", "layers.0.conv.out_proj"]
    parts = dict(engine.module.model.named_modules())
    assert all(is_swapped(parts[name]) for name in own)
    threads: list[int] = []
    run = _Around.__call__

    def watched(self: _Around, module: nn.Module, x: Tensor) -> Tensor:
        if module is parts[own[0]]:
            threads.append(torch.get_num_threads())
        return run(self, module, x)

    monkeypatch.setattr(_Around, "__call__", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ids = prompt(1, rows, vocabulary=50)
        with torch.no_grad():
            close(original(ids).logits, engine(ids).logits)
    finally:
        torch.set_num_threads(before)
    assert threads == [1 if rows <= MOST_ROWS else 2]
    assert injected_state(parts["layers.0"]).declined == 0


def test_keys_of_a_pooling_head_are_adjacent_where_torch_projects_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    torch.manual_seed(0)
    original = transformers.SiglipVisionModel(config).eval()
    engine = inject(copy.deepcopy(original))
    keys: list[Tensor] = []
    attend = F.multi_head_attention_forward

    def watched(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys.append(key)
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "multi_head_attention_forward", watched)
    pictures = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        close(original(pictures).pooler_output, engine(pictures).pooler_output)
    assert [key.is_contiguous() for key in keys] == [False, True]
    twin = copy.deepcopy(engine)
    with torch.no_grad():
        close(original(pictures[:1]).pooler_output, twin(pictures[:1]).pooler_output)
    assert type(twin.module.head.attention).__name__ == "MultiheadAttention"


def head_of(model: Any) -> Any:
    return model.get_output_embeddings()


def test_a_head_follows_its_own_tensors(bert: Pair) -> None:
    engine = copy.deepcopy(bert.engine)
    head, inputs = head_of(engine.module), {"input_ids": prompt(1, 4, vocabulary=VOCABULARY)}
    before = engine(**inputs).logits
    with torch.no_grad():
        head.bias.add_(1.0)
    torch.testing.assert_close(engine(**inputs).logits, before + 1.0)
    head.weight = nn.Parameter(torch.zeros_like(head.weight))
    assert torch.equal(engine(**inputs).logits, head.bias.expand_as(before))
    head.weight, head.bias = nn.Parameter(head.weight.double()), nn.Parameter(head.bias.double())
    x = torch.randn(2, 32).double()
    assert head(x).dtype == torch.float64


def test_a_head_has_gradients_hooks_and_autocast_as_before(bert: Pair) -> None:
    head, own = head_of(bert.engine.module), head_of(bert.original)
    x = torch.randn(3, 32, requires_grad=True)
    head(x).sum().backward()
    expected = torch.autograd.grad(own(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    heard: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, out: heard.append(out))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = head(x)
    handle.remove()
    assert out.dtype == torch.bfloat16 and heard[0] is out


def test_a_traced_head_is_recorded_as_torchs(bert: Pair) -> None:
    head = head_of(bert.engine.module)
    with torch.no_grad():
        traced = torch.jit.trace(head, torch.zeros(1, 32))
        x = torch.randn(2, 32)
        torch.testing.assert_close(traced(x), head(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    engine = inject(make("llama", vocab_size=4 * VOCABULARY, gain=1.0), dtype=dtype)
    head, x = head_of(engine.module), torch.randn(5, 32).to(dtype)
    assert is_swapped(head)
    with torch.no_grad():
        exact = F.linear(x.float(), head.weight.float())
        torch.testing.assert_close(head(x), exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_head_of_zeros_and_an_empty_batch_are_served() -> None:
    original = make("bert", vocab_size=VOCABULARY)
    with torch.no_grad():
        head_of(original).weight.zero_()
    engine = inject(original)
    head = head_of(engine.module)
    assert is_swapped(head) and head(torch.empty(0, 32)).shape == (0, VOCABULARY)

"""Layers that run together say what they say one by one, whoever looks at what is in between."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import DeviceError
from slipstream.kernels.cpu.library import refuse
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.kernels.cpu.text import NativeText
from slipstream.model.fused.defer import Pending, current
from slipstream.model.fused.padding import pack, real_tokens
from slipstream.model.fused.watch import wants_original
from slipstream.spec import BlockSpec, Norm
from tests.helpers.models import Pair, blocks_that_run, close, inject, make, pair, prompt

pytestmark = pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))

LENGTH = 9
MASKS = {
    "none": [1] * 9,
    "right": [1] * 6 + [0] * 3,
    "left": [0] * 4 + [1] * 5,
    "holes": [1, 0, 1, 1, 0, 0, 1, 0, 1],
    "one token": [0] * 5 + [1] + [0] * 3,
}


def padded(*names: str) -> dict[str, Tensor]:
    mask = torch.tensor([MASKS[name] for name in names])
    return {"input_ids": prompt(len(names), LENGTH), "attention_mask": mask}


def both(models: Pair, inputs: dict[str, Any], *, exact: bool = False, **more: Any) -> list[int]:
    """Compare real positions, or all of them where `exact`; how many blocks each native call had."""
    with torch.no_grad():
        expected = models.original(**inputs, **more)
    with blocks_that_run() as ran:
        got = models.engine(**inputs, **more)
    close(expected, got, mask=None if exact else inputs.get("attention_mask"))
    return ran.calls


@pytest.fixture(scope="module")
def bert() -> Pair:
    return pair("bert", "BertModel", num_hidden_layers=3)


@pytest.mark.parametrize("names", [("none",), ("none", "right"), ("left", "none", "holes"), ("one token",)])
def test_real_positions_and_the_pooler_are_the_originals(bert: Pair, names: tuple[str, ...]) -> None:
    # The pooler reads the first position, which is padding in some of these.
    assert both(bert, padded(*names)) == [3]


def test_padded_positions_are_zeros_but_for_a_row_s_first_and_last(bert: Pair) -> None:
    inputs = padded("left", "right")
    with torch.no_grad():
        expected = bert.original(**inputs).last_hidden_state
    got = bert.engine(**inputs).last_hidden_state
    close(expected[:, [0, -1]], got[:, [0, -1]])
    mask = inputs["attention_mask"].bool()
    mask[:, [0, -1]] = True
    assert type(got) is Tensor and not got[~mask].any()


def test_a_row_without_any_token_runs_layer_by_layer(bert: Pair) -> None:
    inputs = padded("none", "right")
    inputs["attention_mask"][1] = 0
    assert both(bert, inputs, exact=True) == []


def test_a_mask_of_pairs_of_tokens_runs_layer_by_layer(bert: Pair) -> None:
    inputs = padded("none", "none")
    pairs = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    pairs[:, :, 2:5, 6] = False
    assert both(bert, {**inputs, "attention_mask": pairs}, exact=True) == []


@pytest.mark.parametrize(
    "more", [{"output_hidden_states": True}, {"output_attentions": True}, {"return_dict": False}], ids=str
)
def test_whatever_else_is_asked_for_is_the_originals(more: dict[str, Any]) -> None:
    models = pair("bert", "BertModel", attn_implementation="eager")
    together = both(models, padded("none", "right"), exact="return_dict" not in more, **more)
    assert together == ([2] if "return_dict" in more else [])


def test_states_that_a_config_asks_for_are_recorded_once() -> None:
    models = pair("bert", output_hidden_states=True)
    assert both(models, padded("right"), exact=True) == []


def test_a_loss_over_padded_positions_is_the_originals() -> None:
    models = pair("bert")
    inputs = padded("none", "right", "left")
    assert both(models, {**inputs, "labels": inputs["input_ids"]}, exact=True) == [2]
    assert both(models, inputs) == [2]
    with torch.no_grad():
        args = (inputs["input_ids"], inputs["attention_mask"], None, None, None, inputs["input_ids"])
        close(models.original(*args).loss, models.engine(*args).loss)


def test_eager_attention_s_additive_masks_are_read() -> None:
    models = pair("bert", "BertModel", attn_implementation="eager")
    assert both(models, padded("none", "left", "holes")) == [2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_as_near_to_float32_as_the_original(dtype: torch.dtype) -> None:
    original = make("bert", "BertModel", num_hidden_layers=3, gain=1.0)
    inputs = padded("none", "left", "right")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        exact = copy.deepcopy(original).to(dtype).float()(**inputs).last_hidden_state[real]
        theirs = copy.deepcopy(original).to(dtype)(**inputs).last_hidden_state[real]
    engine = inject(original, dtype=dtype)
    with blocks_that_run() as ran:
        ours = engine(**inputs).last_hidden_state[real]
    assert ran.calls == [3] and ours.dtype == dtype
    errors = [float((states.float() - exact).square().mean()) for states in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "quick_gelu", "silu", "relu"])
def test_many_rows_of_bfloat16_are_as_near_to_float32_as_the_original(activation: str) -> None:
    # 96 rows: the matrices meet them in panels, the activation is rounded as it is packed, and every query
    # sees whole vectors of keys.
    original = make("bert", "BertModel", num_hidden_layers=3, gain=1.0, hidden_act=activation)
    inputs = {"input_ids": prompt(3, 32)}
    with torch.no_grad():
        exact = copy.deepcopy(original).bfloat16().float()(**inputs).last_hidden_state
        theirs = copy.deepcopy(original).bfloat16()(**inputs).last_hidden_state
    ours = inject(original, dtype=torch.bfloat16)(**inputs).last_hidden_state
    errors = [float((states.float() - exact).square().mean()) for states in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1]


def test_more_tokens_than_run_at_a_time_are_the_originals(bert: Pair) -> None:
    names = list(MASKS) * 30  # 750 real tokens or more
    assert both(bert, padded(*names)) == [3]
    decoder = pair("llama")
    assert both(decoder, padded(*(["none", "right"] * 40)), use_cache=False) == [2]


def test_packed_weights_run_together() -> None:
    original = make("bert", "BertModel", hidden_size=64, intermediate_size=128)
    engine = inject(original, quant="int8")
    inputs = padded("none", "right")
    one_by_one = engine(**inputs, output_hidden_states=True).last_hidden_state
    with blocks_that_run() as ran:
        together = engine(**inputs).last_hidden_state
    assert ran.calls == [2]
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(together[real], one_by_one[real], atol=1e-4, rtol=1e-4)


def test_inference_mode_and_a_mask_of_ones_make_no_difference(bert: Pair) -> None:
    inputs = padded("none", "right")
    with torch.inference_mode():
        assert both(bert, inputs) == [3]
        assert both(bert, {"input_ids": inputs["input_ids"]}) == [3]


def louder(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.5 if isinstance(output, Tensor) else (output[0] * 1.5, *output[1:])


@pytest.mark.parametrize(
    "place", ["encoder.layer.0", "encoder.layer.1", "encoder.layer.2", "encoder.layer.1.output", "embeddings"]
)
def test_hooks_count(place: str) -> None:
    models = pair("bert", "BertModel", num_hidden_layers=3)
    handles = [
        m.get_submodule(place).register_forward_hook(louder) for m in (models.original, models.engine.module)
    ]
    both(models, padded("none", "right"))
    for handle in handles:
        handle.remove()
    assert both(models, padded("none", "right")) == [3]


def test_a_hook_that_keeps_what_it_sees_has_plain_tensors_in_the_end() -> None:
    models = pair("bert", "BertModel", num_hidden_layers=3)
    kept: list[list[Tensor]] = [[], []]
    for model, states in zip((models.original, models.engine.module), kept, strict=True):
        for layer in model.encoder.layer:
            layer.register_forward_pre_hook(lambda module, args, states=states: states.append(args[0]))
    both(models, padded("none"))
    assert all(type(state) is Tensor for state in kept[1])
    close(kept[0], kept[1])


def replace_query(layer: Any) -> None:
    query = layer.attention.self.query
    layer.attention.self.query = nn.Sequential(copy.deepcopy(query), nn.Tanh())


def replace_weight(layer: Any) -> None:
    layer.output.dense.weight = nn.Parameter(torch.eye(32, 48))


def replace_forward(layer: Any) -> None:
    dense = layer.intermediate
    dense.forward = functools.partial(lambda own, x: own(x) * 0.5, dense.forward)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a part": replace_query,
    "a tensor": replace_weight,
    "a forward": replace_forward,
    "values in place": lambda layer: layer.attention.output.dense.bias.data.add_(1.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_what_is_done_to_one_layer_counts(change: str, index: int) -> None:
    models = pair("bert", "BertModel", num_hidden_layers=3)
    for model in (models.original, models.engine.module):
        CHANGES[change](model.encoder.layer[index])
    both(models, padded("none", "right"))


def test_layers_in_another_order_or_number_count() -> None:
    models = pair("bert", "BertModel", num_hidden_layers=3)
    for model in (models.original, models.engine.module):
        layers = model.encoder.layer
        model.encoder.layer = nn.ModuleList([layers[2], layers[0], layers[0]])
    assert both(models, padded("none", "right")) == [3]


class Peeking(nn.Module):
    """A loop that does with states what no layer can know of."""

    def __init__(self, encoder: Any, use: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.layer, self.use = encoder.layer, use

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        mask = kwargs.get("attention_mask")
        states = self.use(self.layer, hidden_states, mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=states)


def skips(layers: Any, x: Tensor, mask: Any) -> Tensor:
    first = layers[0](x, mask)
    return layers[2](layers[1](first, mask), mask) + first


def branches(layers: Any, x: Tensor, mask: Any) -> Tensor:
    first = layers[0](x, mask)
    return torch.cat([layers[1](first, mask)[:, :5], layers[2](first, mask)[:, 5:]], dim=1)


def writes(layers: Any, x: Tensor, mask: Any) -> Tensor:
    first = layers[0](x, mask)
    second = layers[1](first, mask)
    first[:, 2] = 0.0
    second += first
    return layers[2](second, mask)


def stops(layers: Any, x: Tensor, mask: Any) -> Tensor:
    return layers[1](layers[0](x, mask), mask)


def changes_mask(layers: Any, x: Tensor, mask: Any) -> Tensor:
    other = mask.clone()
    other[..., 3] = False
    return layers[2](layers[1](layers[0](x, mask), other), mask)


@pytest.mark.parametrize("use", [skips, branches, writes, stops, changes_mask])
def test_a_loop_may_do_what_it_likes(use: Callable[[Any, Any, Any], Any]) -> None:
    models = pair("bert", "BertModel", num_hidden_layers=3)
    for model in (models.original, models.engine.module):
        model.encoder = Peeking(model.encoder, use)
    inputs = padded("none", "right")
    both(models, inputs)
    assert type(models.engine(**inputs).last_hidden_state) is Tensor


def test_input_that_is_overwritten_before_it_is_read_is_an_error() -> None:
    models = pair("bert", "BertModel", num_hidden_layers=3)

    def overwrites(layers: Any, x: Tensor, mask: Any) -> Tensor:
        first = layers[0](x, mask)
        x.zero_()
        return layers[1](first, mask)

    models.engine.module.encoder = Peeking(models.engine.module.encoder, overwrites)
    with pytest.raises(DeviceError, match="wrote in place"):
        models.engine(**padded("none"))
    models.engine.module.encoder = Peeking(models.engine.module.encoder, stops)
    models.engine(**padded("none"))


def test_a_forward_with_gradients_or_of_a_layer_alone_does_not_wait(bert: Pair) -> None:
    inputs = padded("none", "right")
    with blocks_that_run() as ran:
        with_grad = bert.engine.module(**inputs)
        x = torch.randn(1, 4, 32)
        with torch.no_grad():
            alone = bert.engine.module.encoder.layer[0](x)
            close(bert.original.encoder.layer[0](x), alone)
    assert ran.calls == []
    with torch.no_grad():
        close(dict(bert.original(**inputs)), dict(with_grad))


def test_a_copy_and_a_cast_model_run_together(bert: Pair) -> None:
    twin = copy.deepcopy(bert.engine)
    twin.module.encoder.layer[0].output.dense.bias.data.add_(1.0)
    assert both(bert, padded("none", "right")) == [3]
    with blocks_that_run() as ran:
        changed = twin(**padded("none")).last_hidden_state
    assert ran.calls == [3]
    assert not torch.allclose(changed, bert.engine(**padded("none")).last_hidden_state)
    wide = twin.module.double()
    with torch.no_grad():
        assert wide(**padded("none")).last_hidden_state.dtype == torch.float64


def test_where_the_library_declines_the_blocks_run(bert: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeStack, "encode", lambda *args: None)
    monkeypatch.setattr(NativeText, "__call__", lambda *args: None)
    both(bert, padded("none", "left"), exact=True)


def test_a_pending_state_shows_its_shape_and_computes_the_rest_once(bert: Pair) -> None:
    seen: list[Any] = []

    def looks(layers: Any, x: Tensor, mask: Any) -> Tensor:
        first = layers[0](x, mask)
        seen.extend((type(first), first.shape, first.dtype, first.device, first.dim(), type(first)))
        seen.extend((first.mean().item(), type(first), len(repr(first)) > 0))
        return layers[1](first, mask)

    engine = copy.deepcopy(bert.engine)
    engine.module.encoder = Peeking(engine.module.encoder, looks)
    engine(**padded("none"))
    shape, cpu = torch.Size([1, LENGTH, 32]), torch.device("cpu")
    assert seen[:6] == [Pending, shape, torch.float32, cpu, 3, Pending]
    assert seen[6] == seen[6] and seen[7] is Tensor and seen[8]


def test_the_report_names_what_runs_the_layers_together(bert: Pair) -> None:
    assert all(layer.kernels["stack"].startswith("cpu-") for layer in bert.engine.report().layers)


SPEC = BlockSpec(32, 4, 4, 8, 48, Norm("layer", 1e-5), causal=False)


@pytest.mark.parametrize("window", [2, 6, 7])
def test_windows_are_told_from_padding(window: int) -> None:
    near = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() <= window // 2
    spec = (
        copy.replace(SPEC, window=window)
        if hasattr(copy, "replace")
        else SPEC.__class__(**{**vars(SPEC), "window": window})
    )
    right = torch.tensor([MASKS["none"], MASKS["right"]]).bool()
    found = real_tokens(right[:, None, None] & near, spec, 2, LENGTH)
    assert isinstance(found, Tensor) and torch.equal(found, right)
    assert real_tokens(near[None, None], spec, 2, LENGTH) is None
    assert real_tokens(near[None, None], SPEC, 2, LENGTH) is False
    assert real_tokens(None, spec, 2, LENGTH) is False
    holes = torch.tensor([MASKS["holes"], MASKS["none"]]).bool()
    assert real_tokens(holes[:, None, None] & near, spec, 2, LENGTH) is False


@pytest.mark.parametrize("value", [-1.0, 1.0, 0.5, -3.0])
def test_a_mask_that_weighs_keys_is_no_padding(value: float) -> None:
    mask = torch.zeros(1, 1, LENGTH, LENGTH)
    assert real_tokens(mask, SPEC, 1, LENGTH) is None
    mask[..., 4] = value
    assert real_tokens(mask, SPEC, 1, LENGTH) is False


def test_rows_are_packed_with_what_poolers_read_behind_them() -> None:
    real = torch.tensor([MASKS["left"], MASKS["right"]]).bool()
    rows = pack(real, 2, LENGTH, specs=(SPEC,))
    assert rows.index is not None
    assert rows.index.tolist() == [4, 5, 6, 7, 8, 0, 9, 10, 11, 12, 13, 14, 17]
    assert rows.packed.query_starts.tolist() == [0, 6, 13] and rows.packed.kv_lens.tolist() == [5, 6]
    narrow = pack(real, 2, LENGTH, specs=(SPEC, dataclasses.replace(SPEC, window=4)))
    assert narrow.packed.query_starts.tolist() == [0, 6, 12]
    causal = pack(real, 2, LENGTH, specs=(dataclasses.replace(SPEC, causal=True),))
    assert causal.index is not None  # what stands behind the first real token sees one
    assert causal.index.tolist() == [4, 5, 6, 7, 8, *range(9, 18)]
    assert causal.packed.query_starts.tolist() == [0, 5, 14] and causal.packed.kv_lens.tolist() == [5, 6]
    whole = pack(real, 2, LENGTH, specs=(SPEC,), drops=False)
    assert whole.index is not None and whole.packed.kv_lens.tolist() == [5, 6]
    assert whole.index.tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3, *range(9, 18)]


@pytest.mark.parametrize("asked", [{"output_attentions": True}, {"output_hidden_states": True}])
def test_a_forward_that_was_interrupted_is_no_part_of_the_next_one(asked: dict[str, bool]) -> None:
    models = pair("llama", "LlamaForCausalLM", num_hidden_layers=3)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = models.engine.module.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        models.engine.module(prompt(), **asked)
    handle.remove()
    assert both(models, padded("none")) == [3]
    assert current() is None
    assert not wants_original()


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("width", [16, 24, 31, 33, 48, 64])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "bert"])
def test_states_of_another_width_never_reach_the_library(kind: str, width: int, cache: bool) -> None:
    engine = inject(make(kind))
    given = {"use_cache": cache} if kind != "bert" else {}
    with pytest.raises(RuntimeError, match="size of tensor|shape"):
        engine(inputs_embeds=torch.randn(2, LENGTH, width), **given)

"""Layers that attend in windows, blocks or grids, on images and texts of awkward sizes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.errors import UnsupportedError
from slipstream.families import FAMILIES, Tiny
from slipstream.model.fused.state import injected_state
from slipstream.parallel import ALONE, share_of
from tests.families.calls import Calls
from tests.families.sweep import peaked_model

TOLERANCE = 1e-4
"""The promised bound for float32, relative to the largest value if that is above one."""


def _pair(tiny: Tiny) -> tuple[Any, Any, list[Any]]:
    """Return the original, the engine, and the original's layers that the engine fuses."""
    original = peaked_model(tiny)
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    assert engine.report().level == "block", str(engine.report())
    return original, engine, [original.get_submodule(layer.name) for layer in engine.report().layers]


def _agree(expected: Tensor, got: Tensor) -> None:
    assert expected.shape == got.shape
    assert float((expected - got).abs().max()) <= TOLERANCE * max(1.0, float(expected.abs().max()))


def _variants(family: str) -> list[Any]:
    return [
        pytest.param(tiny, id=tiny.label or family)
        for tiny in FAMILIES[family].tiny
        if hasattr(transformers, tiny.model)
    ]


@pytest.mark.parametrize("tiny", _variants("grids"))
def test_questions_with_pictures_of_several_sizes_are_answered_alike(tiny: Tiny) -> None:
    original, engine, layers = _pair(tiny)
    generator = torch.Generator().manual_seed(3)
    grids = torch.tensor([[1, 4, 6], [1, 4, 4]])
    pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=generator)
    ids = torch.randint(3, 90, (2, 16), generator=generator)
    ids[0, 2], ids[0, 3:9], ids[1, 1], ids[1, 2:6] = 102, 100, 102, 100
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": grids}
    given["mm_token_type_ids"] = (ids == 100).int()
    with torch.no_grad(), Calls(layers) as calls:
        expected = original(**given, pixel_values=pixels).logits
        got = engine(**given, pixel_values=pixels).logits
        blank = original(**given, pixel_values=torch.zeros_like(pixels)).logits
    assert calls.blocks == 4, "not every layer of both towers ran as a block"
    _agree(expected, got)
    assert float((expected - blank).abs().max()) > 0.1, "the pictures have no say"


@pytest.mark.parametrize("tiny", [*_variants("swin"), *_variants("swinv2")])
@pytest.mark.parametrize("side", [None, 22, 50], ids=["its size", "smaller", "larger"])
def test_pictures_that_windows_do_not_divide_are_seen_alike(tiny: Tiny, side: int | None) -> None:
    original, engine, _ = _pair(tiny)
    side = side or int(original.config.image_size)
    pixels = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(1))
    more = {"interpolate_pos_encoding": True} if side != original.config.image_size else {}
    with torch.no_grad():
        expected = original(pixels, output_hidden_states=True, **more)
        got = engine(pixels, output_hidden_states=True, **more)
    _agree(expected.logits, got.logits)
    for one, other in zip(expected.hidden_states, got.hidden_states, strict=True):
        _agree(one, other)


def test_pictures_of_two_sizes_in_turn_are_each_seen_alike() -> None:
    original, engine, _ = _pair(FAMILIES["swin"].tiny[0])
    generator = torch.Generator().manual_seed(1)
    for side in (32, 48, 32, 22, 48):
        pixels = torch.randn(2, 3, side, side, generator=generator)
        with torch.no_grad():
            expected, got = (
                model(pixels, interpolate_pos_encoding=True).logits for model in (original, engine)
            )
        _agree(expected, got)


def test_a_layer_with_a_mask_of_its_own_keeps_it() -> None:
    tiny = FAMILIES["swin"].tiny[0]
    plain = peaked_model(tiny)
    layers = [m for m in plain.modules() if type(m).__name__ == "SwinLayer"]

    class Closer(type(layers[0])):  # type: ignore[misc]
        def get_attn_mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
            mask = super().get_attn_mask(*args, **kwargs)
            return None if mask is None else mask * 0.01

    changed = copy.deepcopy(plain)
    for layer in [m for m in changed.modules() if type(m) is type(layers[0])]:
        layer.__class__ = Closer
    engine = slipstream.init_inference(
        copy.deepcopy(changed), dtype=torch.float32, replace_with_kernel_inject=True
    )
    assert engine.report().level == "block", str(engine.report())
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain_out, expected, got = (model(pixels).logits for model in (plain, changed, engine))
    _agree(expected, got)
    assert float((expected - plain_out).abs().max()) > 1e-3, "the mask has no say"


@pytest.mark.parametrize("tiny", [*_variants("longt5"), *_variants("pegasus_x")])
@pytest.mark.parametrize("length", [1, 3, 4, 13, 29])
def test_texts_that_blocks_do_not_divide_are_read_alike(tiny: Tiny, length: int) -> None:
    original, engine, _ = _pair(tiny)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, 128, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, (length + 1) // 2 :] = 0
    answer = torch.randint(3, 128, (3, 5), generator=generator)
    for given in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            expected = original(input_ids=ids, decoder_input_ids=answer, **given)
            got = engine(input_ids=ids, decoder_input_ids=answer, **given)
        _agree(expected.logits, got.logits)
        # Values at padded positions are never read.
        real = given.get("attention_mask", torch.ones_like(ids)).bool()
        _agree(expected.encoder_last_hidden_state[real], got.encoder_last_hidden_state[real])


def test_attention_maps_are_the_originals() -> None:
    original, engine, _ = _pair(FAMILIES["swin"].tiny[0])
    for model in (original, engine.module):
        model.set_attn_implementation("eager")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = (model(pixels, output_attentions=True) for model in (original, engine))
    assert len(got.attentions) == len(expected.attentions) > 0
    for one, other in zip(expected.attentions, got.attentions, strict=True):
        _agree(one, other)


def test_state_dicts_and_quantized_matrices_go_with_it() -> None:
    original = peaked_model(FAMILIES["swin"].tiny[0])
    options = {"dtype": torch.float32, "quant": "int8", "replace_with_kernel_inject": True}
    engine = slipstream.init_inference(copy.deepcopy(original), **options)
    assert engine.report().level == "block"
    assert engine.module.state_dict().keys() == original.state_dict().keys()
    name = "swin.encoder.layers.0.blocks.1.attention.relative_position_bias.relative_position_bias_table"
    assert torch.equal(engine.module.state_dict()[name], original.state_dict()[name])
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, got = original(pixels).logits, engine(pixels).logits
    # int8 rounds in steps of 1/127 of a group's largest weight, through four layers.
    assert float((expected - got).abs().max()) < 0.05 * float(expected.abs().max())


def test_several_ranks_are_refused_with_the_reason() -> None:
    _, engine, _ = _pair(FAMILIES["swin"].tiny[0])
    layer = engine.module.get_submodule(engine.report().layers[0].name)
    two = replace(ALONE, tp=replace(ALONE.tp, ranks=(0, 1)))
    with pytest.raises(UnsupportedError, match="windows or blocks cannot be split"):
        share_of(injected_state(layer).block.spec, two)


def test_a_token_that_sees_all_and_is_seen_by_all_counts_in_led() -> None:
    original, engine, layers = _pair(FAMILIES["led"].tiny[0])
    ids = torch.randint(3, 128, (3, 21), generator=torch.Generator().manual_seed(1))
    everywhere = torch.zeros_like(ids)
    everywhere[:, 0] = 1
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :5]}
    with torch.no_grad(), Calls(layers) as calls:
        plain = original(**given).logits
        expected = original(**given, global_attention_mask=everywhere).logits
        got = engine(**given, global_attention_mask=everywhere).logits
        assert calls.layers == 2 * calls.blocks > 0
    _agree(expected, got)
    assert float((expected - plain).abs().max()) > 1e-2

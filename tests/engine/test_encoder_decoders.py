"""Encoder-decoders in use: a user's own caches and states, attention maps, dtypes, formats, bad input."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import slipstream
from slipstream.families import FAMILIES
from tests.families.calls import Calls
from tests.families.sweep import peaked_model
from tests.helpers.models import Pair, close, inject

TEXT = ("t5", "umt5", "t5gemma", "bart", "mbart")


@functools.cache
def _original(family: str) -> Any:
    return peaked_model(FAMILIES[family].tiny[0])


@functools.cache
def pair(family: str) -> Pair:
    return Pair(_original(family), inject(_original(family)))


def _padded() -> dict[str, Tensor]:
    ids = torch.randint(3, 120, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _answer(length: int = 5) -> Tensor:
    return torch.randint(3, 120, (3, length), generator=torch.Generator().manual_seed(2))


def _spectra(family: str = "whisper") -> Tensor:
    config = _original(family).config
    shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", TEXT)
def test_states_that_the_user_gives_take_the_encoders_place(family: str) -> None:
    two = pair(family)
    states = two.original.get_encoder()(**_padded()).last_hidden_state.detach()
    given = {"attention_mask": _padded()["attention_mask"], "encoder_outputs": BaseModelOutput(states)}
    with torch.no_grad():
        close(
            *(m(**given, decoder_input_ids=_answer()).logits for m in (two.original, two.engine)), atol=1e-3
        )
    options = {"max_new_tokens": 6, "do_sample": False}
    written = [m.generate(**copy.deepcopy(given), **options) for m in (two.original, two.engine)]
    assert torch.equal(*written)


@pytest.mark.parametrize("family", TEXT)
def test_a_cache_that_the_user_gives_is_filled_and_read_as_by_the_original(family: str) -> None:
    two = pair(family)
    logits, caches = [], []
    for model in (two.original, two.engine):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with torch.no_grad():
            model(**_padded(), decoder_input_ids=_answer()[:, :3], past_key_values=cache, use_cache=True)
            # What the encoder says does not count any more: its keys and values are in the cache.
            other = {**_padded(), "input_ids": _padded()["input_ids"].flip(0)}
            rest = model(**other, decoder_input_ids=_answer()[:, 3:], past_key_values=cache, use_cache=True)
        logits.append(rest.logits)
        caches.append(cache)
    close(*logits, atol=1e-3)
    close(*(cache.self_attention_cache for cache in caches), atol=1e-3)
    close(*(cache.cross_attention_cache for cache in caches), atol=1e-3)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper", "moonshine"])
def test_attention_maps_are_the_originals(family: str) -> None:
    original = copy.deepcopy(_original(family))
    original.set_attn_implementation("eager")
    engine = inject(original)
    entry = {"whisper": {"input_features": _spectra()}, "moonshine": {"input_values": torch.randn(2, 2400)}}
    given = {**entry.get(family, _padded()), "output_attentions": True}
    rows = next(iter(given.values())).shape[0]  # type: ignore[union-attr]
    with torch.no_grad():
        expected, got = (m(**given, decoder_input_ids=_answer()[:rows]) for m in (original, engine))
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        # The oldest supported transformers collects none of T5's.
        assert family == "t5" or len(expected[name]) == 2
        close(expected[name], got[name], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["t5", "t5gemma", "bart", "whisper"])
def test_half_precision_is_no_worse_than_the_originals(family: str, dtype: torch.dtype) -> None:
    original = _original(family)
    entry = {"input_features": _spectra()} if family == "whisper" else _padded()
    rows = next(iter(entry.values())).shape[0]
    given = {**entry, "decoder_input_ids": _answer()[:rows]}
    low = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    engine = inject(original, dtype=dtype)
    rounded = copy.deepcopy(original).to(dtype)
    with torch.no_grad():
        truth = original(**given).logits
        theirs, ours = ((m(**low).logits.float() - truth).square().mean().sqrt() for m in (rounded, engine))
    assert engine.report().level == "block", str(engine.report())
    assert float(ours) <= 1.5 * float(theirs)


def test_float16_that_overflows_is_clamped_as_the_original_clamps_it() -> None:
    """A layer of the encoder whose branch leaves the dtype's range, as real T5 checkpoints do."""
    original = copy.deepcopy(_original("mbart"))
    with torch.no_grad():
        for layer in original.get_encoder().layers:
            layer.fc2.bias.fill_(6e4)
    engine = inject(original, dtype=torch.float16, injection_check="off")
    half = copy.deepcopy(original).to(torch.float16)
    with torch.no_grad():
        expected, got = (m.get_encoder()(**_padded(), output_hidden_states=True) for m in (half, engine))
    assert float(expected.hidden_states[1].abs().max()) > 5e4
    assert bool(torch.isfinite(got.last_hidden_state).all())
    # Where both are clamped they are equal, and elsewhere as near as rounding leaves numbers of this size.
    torch.testing.assert_close(got.hidden_states[2], expected.hidden_states[2], atol=64.0, rtol=2e-3)


@pytest.mark.parametrize("family", ["t5", "t5gemma", "bart"])
def test_packed_weights_serve_both_kinds_of_attention(family: str) -> None:
    engine = inject(_original(family), quant="int8")
    formats = {layer.format for layer in engine.report().layers}
    assert formats == {"int8"}
    with torch.no_grad():
        expected = _original(family)(**_padded(), decoder_input_ids=_answer()).logits
        got = engine(**_padded(), decoder_input_ids=_answer()).logits
    assert float((expected - got).abs().max()) < 0.1 * float(expected.abs().max())
    assert float((expected - got).abs().max()) > 0


@pytest.mark.parametrize("family", ["t5", "umt5", "t5gemma", "bart", "whisper", "moonshine"])
def test_the_state_dict_has_the_originals_names_and_values(family: str) -> None:
    expected, got = _original(family).state_dict(), pair(family).engine.state_dict()
    assert list(expected) == list(got)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_decoder_that_drafts_for_itself_writes_the_same() -> None:
    two = pair("bart")
    first = {name: tensor[:1] for name, tensor in _padded().items()}
    options = {"max_new_tokens": 8, "do_sample": False}
    for draft in ({"assistant_model": _original("bart")}, {"prompt_lookup_num_tokens": 2}):
        written = [m.generate(**first, **options, **draft) for m in (two.original, two.engine)]
        assert torch.equal(*written), draft


def test_a_table_of_positions_that_changes_later_counts() -> None:
    """The bias by relative position is the layer's own part, and is asked for at each call."""
    original = copy.deepcopy(_original("t5"))
    engine = inject(original)
    for model in (original, engine.module):
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.mul_(-3)
    with torch.no_grad():
        close(*(m(**_padded(), decoder_input_ids=_answer()).logits for m in (original, engine)), atol=1e-3)


def test_a_decoder_alone_listens_to_states_upon_a_cache_of_one_kind() -> None:
    """transformers mixes both kinds of attention in such a cache; the layers' own code goes on doing so."""
    original = peaked_model(FAMILIES["bart"].tiny[1])
    engine = inject(original)
    states = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for cache in (None, DynamicCache()):
            given = {"input_ids": _answer(), "encoder_hidden_states": states}
            expected, got = (
                m(**given, past_key_values=copy.deepcopy(cache), use_cache=cache is not None)
                for m in (original, engine)
            )
            close(expected.logits, got.logits, atol=1e-3)


@pytest.mark.parametrize("timed", [False, True], ids=["text", "timestamps"])
def test_whispers_own_generate_writes_the_same(timed: bool) -> None:
    original = copy.deepcopy(_original("whisper"))
    config = original.generation_config
    config.no_timestamps_token_id, config.is_multilingual = 60, False
    config.max_initial_timestamp_index, config.suppress_tokens = 5, [7, 8]
    config.prev_sot_token_id = 58
    engine = inject(original)
    options: dict[str, Any] = {"max_new_tokens": 8, "return_timestamps": timed}
    features = _spectra()[:1]
    with torch.no_grad():
        expected, got = (m.generate(features, **options) for m in (original, engine))
    assert torch.equal(expected, got)


_BAD: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a spectrogram that is too short": (
        "whisper",
        lambda m: m(_spectra()[..., :6], decoder_input_ids=_answer()[:2]),
    ),
    "sound with a channel of its own": (
        "moonshine",
        lambda m: m(torch.randn(2, 1, 2400), decoder_input_ids=_answer()[:2]),
    ),
    "sound of no dimension but time": (
        "moonshine",
        lambda m: m(torch.randn(2400), decoder_input_ids=_answer()[:1]),
    ),
    "states of another width": (
        "bart",
        lambda m: m(encoder_outputs=BaseModelOutput(torch.randn(3, 4, 30)), decoder_input_ids=_answer()),
    ),
    "states of another batch": (
        "t5",
        lambda m: m(encoder_outputs=BaseModelOutput(torch.randn(2, 4, 64)), decoder_input_ids=_answer()),
    ),
    "neither tokens nor states": ("t5", lambda m: m(decoder_input_ids=_answer())),
    "nothing to decode": ("t5", lambda m: m(**_padded())),
}


@pytest.mark.parametrize("case", _BAD)
def test_bad_input_fails_as_in_the_original_and_leaves_the_engine_usable(case: str) -> None:
    family, call = _BAD[case]
    two = pair(family)
    with torch.no_grad():
        with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever the original raises
            call(two.original)
        with pytest.raises(type(expected.value)):
            call(two.engine)
    layers = [two.original.get_submodule(layer.name) for layer in two.engine.report().layers]
    entry = {"whisper": {"input_features": _spectra()}, "moonshine": {"input_values": torch.randn(2, 2400)}}
    given = entry.get(family, _padded())
    rows = next(iter(given.values())).shape[0]
    with torch.no_grad(), Calls(layers) as calls:
        close(
            *(m(**given, decoder_input_ids=_answer()[:rows]).logits for m in (two.original, two.engine)),
            atol=1e-3,
        )
        assert calls.blocks == calls.layers > 0


def test_a_model_whose_decoder_cannot_be_fused_is_left_as_it_was() -> None:
    model = copy.deepcopy(_original("bart"))
    expected = {name: type(module) for name, module in model.named_modules()}
    extra = torch.nn.Linear(4, 4)
    model.get_decoder().layers[1].encoder_attn.extra = extra
    with pytest.raises(slipstream.WeightError, match=r"encoder_attn\.extra\.weight.* has no role"):
        inject_in_place(model)
    del model.get_decoder().layers[1].encoder_attn.extra
    assert {name: type(module) for name, module in model.named_modules()} == expected


def inject_in_place(model: Any) -> Any:
    return slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", TEXT)
def test_a_row_whose_mask_is_zero_all_over_sees_what_it_sees_in_the_original(
    family: str, implementation: str
) -> None:
    original = copy.deepcopy(_original(family))
    if implementation == "sdpa" and not original._supports_sdpa:
        pytest.skip("the original has no such attention")
    original.set_attn_implementation(implementation)
    engine = inject(original)
    given = _padded()
    given["attention_mask"][0] = 0
    with torch.no_grad():
        close(*(m(**given, decoder_input_ids=_answer()).logits for m in (original, engine)), atol=1e-3)
        tokens = [m.generate(**given, max_new_tokens=5, do_sample=False).tolist() for m in (original, engine)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("length", [8, 12])
@pytest.mark.parametrize("family", TEXT)
def test_a_mask_of_another_length_than_the_states_is_the_originals_error(family: str, length: int) -> None:
    two = pair(family)
    states = two.original.get_encoder()(**_padded()).last_hidden_state.detach()
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, :4] = 0
    given = {"attention_mask": mask, "encoder_outputs": BaseModelOutput(states)}
    for model in (two.original, two.engine):
        with pytest.raises(RuntimeError, match="size"):
            model(**given, decoder_input_ids=_answer())
        with pytest.raises(RuntimeError, match="size"):
            model.generate(**given, max_new_tokens=3)


@pytest.mark.parametrize("family", ["t5gemma", "bart"])
def test_padding_that_nobody_hides_from_the_decoder_has_its_states(family: str) -> None:
    two, ids = pair(family), _padded()["input_ids"].clone()
    ids[1, 6:] = two.original.generation_config.pad_token_id or 0
    states = [m.get_encoder()(input_ids=ids).last_hidden_state.detach() for m in (two.original, two.engine)]
    close(*states, atol=1e-3)
    close(*(m.generate(ids, max_new_tokens=5) for m in (two.original, two.engine)))

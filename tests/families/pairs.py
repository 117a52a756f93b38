"""Compares tiny encoder-decoders with their originals: logits, cached steps, every way of generating."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import slipstream
from slipstream.model.selfcheck.inputs import sample_inputs
from tests.families.calls import Calls
from tests.helpers.models import blocks_that_run

LENGTH, ANSWER, NEW_TOKENS = 12, 7, 6

MODES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "length_penalty": 0.7},
    "sampled beams": {"num_beams": 2, "do_sample": True, "top_k": 20},
    "forced": {"do_sample": False, "forced_bos_token_id": 9, "forced_eos_token_id": 11},
    "from a prompt": {"do_sample": False, "decoder_input_ids": torch.tensor([[4, 8, 5]] * 3)},
    "without a cache": {"do_sample": False, "use_cache": False},
    "a static cache": {"do_sample": False, "cache_implementation": "static"},
}
"""Ways of generating, by the arguments that choose them."""


def measure_pair(original: nn.Module) -> dict[str, Any]:
    """Compare an injected encoder-decoder with a copy of the original in float32.

    Errors of logits are relative to their root mean square if that is above one.

    Returns:
        The fields of a `Row`, except `family` and `variant`.
    """
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    layers = [original.get_submodule(layer.name) for layer in engine.report().layers]
    answer, answer_mask = _answer()
    runs: dict[str, Any] = {}
    with torch.no_grad(), Calls(layers) as calls:
        for name, given in _entries(original).items():
            given = {**given, "decoder_input_ids": answer[: _rows(given)], "output_hidden_states": True}
            if name == "left":
                given["decoder_attention_mask"] = answer_mask
            expected, got = original(**given), engine(**given)
            runs[name] = _error(expected.logits, got.logits, given.get("decoder_attention_mask"))
            if name == "left":
                runs["states"] = _states(expected, got, given["decoder_attention_mask"])
                runs["peak"] = float(expected.logits.softmax(-1).max(-1).values.median())
        padded = _entries(original)["right"]
        runs["cached"] = _cached(original, engine, padded, answer)
        given = {**padded, "decoder_input_ids": answer, "use_cache": False}
        expected = original(**given).logits
        with blocks_that_run() as ran:
            runs["joined"] = _error(expected, engine(**given).logits)
        runs["calls"] = "+".join(map(str, ran.calls)) or "-"
        differing = [name for name, options in MODES.items() if not _same(original, engine, padded, options)]
        assert calls.blocks == calls.layers > 0, "an injected layer ran its original code"
    return {
        **runs,
        "level": engine.report().level,
        "greedy": f"DIFFERENT: {', '.join(differing)}" if differing else "identical",
        "road": "compatible" if engine.why_compatible() else "engine",
    }


def _entries(original: Any) -> dict[str, dict[str, Tensor]]:
    """Return the encoder's inputs: one row, and batches padded on either side (audio on the right only)."""
    generator = torch.Generator().manual_seed(7)
    if original.main_input_name != "input_ids":
        return _sounds(original, generator)
    ids = torch.randint(3, original.config.vocab_size, (3, LENGTH), generator=generator)
    left = torch.ones_like(ids)
    left[0, :5] = 0
    left[1, :1] = 0
    return {
        "single": {"input_ids": ids[:1]},
        "left": {"input_ids": ids, "attention_mask": left},
        "right": {"input_ids": ids, "attention_mask": left.flip(1)},
    }


def _sounds(original: Any, generator: torch.Generator) -> dict[str, dict[str, Tensor]]:
    """Return three audio inputs shaped as the model's sample inputs, with their padding."""
    samples = sample_inputs(original.get_encoder())
    padded = samples[-1]
    drawn = {name: torch.randn(3, *t.shape[1:], generator=generator) for name, t in padded.items()}
    if "attention_mask" in padded:
        mask = padded["attention_mask"]
        drawn["attention_mask"] = torch.cat((mask, mask[1:]))
    single = {original.main_input_name: drawn[original.main_input_name][:1]}
    return {"single": single, "left": drawn, "right": drawn}


def _answer() -> tuple[Tensor, Tensor]:
    """Return decoder tokens, and a mask that pads their first row on the left."""
    ids = torch.randint(3, 120, (3, ANSWER), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


def _rows(given: Mapping[str, Tensor]) -> int:
    return next(iter(given.values())).shape[0]


def _error(expected: Tensor, got: Tensor, mask: Tensor | None = None) -> float:
    if mask is not None:
        expected, got = expected[mask.bool()], got[mask.bool()]
    assert bool(torch.isfinite(expected).all())
    return float((expected - got).abs().max()) / max(1.0, float(expected.square().mean().sqrt()))


def _states(expected: Any, got: Any, mask: Tensor) -> float:
    worst = 0.0
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert len(expected[name]) > 1
        for pair in zip(expected[name], got[name], strict=True):
            # The last hidden state of PEGASUS-X is a pair of tensors.
            parts = zip(*(each if isinstance(each, tuple) else (each,) for each in pair), strict=True)
            for one, other in parts:
                worst = max(worst, _error(one, other, mask if name.startswith("decoder") else None))
    return worst


def _cached(original: Any, engine: Any, padded: Mapping[str, Tensor], answer: Tensor) -> float:
    """Return the largest error of two more tokens and then one more, each after the cache of those before."""
    worst, caches = 0.0, [None, None]
    for start, stop in ((0, ANSWER - 3), (ANSWER - 3, ANSWER - 1), (ANSWER - 1, ANSWER)):
        given = {**padded, "decoder_input_ids": answer[:, start:stop]}  # uses a cache by default
        outputs = [
            model(**given, past_key_values=cache)
            for model, cache in zip((original, engine), caches, strict=True)
        ]
        caches = [output.past_key_values for output in outputs]
        worst = max(worst, _error(outputs[0].logits, outputs[1].logits))
    for part in ("self_attention_cache", "cross_attention_cache"):
        expected, got = (getattr(cache, part).layers[0] for cache in caches)
        worst = max(worst, _error(expected.keys, got.keys), _error(expected.values, got.values))
    assert caches[0].is_updated == caches[1].is_updated
    return worst


def _same(original: Any, engine: Any, padded: Mapping[str, Tensor], options: Mapping[str, Any]) -> bool:
    """Return whether both models generate the same tokens."""
    outputs = []
    for model in (original, engine):
        torch.manual_seed(3)
        outputs.append(model.generate(**padded, max_new_tokens=NEW_TOKENS, **options))
    return outputs[0].shape == outputs[1].shape and torch.equal(*outputs)

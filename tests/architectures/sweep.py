"""Compares the engine with the original model, for one type of model."""

from __future__ import annotations

import copy
import inspect
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import slipstream
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.selfcheck.inputs import sample_inputs
from tests.architectures.special import NOT_BUILT, NOT_RUN
from tests.architectures.tiny import TEXT, Kind, tiny_model

__all__ = ["TOLERANCE", "Result", "sweep"]

TOLERANCE = 1e-4
"""Bound on the error of float32 logits, relative to their root mean square if that is above one."""

_BATCH, _LENGTH, _PADDING, _NEW = 2, 16, 5, 4


@dataclass(frozen=True)
class Result:
    """The result of one type.

    Attributes:
        level: The report's level; "-" if nothing was compared.
        error: Largest error of the logits at real positions, relative to their size if that is above one.
        tokens: "equal" for equal greedy tokens, or why none were generated.
        speed: Speed of a call relative to the original, by the fastest of five calls each.
        why: Why layers are below level "block", which parts of blocks stay the original's, or why nothing was
            compared.
        fused: Number of layers that run as a block.
        layers: Number of all layers.
        report: The engine's report as text.
    """

    level: str
    error: float = 0.0
    tokens: str = "-"
    speed: float | None = None
    why: str = ""
    fused: int = 0
    layers: int = 0
    report: str = ""


def sweep(model_type: str, kind: Kind) -> Result:
    """Build a tiny model of a type, run it with and without the engine, and compare.

    Raises:
        AssertionError: The engine's greedy tokens differ.
        SlipstreamError: The engine refuses the model.
    """
    if model_type in NOT_BUILT:
        return Result("-", why=f"not built: {NOT_BUILT[model_type]}")
    try:
        model = tiny_model(model_type, kind)
        if model_type in NOT_RUN:
            return Result("-", why=f"not run: {NOT_RUN[model_type]}")
        inputs = _inputs(model, kind)
        expected = _answer(model, inputs)
    except MODEL_ERRORS as error:
        # Only the original has run: some types cannot be built from their default config once it is shrunk.
        package = re.search(r"requires the (\w+) library", str(error))
        if package is None and kind in TEXT and not kind == "sequence":
            raise
        why = f"needs the package {package[1]}" if package else " ".join(str(error).split())[:80]
        return Result("-", why=f"not built tiny: {why}")
    original = copy.deepcopy(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    got = _answer(engine, inputs)
    passed = [name for name, module in engine.module.named_modules() if _was_passed_over(module)]
    assert not passed, f"{passed} are reported as blocks, and ran their original code"
    report = engine.report()
    others = [layer for layer in report.layers if layer.level != "block"]
    return Result(
        report.level,
        _error(expected, got, inputs),
        _generate(original, engine, inputs),
        speed=_speed(original, engine, inputs),
        why="; ".join(dict.fromkeys(layer.reason for layer in report.layers if layer.reason))[:160],
        fused=len(report.layers) - len(others),
        layers=len(report.layers),
        report=str(report),
    )


def _was_passed_over(module: Any) -> bool:
    return is_injected(module) and injected_state(module).declined > 0


def _answer(model: Any, inputs: dict[str, Tensor]) -> Any:
    torch.manual_seed(1)  # some models choose patches at random
    with torch.no_grad():
        return model(**copy.deepcopy(inputs))


def _speed(original: Any, engine: Any, inputs: dict[str, Tensor]) -> float:
    """Return the ratio of the fastest of five calls each: the machine may be busy with other work."""
    least = [math.inf, math.inf]
    for _ in range(5):
        for place, model in enumerate((original, engine)):
            start = time.perf_counter()
            _answer(model, inputs)
            least[place] = min(least[place], time.perf_counter() - start)
    return round(least[0] / least[1], 2)


def _inputs(model: Any, kind: Kind) -> dict[str, Tensor]:
    """Return the inputs for a kind of model: tokens, images, audio, or two of these."""
    if kind in TEXT:
        return _tokens(model, kind)
    generator = torch.Generator().manual_seed(2)
    accepts = inspect.signature(model.forward).parameters
    if kind == "picture" and "input_ids" in accepts:
        return _tokens(model, kind)  # a vision-language model, which also runs on tokens alone
    tower = next(
        (part for part in (model, *model.children()) if getattr(part, "config", None) is _tower(model)), model
    )
    patches = "spatial_shapes" in accepts or tower is model
    made = (sample_inputs(tower)[-1:] if patches else []) or [_seen_or_heard(model)]
    # The engine's self-check uses inputs of these shapes, so use other values.
    inputs = {
        name: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
        for given in made
        for name, t in given.items()
    }
    if kind == "two towers":
        ids = torch.randint(10, 60, (3, 7), generator=generator)
        ids[:, -1] = 2  # some towers find the end of a text by this token
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "speech" and "decoder_input_ids" in accepts:
        inputs["decoder_input_ids"] = torch.randint(10, 60, (_BATCH, 6), generator=generator)
    return inputs


def _tokens(model: Any, kind: Kind) -> dict[str, Tensor]:
    """Return a batch whose first row is padded: on the left for causal models, on the right otherwise."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 60, (_BATCH, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    padding = slice(None, _PADDING) if kind == "causal" else slice(_LENGTH - _PADDING, None)
    mask[0, padding] = 0
    ids[0, padding] = _pad_token(model)
    if kind == "sequence":
        # Classifiers read the position where a text ends, which they find by padding or an end token.
        text = model.config.get_text_config()
        text.pad_token_id = model.config.pad_token_id = _pad_token(model)
        end = getattr(text, "eos_token_id", None)
        ends = end if isinstance(end, int) else 2
        ids[torch.arange(_BATCH), mask.sum(-1) - 1] = ends
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        inputs = {"input_ids": torch.randint(10, 60, (_BATCH, _LENGTH), generator=generator)}
    if kind == "seq2seq" and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = torch.randint(10, 60, (_BATCH, 6), generator=generator)
    return inputs


def _tower(model: Any) -> Any:
    """Return the config of the vision tower, or the model's own."""
    return getattr(model.config, "vision_config", None) or model.config


def _seen_or_heard(model: Any) -> dict[str, Tensor]:
    """Return images, videos or spectrograms, for models for which `sample_inputs` makes no inputs."""
    accepts, config = inspect.signature(model.forward).parameters, _tower(model)
    side = getattr(config, "image_size", None) or getattr(config, "crop_size", 32)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    if "pixel_values_videos" in accepts:
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
        return {"pixel_values_videos": torch.empty(_BATCH, int(frames), 3, int(height), int(width))}
    if "input_features" in accepts:
        names = ("feature_projection_input_dim", "input_dim", "num_mel_bins", "input_feat_per_channel")
        encoder = getattr(model.config, "encoder_config", model.config)
        bins = next((int(getattr(encoder, name)) for name in names if hasattr(encoder, name)), 80)
        return {"input_features": torch.empty(_BATCH, 24, bins)}
    return {"pixel_values": torch.empty(_BATCH, 3, int(height), int(width))}


def _pad_token(model: Any) -> int:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0


def _error(expected: Any, got: Any, inputs: dict[str, Tensor]) -> float:
    """Return the largest error of the logits or, without logits, of all tensors of the output."""
    if getattr(expected, "logits", None) is None:
        pairs = list(zip(_tensors(expected), _tensors(got), strict=True))
        assert pairs, "the answer holds no tensors"
        return max(_distance(*pair) for pair in pairs)
    expected, got = expected.logits, got.logits
    assert got.shape == expected.shape, (
        f"logits of shape {tuple(got.shape)} in place of {tuple(expected.shape)}"
    )
    mask = inputs.get("attention_mask")
    if mask is not None and expected.shape[:2] == mask.shape:
        rows = mask.bool()
        expected, got = expected[rows], got[rows]
    assert float(expected.std()) > 1e-3, "the original's logits say nothing"
    return _distance(expected, got)


def _distance(expected: Tensor, got: Tensor) -> float:
    assert bool(torch.isfinite(expected).all()), "the original's own answer is not finite"
    return float((got - expected).abs().max()) / max(1.0, float(expected.square().mean().sqrt()))


def _tensors(answer: Any) -> Iterator[Tensor]:
    """Yield every floating-point tensor within a model's output, in order."""
    if isinstance(answer, Tensor):
        if answer.is_floating_point() and answer.numel():
            yield answer
    elif isinstance(answer, Mapping):
        for value in answer.values():
            yield from _tensors(value)
    elif isinstance(answer, tuple | list):
        for value in answer:
            yield from _tensors(value)


def _generate(original: Any, engine: Any, inputs: dict[str, Tensor]) -> str:
    """Compare greedy tokens, if the model can generate."""
    if not getattr(original, "can_generate", lambda: False)():
        return "does not generate"
    inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False, "num_beams": 1}
    try:
        with torch.no_grad():
            expected = original.generate(**copy.deepcopy(inputs), **options)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        return f"the original cannot: {type(error).__name__}: {first[:60]}"
    got = engine.generate(**copy.deepcopy(inputs), **options)
    assert torch.equal(expected, got), f"greedy tokens {got.tolist()} in place of {expected.tolist()}"
    return "equal"

"""Compares the engine with the model it was made of, for one type of language model."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import slipstream
from tests.architectures.special import NOT_BUILT, NOT_RUN
from tests.architectures.tiny import Kind, tiny_model

__all__ = ["TOLERANCE", "Result", "sweep"]

TOLERANCE = 1e-4
"""Bound on the error of float32 logits of size one; larger ones are compared by their size."""

_BATCH, _LENGTH, _PADDING, _NEW = 2, 16, 5, 4


@dataclass(frozen=True)
class Result:
    """What came of one type.

    Attributes:
        level: The report's level; "-" where nothing was compared.
        error: Largest error of the logits on real positions, relative to their size where that is above one.
        tokens: "equal" greedy tokens, or why none were generated.
        why: What keeps layers from level "block", what stays their own at it, or why nothing was compared.
        fused: Layers that run as a block.
        layers: All layers.
        report: The engine's report, for a reader.
    """

    level: str
    error: float = 0.0
    tokens: str = "-"
    why: str = ""
    fused: int = 0
    layers: int = 0
    report: str = ""


def sweep(model_type: str, kind: Kind) -> Result:
    """Build a type tiny, run it with and without the engine, and compare.

    Raises:
        AssertionError: The engine's greedy tokens differ.
        SlipstreamError: The engine refuses the model.
    """
    if model_type in NOT_BUILT:
        return Result("-", why=f"not built: {NOT_BUILT[model_type]}")
    model = tiny_model(model_type, kind)
    if model_type in NOT_RUN:
        return Result("-", why=f"not run: {NOT_RUN[model_type]}")
    inputs = _inputs(model, kind)
    with torch.no_grad():
        expected = model(**copy.deepcopy(inputs)).logits
    original = copy.deepcopy(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    got = engine(**copy.deepcopy(inputs)).logits
    report = engine.report()
    others = [layer for layer in report.layers if layer.level != "block"]
    return Result(
        report.level,
        _error(expected, got, inputs),
        _generate(original, engine, inputs),
        why="; ".join(dict.fromkeys(layer.reason for layer in report.layers if layer.reason))[:160],
        fused=len(report.layers) - len(others),
        layers=len(report.layers),
        report=str(report),
    )


def _inputs(model: Any, kind: Kind) -> dict[str, Tensor]:
    """A batch whose first row is padded: on the left where tokens are to follow, on the right otherwise."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, 60, (_BATCH, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    padding = slice(None, _PADDING) if kind == "causal" else slice(_LENGTH - _PADDING, None)
    mask[0, padding] = 0
    ids[0, padding] = _pad_token(model)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        inputs = {"input_ids": torch.randint(10, 60, (_BATCH, _LENGTH), generator=generator)}
    if kind == "seq2seq" and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = torch.randint(10, 60, (_BATCH, 6), generator=generator)
    return inputs


def _pad_token(model: Any) -> int:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0


def _error(expected: Tensor, got: Tensor, inputs: dict[str, Tensor]) -> float:
    assert got.shape == expected.shape, (
        f"logits of shape {tuple(got.shape)} in place of {tuple(expected.shape)}"
    )
    mask = inputs.get("attention_mask")
    if mask is not None and expected.shape[:2] == mask.shape:
        rows = mask.bool()
        expected, got = expected[rows], got[rows]
    assert bool(torch.isfinite(expected).all()), "the original's own logits are not finite"
    assert float(expected.std()) > 1e-3, "the original's logits say nothing"
    return float((got - expected).abs().max()) / max(1.0, float(expected.square().mean().sqrt()))


def _generate(original: Any, engine: Any, inputs: dict[str, Tensor]) -> str:
    """Compare greedy tokens, where the model can generate at all."""
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

"""Whether an engine answers a call of `families_cpu` as the original does.

Its numbers are compared: the logits that tokens were chosen by, or the outputs of a forward. In 16 bits a
near tie of tokens may turn either way, so the measure is the same weights in float32, on the tokens that a
model generated, and the engine may be off by little more than the original. In float32 tokens must be equal.

Shapes: B batch, W beams, S prompt, L tokens in all, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.model.selfcheck.check import TOLERANCE

__all__ = ["Answer", "Call", "Compared", "answer", "compare"]

_AS_WELL = 1.5
"""The largest error in 16 bits, as a multiple of the original's: what the engine promises."""
_FORBIDDEN = 0.01
"""The largest share of tokens that processors may forbid in a step; without it, nothing would be compared."""


@dataclass(frozen=True)
class Call:
    """One call, which every model of a subject can answer.

    Attributes:
        inputs: Arguments by name; floating-point ones are cast to the dtype of the model.
        options: Further arguments of `generate`; empty for a forward.
    """

    inputs: Mapping[str, Tensor]
    options: Mapping[str, Any]

    def __call__(self, model: Any, **others: Any) -> Any:
        """Ask a model or an engine, without autograd; `others` are further options of `generate`."""
        with torch.no_grad():
            if self.options:
                return model.generate(**self.inputs, **self.options, **others)
            return model(**self.inputs)

    def to(self, dtype: torch.dtype) -> Call:
        """Return the call with its pictures or sound in another dtype."""
        cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}
        return Call(cast, self.options)


@dataclass
class _Recorder:
    """A logits processor that changes nothing and keeps what it sees.

    Attributes:
        tokens: `(B * W, L)` int64, those before the last step; a decoder's begin with the prompt.
        scores: For each step `(B * W, V)` float32: logits or, in beam search, their logarithmic softmax.
    """

    tokens: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.tokens = input_ids.clone()
        self.scores.append(scores.float().clone())
        return scores


@dataclass(frozen=True)
class Answer:
    """What a model answers.

    Attributes:
        numbers: Each float32, of one shape per model.
        tokens: The generated ids, with a decoder's prompt; None of a forward.
        seen: The ids that `numbers` depend on; None of a forward.
    """

    numbers: tuple[Tensor, ...]
    tokens: Tensor | None = None
    seen: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """An engine's answer beside its original's.

    Attributes:
        off: The error of its numbers relative to their size, against float32; the largest of several tensors.
        original_off: The same of the original, for the same tensor.
        differs: What is wrong; empty if nothing is.
    """

    off: float
    original_off: float
    differs: str = ""


def answer(model: Any, call: Call) -> Answer:
    """Ask a model or an engine; of a beam search, only the last step's numbers are kept.

    The beams of earlier steps are not those of the last one, and what these saw is not recorded.
    """
    if not call.options:
        return Answer(_numbers(call(model), call))
    from transformers import LogitsProcessorList

    recorder = _Recorder()
    tokens = call(model, logits_processor=LogitsProcessorList([recorder]))
    steps = recorder.scores if call.options["num_beams"] == 1 else recorder.scores[-1:]
    return Answer((torch.stack(steps, dim=1),), tokens, recorder.tokens)


def _numbers(output: Any, call: Call) -> tuple[Tensor, ...]:
    """Return the tensors of an output, without the positions that the call masks."""
    mask = call.inputs.get("attention_mask")
    found = [value.float() for value in output.values() if isinstance(value, Tensor)]
    if mask is None:
        return tuple(found)
    return tuple(x[mask.bool()] if x.shape[:2] == mask.shape else x for x in found)


def _exact(model: Any, call: Call, given: Answer) -> tuple[Tensor, ...]:
    """Return what a float32 model's numbers are where it reads the tokens that another model generated."""
    if given.seen is None:
        return answer(model, call).numbers
    steps, beams = given.numbers[0].shape[1], call.options["num_beams"]
    if model.config.is_encoder_decoder:
        rows = {name: x.repeat_interleave(beams, dim=0) for name, x in call.inputs.items()}
        inputs = {**rows, "decoder_input_ids": given.seen}
    else:  # no row is padded
        inputs = {"input_ids": given.seen}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, -steps:].float()
    return (logits.log_softmax(-1) if beams > 1 else logits,)


def _off(exact: Tensor, got: Tensor) -> float:
    """Return the error's root mean square relative to the size of the numbers; NaN if these say nothing."""
    if exact.shape != got.shape:
        return math.nan
    forbidden = got == -math.inf  # by processors, as transformers has them for speech
    if float(forbidden.float().mean()) > _FORBIDDEN:
        return math.nan
    exact, got = exact[~forbidden], got[~forbidden]
    return float((got - exact).square().mean().sqrt() / exact.std())


def compare(original: Any, engine: Any, exact: Any, call: Call) -> Compared:
    """Ask the original and the engine, and compare their answers.

    Args:
        original: The model in the engine's dtype.
        engine: Its engine.
        exact: The same weights in float32; the original itself if that is its dtype.
        call: The call in the engine's dtype.
    """
    dtype = original.dtype
    theirs, ours = answer(original, call), answer(engine, call)
    if len(ours.numbers) != len(theirs.numbers):
        return Compared(math.nan, 0.0, f"{len(ours.numbers)} tensors in place of {len(theirs.numbers)}")
    precise = call.to(torch.float32)
    offs = [
        [_off(*pair) for pair in zip(_exact(exact, precise, one), one.numbers, strict=True)]
        for one in (theirs, ours)
    ]
    # A router's near tie may turn either way, in either of the models, and another expert answers then.
    routed = getattr(original.config, "num_experts_per_tok", None) is not None
    least = TOLERANCE[dtype] if routed or dtype == torch.float32 else 0.0
    worst = Compared(0.0, 0.0)
    for their_off, our_off in zip(*offs, strict=True):
        bound = max(_AS_WELL * their_off, least)
        if not our_off <= bound:  # also if it is NaN
            why = f"off by {our_off:.1e} of their size, the original by {their_off:.1e}; at most {bound:.1e}"
            return Compared(our_off, their_off, f"the numbers are {why}")
        worst = max(worst, Compared(our_off, their_off), key=lambda one: one.off)
    return replace(worst, differs=_tokens_differ(theirs, ours, call, engine))


def _tokens_differ(theirs: Answer, ours: Answer, call: Call, engine: Any) -> str:
    """Return how the tokens of the call without a recorder, which is the one that is timed, are wrong."""
    if ours.tokens is None or theirs.tokens is None:
        return ""
    timed = call(engine)
    if not torch.equal(timed, ours.tokens):
        return f"tokens {_first(timed, ours.tokens)} where the call that records logits has another"
    if engine.dtype == torch.float32 and not torch.equal(timed, theirs.tokens):
        return f"tokens {_first(timed, theirs.tokens)} where the original has another"
    return ""


def _first(got: Tensor, expected: Tensor) -> str:
    if got.shape != expected.shape:
        return f"of shape {tuple(got.shape)}, not {tuple(expected.shape)},"
    row, place = (got != expected).nonzero()[0].tolist()
    return f"of row {row} have {int(got[row, place])} at {place}"

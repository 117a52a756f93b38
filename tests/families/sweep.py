"""The family sweep: measures everything that is promised, for one tiny model of one family at a time."""

from __future__ import annotations

import copy
import inspect
import operator
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.families import FAMILIES, Family, Tiny
from slipstream.model.selfcheck.inputs import sample_inputs
from tests.families.calls import Calls
from tests.families.pairs import measure_pair
from tests.helpers.models import blocks_that_run

VARIANTS = [
    (family, tiny)
    for family in FAMILIES.values()
    for tiny in family.tiny
    if hasattr(transformers, tiny.model) and hasattr(transformers, tiny.config)
]
"""All tiny models of registered families that the installed transformers has; the newest has all of them."""

PICTURED = frozenset({"idefics"})
"""Families whose models need an image: `test_towers` covers them, by tests named after them."""

LENGTH, NEW_TOKENS = 12, 8
_SILENT = "MllamaVisionModel"
"""A model that returns its layers' hidden states as a part of its last ones."""


@dataclass(frozen=True)
class Row:
    """The measurements; errors are the largest differences of logits (or states) at real positions.

    `joined` is the error of forwards whose layers may run in one call, relative to the largest logit: such a
    call sums in another order than torch, with errors relative to float64 as large as torch's.
    """

    family: str
    variant: str
    level: str
    single: float
    left: float
    right: float
    cached: float
    states: float
    joined: float
    calls: str
    greedy: str
    road: str
    peak: float

    @staticmethod
    def titles() -> tuple[str, ...]:
        return tuple(field.name for field in fields(Row))

    def cells(self) -> tuple[str, ...]:
        values = (getattr(self, name) for name in Row.titles())
        return tuple(f"{value:.1e}" if isinstance(value, float) else value for value in values)


def label(variant: tuple[Family, Tiny]) -> str:
    family, tiny = variant
    return f"{family.name} {tiny.label}".strip()


PROMISED = 1e-4
"""The bound of an engine's float32 logits."""


def peaked_model(tiny: Tiny, seed: int = 0) -> nn.Module:
    """Make a tiny random model whose weights are large enough for peaked logits."""
    torch.manual_seed(seed)
    config = getattr(transformers, tiny.config)(**tiny.options)
    model: nn.Module = getattr(transformers, tiny.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
        head = model.get_output_embeddings()
        if head is not None:
            head.weight.mul_(3)
    return model


def batch(vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, and masks that pad their rows on the left and on the right."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, vocabulary, (3, LENGTH), generator=generator)
    left = torch.ones_like(ids)
    left[0, :5] = 0
    left[1, :1] = 0
    return ids, left, left.flip(1)


def measure(family: Family, tiny: Tiny) -> Row:
    """Compare an injected model with a copy of the original in float32."""
    original = peaked_model(tiny)
    if getattr(original.config, "is_encoder_decoder", False):
        return Row(family.name, tiny.label or "-", **measure_pair(original))
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=True
    )
    takes_tokens = "input_ids" in inspect.signature(original.forward).parameters
    if original.main_input_name != "input_ids" or not takes_tokens:
        return _measure_senses(family, tiny, original, engine)
    ids, left, right = batch(original.get_input_embeddings().weight.shape[0])
    runs: dict[str, float] = {}
    layers = [original.get_submodule(layer.name) for layer in engine.report().layers]
    with torch.no_grad(), Calls(layers) as calls:
        for name, rows, mask in (
            ("single", ids[:1], torch.ones_like(ids[:1])),
            ("left", ids, left),
            ("right", ids, right),
        ):
            expected = original(input_ids=rows, attention_mask=mask, output_hidden_states=True)
            got = engine(input_ids=rows, attention_mask=mask, output_hidden_states=True)
            runs[name] = _off(original, rows, mask, _answer(expected), _answer(got))
            if name == "left":
                pairs = zip(expected.hidden_states, got.hidden_states, strict=True)
                runs["states"] = max(_error(a, b, mask) / max(float(a.abs().max()), 1.0) for a, b in pairs)
                peak = float(_answer(expected)[mask.bool()].softmax(-1).max(-1).values.median())
        runs["cached"] = max(_second_forward(original, engine, ids, left), _in_room(original, engine, ids))
        assert calls.blocks == calls.layers, "an injected layer ran its original code"
        runs["joined"], joined = _joined(original, engine, ids, (left, right))
        assert calls.blocks == calls.layers, "an injected layer ran its original code"
    greedy, road = _greedy(original, engine, ids, left)
    return Row(
        family.name, tiny.label or "-", engine.report().level, runs["single"], runs["left"], runs["right"],
        runs["cached"], runs["states"], runs["joined"], joined, greedy, road, peak,
    )  # fmt: skip


def _measure_senses(family: Family, tiny: Tiny, original: nn.Module, engine: nn.Module) -> Row:
    """Compare a vision or audio model with its original: each kind of input in its config, and one row."""
    samples = sample_inputs(original)
    assert samples, f"no input is made for {type(original).__name__}"
    generator = torch.Generator().manual_seed(7)
    worst = states = single = together = 0.0
    layers = [original.get_submodule(layer.name) for layer in engine.report().layers]
    with torch.no_grad(), Calls(layers) as calls:
        for inputs in samples:
            drawn = {
                name: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
                for name, t in inputs.items()
            }
            first = {name: t[:1] for name, t in drawn.items()}
            for given in (drawn, first):
                torch.manual_seed(1)  # some models shuffle their patches
                expected = original(**given, output_hidden_states=True)
                torch.manual_seed(1)
                got = engine(**given, output_hidden_states=True)
                error = _largest(expected[0], got[0])
                worst, single = (max(worst, error), single) if given is drawn else (worst, max(single, error))
                pairs = list(zip(expected.hidden_states or (), got.hidden_states or (), strict=True))
                assert len(pairs) > 1 or type(original).__name__ == _SILENT
                states = max([states, *(_largest(a, b) / max(float(a.abs().max()), 1.0) for a, b in pairs)])
                torch.manual_seed(1)
                alone = original(**given)[0]
                torch.manual_seed(1)
                with blocks_that_run() as ran:
                    joined = _largest(alone, engine(**given)[0])
                together = max(together, joined / max(float(alone.abs().max()), 1.0))
        assert calls.blocks == calls.layers > 0, "an injected layer ran its original code"
    level = engine.report().level
    joined_calls = "+".join(map(str, ran.calls)) or "-"
    return Row(
        family.name, tiny.label or "-", level, single, worst, worst, 0.0, states, together, joined_calls,
        "-", "-", 0.0,
    )  # fmt: skip


def _answer(output: Any) -> Tensor:
    """Return the logits, or the last hidden states of a model without a head."""
    answer: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return answer


def _largest(expected: Tensor, got: Tensor) -> float:
    assert bool(torch.isfinite(expected).all())
    return float((expected - got).abs().max())


def _error(expected: Tensor, got: Tensor, mask: Tensor) -> float:
    return float((expected - got).abs()[..., mask.bool(), :].max())


def _off(original: nn.Module, ids: Tensor, mask: Tensor, expected: Tensor, got: Tensor) -> float:
    """Return the largest error of an answer.

    It is 0 if the original is itself farther from float64 than an engine may be from it, and the engine is
    not farther: two layers of Mamba with random weights multiply rounding errors that much.
    """
    error = _error(expected, got, mask)
    if error <= PROMISED:
        return error
    twin: Any = copy.deepcopy(original)
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("eager")  # torch has no grouped products in float64
    twin.double()
    for module in twin.modules():
        module._forward_hooks.clear()  # those that count
    exact = _answer(twin(input_ids=ids, attention_mask=mask))
    ours, theirs = (_error(exact, some.double(), mask) for some in (got, expected))
    return 0.0 if theirs > PROMISED and ours <= theirs else error


def _joined(original: nn.Module, engine: Any, ids: Tensor, masks: tuple[Tensor, ...]) -> tuple[float, str]:
    """Return the largest relative error of plain forwards, and the number of blocks in each native call.

    The calls are those for the last mask, which pads on the right, so that no layer has to see it.
    """
    more = {"use_cache": False} if hasattr(original.config, "use_cache") else {}
    errors, counts = [], []
    for mask in masks:
        expected = _answer(original(input_ids=ids, attention_mask=mask, **more))
        with blocks_that_run() as ran:
            got = _answer(engine(input_ids=ids, attention_mask=mask, **more))
        assert type(got) is Tensor
        errors.append(_error(expected, got, mask) / max(float(expected.abs().max()), 1.0))
        counts = ran.calls
    stacks = (layer.kernels.get("stack", "") for layer in engine.report().layers)
    accepted = all(name.startswith("cpu-") for name in stacks)
    return max(errors), ("+".join(map(str, counts)) or "-") if accepted else "refused"


def _second_forward(original: nn.Module, engine: nn.Module, ids: Tensor, mask: Tensor) -> float:
    """Return the error of two more tokens after a cached prefix, or of the prefix if there is no cache."""
    if not getattr(original, "can_generate", lambda: False)():
        return 0.0
    models = (original, engine)
    first = [model(input_ids=ids[:, :-2], attention_mask=mask[:, :-2], use_cache=True) for model in models]
    if getattr(first[0], "past_key_values", None) is None:
        return _off(original, ids[:, :-2], mask[:, :-2], *(answer.logits for answer in first))
    second = [
        model(
            input_ids=ids[:, -2:], attention_mask=mask, past_key_values=before.past_key_values, use_cache=True
        )
        for model, before in zip(models, first, strict=True)
    ]
    return _error(second[0].logits, second[1].logits, mask[:, -2:])


def _in_room(original: nn.Module, engine: nn.Module, ids: Tensor) -> float:
    """Return the error of a first forward and two more tokens in a static cache, most of which is empty.

    There is no padding and no mask, so only the model knows which positions of the cache are valid.
    """
    # ALiBi slopes do not fit such a cache, neither Falcon's nor BLOOM's, although an older transformers
    # claims that BLOOM's do.
    has_slopes = getattr(original.config, "alibi", False) or original.config.model_type == "bloom"
    if not getattr(original, "_can_compile_fullgraph", False) or has_slopes:
        return 0.0
    caches = [
        transformers.StaticCache(
            config=original.config.get_text_config(decoder=True), max_cache_len=4 * LENGTH
        )
        for _ in range(2)
    ]
    errors = []
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        expected, got = (
            _answer(model(input_ids=part, past_key_values=cache, use_cache=True))
            for model, cache in zip((original, engine), caches, strict=True)
        )
        errors.append(_largest(expected, got))
    # Peaked logits reach 18, where the original's float32 differs from float64 by up to 1.9e-4 (the engine's,
    # with its other order of sums, by up to 1e-4): a third of the difference counts.
    return max(errors) / 3


def _greedy(
    original: nn.Module, engine: slipstream.InferenceEngine, ids: Tensor, mask: Tensor
) -> tuple[str, str]:
    """Compare tokens and caches of a padded batch: greedy, continued, beams, lookups; and return the road."""
    if not getattr(original, "can_generate", lambda: False)():
        return "-", "-"
    options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    answers = [model.generate(ids, **options, return_dict_in_generate=True) for model in (original, engine)]
    same = torch.equal(*(answer.sequences for answer in answers))
    alike = operator.eq(*(_shapes(answer.get("past_key_values")) for answer in answers))
    continued = _continues(original, engine, answers, mask)
    road = "compatible" if engine.why_compatible() else "engine"
    options = {**options, "num_beams": 3, "num_return_sequences": 2}
    answers = [model.generate(ids, **options, return_dict_in_generate=True) for model in (original, engine)]
    beams = torch.equal(*(answer.sequences for answer in answers))
    alike &= operator.eq(*(_shapes(answer.get("past_key_values")) for answer in answers))
    assisted = road != "engine" or _looks_up(original, engine, ids[:1])
    faults = {
        "DIFFERENT": not same,
        "OTHER BEAMS": not beams,
        "OTHER CACHE": not alike,
        "OTHER LOOKUP": not assisted,
        "CONTINUES OTHERWISE": not continued,
    }
    return next((fault for fault, is_there in faults.items() if is_there), "identical"), road


def _continues(original: Any, engine: Any, answers: list[Any], mask: Tensor) -> bool:
    """Whether both write the same after two more tokens, and extend their caches by the same."""
    caches = [answer.get("past_key_values") for answer in answers]
    takes_it = "past_key_values" in inspect.signature(original.forward).parameters
    if original.config.is_encoder_decoder or not takes_it:
        return True
    more = answers[0].sequences[:, -1:].repeat(1, 2)
    ids = torch.cat([answers[0].sequences, more], dim=1)
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    tokens = [
        model.generate(ids, **options, past_key_values=cache)
        for model, cache in zip((original, engine), caches, strict=True)
    ]
    return torch.equal(*tokens) and operator.eq(*map(_shapes, caches))


def _looks_up(original: Any, engine: slipstream.InferenceEngine, ids: Tensor) -> bool:
    """Whether tokens that were looked up in the prompt, which repeats itself, are the same greedy tokens."""
    runner = engine._built.runner
    if runner is None or original._is_stateful or runner.frame.spec.restart is not None:
        return True  # transformers refuses the first; the others run its own loop, which cannot crop windows
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    twice = torch.cat([ids, ids[:, :-1]], dim=1)
    return torch.equal(
        original.generate(twice, **options), engine.generate(twice, **options, prompt_lookup_num_tokens=3)
    )


def _shapes(cache: Any) -> list[tuple[int, ...] | None]:
    """Return the shape of the keys in each layer of a cache; None for a layer without keys."""
    keys = [getattr(layer, "keys", None) for layer in getattr(cache, "layers", ())]
    return [None if key is None else tuple(key.shape) for key in keys]


def table(rows: list[tuple[str, ...]]) -> str:
    """Format rows as aligned columns, titles first."""
    lines = [Row.titles(), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


if __name__ == "__main__":
    print(table([measure(*variant).cells() for variant in VARIANTS]))

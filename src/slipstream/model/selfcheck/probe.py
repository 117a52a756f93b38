"""Inputs of the model runs that the self-check records: prompts, a step with a cache, encoder states.

Shapes: B batch, S tokens, M states of an encoder, C their width.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.frame.authors import own_code
from slipstream.model.layers import Found
from slipstream.model.selfcheck.inputs import beside_tokens, sample_inputs, vocabulary

__all__ = ["BATCH", "LENGTH", "PADDING", "guessed_runs", "runs_of"]

BATCH, LENGTH, PADDING = 2, 8, 3
"""Rows and tokens of a prompt, and the number of padding tokens at the left of its first row."""

_UNPADDED, _STATES = 6, 5

_LONG = 1024
"""Tokens of the prompt for layers with custom code, which may compute something else for longer prompts."""

_OF_ANY_LENGTH = {
    *("input_ids", "attention_mask", "past_key_values"),
    *("encoder_hidden_states", "encoder_attention_mask"),
}

_CROSS_ATTENTION = re.compile("cross_?att|encdec|encoder_(decoder_)?att", re.IGNORECASE)


def runs_of(root: nn.Module, layers: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the arguments of each run of a model.

    Args:
        root: The model that owns the layers.
        layers: One layer per kind; their specs, or the names of their modules, tell whether they cross-attend
            to an encoder.

    Returns:
        A padded prompt; one more token, if the model has a cache; a prompt without padding, for which
        transformers often makes no mask at all; then the padded prompt with each input of `beside_tokens`;
        and a long prompt, if a layer has custom code. For a model that takes no tokens, the inputs of
        `sample_inputs`.
    """
    tokens = vocabulary(root)
    if tokens is None:
        return [dict(inputs) for inputs in sample_inputs(root)]
    runs = _runs_on_tokens(root, layers, tokens)
    prompt = {name: value for name, value in runs[0].items() if name != "past_key_values"}
    beside = [{**prompt, **extra} for extra in beside_tokens(root, prompt["attention_mask"])]
    return [*runs, *beside, *_long_run(root, layers, runs[-1], tokens)]


def _long_run(
    root: nn.Module, layers: Sequence[Found], run: Mapping[str, Any], tokens: int
) -> list[dict[str, Any]]:
    """Return a run like `run`, which has no padding, on as many tokens as the model takes, up to `_LONG`.

    Returns:
        Empty if all layers are known code, or if other inputs depend on the number of tokens.
    """
    most = getattr(getattr(root, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 2 * PADDING or not run.keys() <= _OF_ANY_LENGTH:
        return []
    if all(own_code(found.layer, ()) is None for found in layers):
        return []
    length = min(_LONG, most - PADDING)  # RoBERTa's positions start behind that of padding
    generator, short = torch.Generator().manual_seed(1), run["input_ids"]
    ids = torch.randint(0, tokens, (len(short), length), generator=generator).to(short.device)
    long = {**run, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if run.get("past_key_values") is not None:
        long["past_key_values"] = _cache(root, crosses="encoder_hidden_states" in run)
    return [long]


def _runs_on_tokens(root: nn.Module, layers: Sequence[Found], tokens: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    device = next(root.parameters()).device
    ids = torch.randint(0, tokens, (BATCH, LENGTH + 1), generator=generator).to(device)
    mask = torch.ones(BATCH, LENGTH + 1, dtype=torch.long, device=device)
    mask[0, :PADDING] = 0
    unpadded = ids[:, :_UNPADDED]
    runs: list[dict[str, Any]] = [
        {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1]},
        {"input_ids": ids[:, -1:], "attention_mask": mask},
        {"input_ids": unpadded, "attention_mask": torch.ones_like(unpadded)},
    ]
    width = next((width for f in layers if (width := _width_of_states(f)) is not None), None)
    if width is None:
        width = next((w for f in layers if f.spec is None for w in _encoder_widths(f.layer)), None)
    takes = inspect.signature(root.forward).parameters
    if width is not None and "cross_attention_states" in takes:
        _add_picture(runs, width, generator, next(root.parameters()))
        width = None
    if "image_encoder_embeddings" in takes and "perceiver_embeddings" in takes:
        resampled = bool(getattr(getattr(root, "config", None), "use_resampler", False))
        name = "perceiver_embeddings" if resampled else "image_encoder_embeddings"
        _add_encoded(runs, name, width, generator, next(root.parameters()))
        width = None
    if width is not None and "encoder_hidden_states" in takes:
        _add_states(runs, width, "encoder_attention_mask" in takes, generator, next(root.parameters()))
    if "past_key_values" in takes:
        cache, another = (_cache(root, crosses=width is not None) for _ in range(2))
        for run, own in zip(runs, (cache, cache, another), strict=True):
            run["past_key_values"] = own
        if cache is not None:
            return runs
    return [runs[0], runs[2]]


def guessed_runs(root: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Guess inputs of a custom model: tokens, then hidden states, as each required argument.

    Args:
        root: The model; nothing is guessed if its forward requires no argument or more than two.
    """
    parameters = inspect.signature(root.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    like = next((p for p in root.parameters() if p.is_floating_point()), None)
    if not 1 <= len(needed) <= 2 or like is None:
        return
    generator = torch.Generator().manual_seed(0)
    tables = (module for module in root.modules() if isinstance(module, nn.Embedding))
    table = next(tables, None)
    if table is not None:
        ids = torch.randint(0, table.num_embeddings, (BATCH, LENGTH), generator=generator).to(like.device)
        yield [dict.fromkeys(needed, ids)]
    width = next((m.in_features for m in root.modules() if isinstance(m, nn.Linear)), None)
    if width is not None:
        states = torch.randn(BATCH, LENGTH, width, generator=generator, dtype=torch.float32, device="cpu")
        yield [dict.fromkeys(needed, states.to(like))]


def _width_of_states(found: Found) -> int | None:
    """Return the width of the encoder states that a layer attends to by its spec or course, or None."""
    spec = found.spec
    course = None if spec is None or found.family is None else found.family.course_of(spec)
    if spec is None or course is None or "encoder_hidden_states" not in course.needs:
        return None if spec is None else spec.cross
    return spec.hidden


def _encoder_widths(layer: nn.Module) -> Iterator[int]:
    """Yield the widths of encoder states that a layer without a spec attends to, by its modules' names."""
    for path, module in layer.named_modules():
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, nn.Linear) and _CROSS_ATTENTION.search(parent) and leaf.startswith("k"):
            yield module.in_features


def _add_states(
    runs: Sequence[dict[str, Any]], width: int, masked: bool, generator: torch.Generator, like: Tensor
) -> None:
    """Add encoder states to each run; in the padded runs, some of the states are padding."""
    states = torch.randn(BATCH, _STATES, width, generator=generator, dtype=torch.float32, device="cpu").to(
        like
    )
    mask = torch.ones(BATCH, _STATES, dtype=torch.long, device=like.device)
    mask[1, PADDING:] = 0
    for run, seen in zip(runs, (mask, mask, torch.ones_like(mask)), strict=True):
        run["encoder_hidden_states"] = states
        if masked:
            run["encoder_attention_mask"] = seen


def _add_picture(
    runs: Sequence[dict[str, Any]], width: int, generator: torch.Generator, like: Tensor
) -> None:
    """Add an image to each run; the second row sees a part of it, and the first token nothing."""
    states = torch.randn(BATCH, _STATES, width, generator=generator, dtype=torch.float32, device="cpu").to(
        like
    )
    for run in runs:
        length = run["input_ids"].shape[1]
        mask, looks = states.new_zeros(BATCH, 1, length, _STATES), states.new_ones(BATCH, 1, length, 1)
        mask[1, ..., PADDING:] = torch.finfo(states.dtype).min
        looks[:, :, 0] = float(length == 1)
        run |= {"cross_attention_mask": mask, "full_text_row_masked_out_mask": looks}
        if length > 1:  # a single token finds the image in the cache
            run["cross_attention_states"] = states


def _add_encoded(
    runs: Sequence[dict[str, Any]], name: str, width: int | None, generator: torch.Generator, like: Tensor
) -> None:
    """Add two encoded images to each run, for IDEFICS: the first token sees none, the last both."""
    if width is None:
        return
    shape = (BATCH, 2, _STATES, width)
    states = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(like)
    for run in runs:
        length = run["input_ids"].shape[1]
        seen = torch.ones(BATCH, length, 2, dtype=torch.long, device=like.device)
        seen[:, :-1, 1] = 0
        if length > 1:
            seen[:, 0] = 0
        run |= {name: states, "image_attention_mask": seen}


def _cache(root: nn.Module, *, crosses: bool) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    config: Any = getattr(root, "config", None)
    if not getattr(config, "is_decoder", False) and not getattr(config, "use_cache", False):
        return None
    home = sys.modules[type(root).__module__]
    for kind in vars(home).values():
        if isinstance(kind, type) and issubclass(kind, DynamicCache) and kind.__module__ == home.__name__:
            return kind()  # a model with its own cache class accepts no other
    # In some encoder-decoder families, the config counts the encoder's layers; caches grow without it.
    return EncoderDecoderCache(DynamicCache(), DynamicCache()) if crosses else DynamicCache(config=config)

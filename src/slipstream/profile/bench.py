"""Measures generation: time to first token, decode rate and working memory, of several models in turns.

Turns, because a machine's speed drifts: two models measured one after the other differ by the drift, two
measured alternately do not. Medians, because a disturbed run is slower and never faster.

Shapes: B batch, S prompt, L tokens at the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from slipstream.devices import Device
from slipstream.errors import RequestError

__all__ = [
    "Generates",
    "Row",
    "Run",
    "Shape",
    "Spread",
    "bench",
    "interleave",
    "random_prompt",
    "time_generate",
]

T = TypeVar("T")


class Generates(Protocol):
    """A model or an engine: transformers' `generate`."""

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        """Continue `(B, S)` token ids; a `streamer` among the options gets each step's tokens."""


@dataclass(frozen=True)
class Shape:
    """What is generated.

    Attributes:
        batch: Sequences.
        prompt_tokens: Of each.
        new_tokens: Of each; at least 2, for the first is prefill's and the others are decode's.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Median and range of at least one value."""
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Run:
    """One call of `generate`.

    Attributes:
        ids: `(B, L)` int64, on the device.
        new_tokens: Steps, which is tokens per sequence.
        first_token: Seconds from the call to the first new token.
        seconds: Seconds from the call to the last one.
        working_bytes: Memory's peak during the call, over what was held before it.
    """

    ids: Tensor
    new_tokens: int
    first_token: float
    seconds: float
    working_bytes: int


@dataclass(frozen=True)
class Row:
    """One model at one shape.

    Attributes:
        name: The model's, among those compared.
        shape: What was generated.
        first_token: Seconds from the call to the first token.
        prefill: Prompt tokens per second of all sequences together, until the first token.
        decode: New tokens per second of all sequences together, after the first.
        working_bytes: Of the first call of this shape, before the allocator has much left over: activations
            and cache.
        repeat: Number of runs behind each spread.
    """

    name: str
    shape: Shape
    first_token: Spread
    prefill: Spread
    decode: Spread
    working_bytes: int
    repeat: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class _Clock:
    """A streamer that notes when each step's tokens came; the first thing it gets is the prompt."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.device.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


def random_prompt(shape: Shape, vocabulary: int, seed: int = 0) -> Tensor:
    """Token ids `(B, S)` int64 on the CPU, evenly drawn from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (shape.batch, shape.prompt_tokens), generator=generator)


def time_generate(model: Generates, ids: Tensor, device: Device, **options: Any) -> Run:
    """Time one call of `generate`.

    Args:
        model: On `device`.
        ids: `(B, S)` int64, without padding.
        device: Waited for whenever a token comes, and asked for its memory.
        options: Of `generate`.

    Raises:
        RequestError: The call made no token.
    """
    ids = ids.to(device.torch_device)
    device.synchronize()
    device.reset_peak()
    held = device.memory().used
    clock = _Clock(device)
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
    if len(clock.times) < 2:
        raise RequestError(f"generate made no token for a prompt of shape {tuple(ids.shape)} and {options}")
    times = clock.times[1:]
    working = max(device.memory().peak - held, 0)
    return Run(out, len(times), times[0] - start, times[-1] - start, working)


def interleave(runs: Mapping[str, Callable[[], T]], *, repeat: int) -> dict[str, list[T]]:
    """Call each function `repeat` times, in turns, and return what they answered by name.

    Every second turn goes backwards, so that none always follows the same neighbour.
    """
    names = list(runs)
    answers: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(repeat):
        for name in names[::-1] if turn % 2 else names:
            answers[name].append(runs[name]())
    return answers


def bench(
    models: Mapping[str, Generates], shape: Shape, *, device: Device, vocabulary: int, repeat: int = 3
) -> list[Row]:
    """Measure models at one shape: two calls of each to warm up, then `repeat` in turns.

    Args:
        models: By the names to report them under; all on `device`.
        shape: Of random prompts, the same for all.
        device: Where they run.
        vocabulary: Prompts are drawn from this many tokens.
        repeat: Runs behind each median.

    Returns:
        One row per model, in their order.

    Raises:
        RequestError: Fewer than 2 new tokens, or less than 1 of anything else.
    """
    if min(shape.batch, shape.prompt_tokens, shape.new_tokens - 1, repeat) < 1:
        raise RequestError(
            f"{shape} with repeat={repeat}: each must be at least 1, and new_tokens at least 2"
        )
    ids = random_prompt(shape, vocabulary)
    # An end-of-text token outside of the vocabulary never comes: every run has the length asked for.
    options = {"max_new_tokens": shape.new_tokens, "do_sample": False, "eos_token_id": vocabulary}
    options["pad_token_id"] = 0

    def run(model: Generates) -> Callable[[], Run]:
        return lambda: time_generate(model, ids, device, **options)

    runs = {name: run(model) for name, model in models.items()}
    for model in models.values():  # brings in weights that are mapped from a file and not read yet
        time_generate(model, ids[:, :1], device, **{**options, "max_new_tokens": 2})
    first = interleave(runs, repeat=1)
    timed = interleave(runs, repeat=repeat)
    return [_row(name, shape, timed[name], first[name][0].working_bytes) for name in models]


def _row(name: str, shape: Shape, runs: Sequence[Run], working_bytes: int) -> Row:
    prompt, steps = shape.batch * shape.prompt_tokens, shape.batch * (shape.new_tokens - 1)
    return Row(
        name,
        shape,
        first_token=Spread.of([run.first_token for run in runs]),
        prefill=Spread.of([prompt / run.first_token for run in runs]),
        decode=Spread.of([steps / (run.seconds - run.first_token) for run in runs]),
        working_bytes=working_bytes,
        repeat=len(runs),
    )

"""Measures generation: time to first token, decode rate and working memory, of several models in turn.

Runs of the models alternate, because a machine's speed drifts: measured one after the other, two models would
differ by the drift. Results are medians, because a disturbed run is slower and never faster.

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
    """A model or an engine that has transformers' `generate`."""

    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        """Continue `(B, S)` token ids; a `streamer` in the options receives each step's tokens."""


@dataclass(frozen=True)
class Shape:
    """The size of a generation.

    Attributes:
        batch: Number of sequences.
        prompt_tokens: Prompt tokens per sequence.
        new_tokens: New tokens per sequence; at least 2: the first measures prefill, the others decode.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Spread:
    """Median and range of several measurements."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return median and range of at least one value."""
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Run:
    """One call of `generate`.

    Attributes:
        ids: `(B, L)` int64, on the device.
        new_tokens: Number of steps, i.e. new tokens per sequence.
        first_token: Seconds from the call to the first new token.
        seconds: Seconds from the call to the last new token.
        working_bytes: Peak of memory during the call, minus what was in use before it.
    """

    ids: Tensor
    new_tokens: int
    first_token: float
    seconds: float
    working_bytes: int


@dataclass(frozen=True)
class Row:
    """The results of one model at one shape.

    Attributes:
        name: The model's name in the comparison.
        shape: The size of the generation.
        first_token: Seconds from the call to the first token.
        prefill: Prompt tokens per second of all sequences together, until the first token.
        decode: New tokens per second of all sequences together, after the first.
        working_bytes: Memory for activations and cache in the first call of this shape, when the allocator
            has little to reuse.
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
        """Return the row as nested plain dictionaries."""
        return asdict(self)


class _Clock:
    """A streamer that records when each step's tokens arrive; the first `put` is for the prompt."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.device.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: there is nothing left to record."""


def random_prompt(shape: Shape, vocabulary: int, seed: int = 0) -> Tensor:
    """Return token ids `(B, S)` int64 on the CPU, drawn uniformly from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (shape.batch, shape.prompt_tokens), generator=generator)


def time_generate(model: Generates, ids: Tensor, device: Device, **options: Any) -> Run:
    """Time one call of `generate`.

    Args:
        model: The model, on `device`.
        ids: `(B, S)` int64, without padding.
        device: Synchronized at every token, and queried for memory.
        options: Options for `generate`.

    Raises:
        RequestError: The call generated no token.
    """
    ids = ids.to(device.torch_device)
    device.synchronize()
    device.reset_peak()
    held = device.memory().used
    clock = _Clock(device)
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
    if len(clock.times) < 2:
        raise RequestError(f"generate made no tokens for a prompt of shape {tuple(ids.shape)} and {options}")
    times = clock.times[1:]
    working = max(device.memory().peak - held, 0)
    return Run(out, len(times), times[0] - start, times[-1] - start, working)


def interleave(runs: Mapping[str, Callable[[], T]], *, repeat: int) -> dict[str, list[T]]:
    """Call each function `repeat` times, alternating between them, and return the results by name.

    Every second round is in reverse order, so that no function always follows the same one.
    """
    names = list(runs)
    results: dict[str, list[T]] = {name: [] for name in names}
    for turn in range(repeat):
        for name in names[::-1] if turn % 2 else names:
            results[name].append(runs[name]())
    return results


def bench(
    models: Mapping[str, Generates], shape: Shape, *, device: Device, vocabulary: int, repeat: int = 3
) -> list[Row]:
    """Measure models at one shape: two warm-up calls of each, then `repeat` alternating runs.

    Args:
        models: Models by the names to report; all on `device`.
        shape: The size of the random prompts and the output, the same for all models.
        device: The device that the models run on.
        vocabulary: Prompts are drawn from this many tokens.
        repeat: Number of runs behind each median.

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
    # An end-of-text token outside the vocabulary never occurs, so every run has the requested length.
    options = {"max_new_tokens": shape.new_tokens, "do_sample": False, "eos_token_id": vocabulary}
    options["pad_token_id"] = 0

    def run(model: Generates) -> Callable[[], Run]:
        return lambda: time_generate(model, ids, device, **options)

    runs = {name: run(model) for name, model in models.items()}
    for model in models.values():  # reads weights into memory that are only mapped from a file so far
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

"""The rows that are compared with each other: one table per model and precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.models import MODELS

__all__ = ["PRECISIONS", "TASKS", "Row", "Task", "check_left_out", "left_out", "rows_of", "tables"]

PRECISIONS = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Row:
    """One implementation at one precision.

    Attributes:
        name: The label in tables.
        worker: A module of `workers`.
        environment: A folder that `benchmarks/peers/install` makes; empty for the engine's own environment.
        precision: The precision that the worker loads.
        options: Keyword arguments for the worker's `load`.
        units: The arithmetic units whose peak rate the prefill is compared with.
        for_models: "decoder", "encoder" or "all".
    """

    name: str
    worker: str
    environment: str
    precision: str
    options: dict[str, Any] = field(default_factory=dict)
    units: str = "bfloat16"
    for_models: str = "all"


@dataclass(frozen=True)
class Task:
    """One figure that is measured for each row.

    Attributes:
        name: Its key in the results.
        batch: Number of sequences.
        tokens: Length of each prompt.
        decodes: Whether tokens are generated after the first one.
        unit: Unit of the figure.
    """

    name: str
    batch: int
    tokens: int
    decodes: bool
    unit: str


TASKS = {
    True: (
        Task("prefill_512", 1, 512, False, "tokens/s"),
        Task("decode_1", 1, 128, True, "tokens/s"),
        Task("decode_8", 8, 128, True, "tokens/s"),
    ),
    False: (Task("encode_32x128", 32, 128, False, "sequences/s"), Task("encode_1x16", 1, 16, False, "ms")),
}
"""The tasks of decoders (True) and encoders (False)."""


def _engine(name: str, precision: str, **keywords: Any) -> Row:
    units = {"float32": "float32"}.get(precision, "bfloat16")
    if "quant" in keywords and isinstance(keywords["quant"], dict):
        units = "int8"
    return Row(name, "torch_models", "", precision, {"how": "engine", "keywords": keywords}, units)


_EAGER = Row("transformers eager bf16", "torch_models", "", "bfloat16", {"how": "eager"})
_DYNAMIC = {name: {"weight": {"format": name}, "activation": {"enabled": True}} for name in ("int8", "int4")}
_ROWS: dict[str, tuple[Row, ...]] = {
    "float32": (
        _engine("slipstream fp32", "float32"),
        Row("transformers eager fp32", "torch_models", "", "float32", {"how": "eager"}, "float32"),
        Row("OpenVINO fp32", "openvino", "openvino", "float32", units="float32"),
        Row(
            "ONNX Runtime fp32",
            "onnxruntime",
            "onnxruntime",
            "float32",
            units="float32",
            for_models="encoder",
        ),
    ),
    "bfloat16": (
        _engine("slipstream bf16", "bfloat16"),
        _engine("slipstream bf13", "bfloat16", quant="bf13"),
        _EAGER,
        Row("transformers compiled bf16", "torch_models", "", "bfloat16", {"how": "compile"}),
        Row("llama.cpp BF16", "llama_cpp", "llama_cpp", "bfloat16", for_models="decoder"),
        Row("OpenVINO bf16", "openvino", "openvino", "bfloat16"),
    ),
    "int8": (
        _engine("slipstream int8", "int8", quant="int8"),
        _engine("slipstream int8, int8 activations", "int8", quant=_DYNAMIC["int8"]),
        _engine("slipstream fp8", "int8", quant="fp8"),
        _EAGER,
        Row("llama.cpp Q8_0", "llama_cpp", "llama_cpp", "int8", for_models="decoder", units="int8"),
        Row("OpenVINO int8", "openvino", "openvino", "int8"),
        Row("ONNX Runtime int8", "onnxruntime", "onnxruntime", "int8", for_models="encoder", units="int8"),
    ),
    "int4": (
        _engine("slipstream int4", "int4", quant="int4"),
        _engine("slipstream int4, int8 activations", "int4", quant=_DYNAMIC["int4"]),
        _engine("slipstream fp6", "int4", quant="fp6"),
        _EAGER,
        Row("llama.cpp Q4_0", "llama_cpp", "llama_cpp", "int4", for_models="decoder", units="int8"),
        Row("OpenVINO int4", "openvino", "openvino", "int4"),
    ),
}


def rows_of(model: str, precision: str, *, quick: bool = False) -> list[Row]:
    """Return the rows of one table; `quick` leaves out those that have to be compiled."""
    kind = "decoder" if MODELS[model].decodes else "encoder"
    rows = [row for row in _ROWS[precision] if row.for_models in (kind, "all")]
    return [row for row in rows if not quick or row.options.get("how") != "compile"]


def left_out(row: Row, without: Sequence[str]) -> bool:
    """Return whether a row's name begins with one of `without`, ignoring case."""
    return any(row.name.lower().startswith(start.lower()) for start in without)


def check_left_out(without: Sequence[str]) -> None:
    """Refuse prefixes with which no row's name begins.

    Raises:
        ValueError: A prefix matches nothing; the message lists the rows.
    """
    names = dict.fromkeys(row.name for rows in _ROWS.values() for row in rows)
    for start in without:
        if not any(name.lower().startswith(start.lower()) for name in names):
            raise ValueError(f"no row's name begins with {start!r}; there are {', '.join(names)}")


def tables(only: Sequence[str], *, quick: bool) -> list[tuple[str, str]]:
    """Return the (model, precision) pairs to measure.

    Args:
        only: Any number of `MODEL` or `MODEL/PRECISION`; all models if it is empty.
        quick: Without `only`, measure the smallest model alone.

    Raises:
        ValueError: A name is unknown.
    """
    if quick and not only:
        return [("tiny-llama", "bfloat16")]
    chosen = list(only) or [name for name in MODELS if not name.startswith("tiny")]
    pairs = []
    for each in chosen:
        model, _, precision = each.partition("/")
        if model not in MODELS or precision not in ("", *PRECISIONS):
            raise ValueError(
                f"no table is called {each!r}; use MODEL or MODEL/PRECISION with a model of"
                f" {', '.join(MODELS)} and a precision of {', '.join(PRECISIONS)}"
            )
        pairs += [(model, precision)] if precision else [(model, p) for p in PRECISIONS]
    return pairs

"""Every type of language model in transformers, tiny: at any level the engine says what the model says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.architectures.special import NOT_BUILT, NOT_RUN, SPECIAL
from tests.architectures.sweep import TOLERANCE, sweep
from tests.architectures.tiny import Kind, model_types

TYPES = model_types()
RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/results/coverage.json").read_text())
LEVELS = {(row["type"], row["as"]): row["level"] for row in RECORDED["rows"]}
ORDER = ("-", "none", "module", "block")
"""A type that falls below its level in the committed results fails."""


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.parametrize(("model_type", "kind"), TYPES, ids=[f"{name}-{kind}" for name, kind in TYPES])
def test_the_engine_says_what_the_model_says(
    model_type: str, kind: Kind, record_property: Callable[[str, object], None]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="replace_with_kernel_inject=True replaced nothing")
        result = sweep(model_type, kind)
    if result.level == "-":
        pytest.skip(result.why)
    row = {
        "type": model_type,
        "as": kind,
        "level": result.level,
        "error": f"{result.error:.1e}",
        "tokens": result.tokens,
    }
    record_property("architectures", row)
    assert result.error <= TOLERANCE, result.report
    if transformers.__version__ == RECORDED["transformers"]:
        known = LEVELS.get((model_type, kind), result.level)
        assert ORDER.index(result.level) >= ORDER.index(known), f"{known} is recorded: {result.report}"


def test_every_exception_names_a_type() -> None:
    known = set(transformers.CONFIG_MAPPING)
    # The oldest supported transformers lacks some types; the newest has them all.
    newest = transformers.__version__ >= "5.23"
    named = {name.partition("/")[0] for name in (*SPECIAL, *NOT_BUILT, *NOT_RUN)}
    assert not newest or named <= known, named - known

"""torch's defaults are the caller's: whatever they are, an engine is built and answers as ever."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import slipstream
from tests.helpers.models import close, inject, left_padded, make

SOURCES = Path(slipstream.__file__).parent
FLOATS = {"empty", "zeros", "ones", "rand", "randn"}
MAKERS = FLOATS | {"full", "arange", "tensor"}


@pytest.fixture(params=[torch.float16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


def answers(model: Any) -> list[torch.Tensor]:
    ids, mask = left_padded()
    given = {"input_ids": ids, "attention_mask": mask}
    transformers.set_seed(0)
    return [
        model.generate(**given, max_new_tokens=5, do_sample=False),
        model.generate(**given, max_new_tokens=5, do_sample=True, top_k=20, temperature=0.8),
        model(**given, use_cache=False).logits[mask.bool()],
        model(**given).logits[mask.bool()],
    ]


@pytest.mark.parametrize("kind", ["llama", "bloom"])
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"quant": "int4"}], ids=str)
def test_a_default_dtype_changes_nothing(
    kind: str, settings: dict[str, Any], default_dtype: Callable[[], None]
) -> None:
    original = make(kind)
    expected = answers(inject(original, **settings))
    default_dtype()
    for want, have in zip(expected, answers(inject(original, **settings)), strict=True):
        close(want, have)


def test_a_default_device_is_not_where_steps_run() -> None:
    engine = inject(make("llama"))
    ids, mask = left_padded()
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected = engine.generate(**asked)
    with torch.device("meta"):
        got = engine.generate(**asked)
    close(expected, got)


def test_tensors_that_the_engine_makes_name_their_dtype_and_device() -> None:
    """The native library writes into them: another width than it was told would be another's memory."""
    unnamed = []
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).parts
        if parts[0] == "ops" or "triton" in parts:
            continue  # tables of cases for tests; kernels that take a GPU's tensors as they are
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            given = {keyword.arg for keyword in node.keywords}
            wanted = {"device", "dtype"} if name in FLOATS else {"device"}
            if name in MAKERS and not wanted <= given:
                unnamed.append(f"{path.relative_to(SOURCES)}:{node.lineno} {ast.unparse(node)}")
    assert not unnamed, unnamed

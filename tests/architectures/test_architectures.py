"""Tiny models of many types in transformers: at every level the engine's output equals the model's.

These cover each kind of model and each path through the engine; `scripts/coverage` runs all types.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.architectures.special import NOT_BUILT, NOT_RUN, SPECIAL
from tests.architectures.sweep import TOLERANCE, sweep
from tests.architectures.tiny import Kind, model_types

CHOSEN: Mapping[Kind, str] = {
    "causal": "llama gpt2 gpt_oss deepseek_v3 mixtral falcon jamba mamba2 gemma3_text qwen3_next rwkv",
    "masked": "bert modernbert deberta-v2 esm",
    "seq2seq": "t5 longt5 bart m2m_100 switch_transformers",
    "sequence": "roberta qwen2 xlnet mt5",
    "image": "vit swin beit dinov2 convnext clip segformer",
    "picture": "dinov3_vit videomae",
    "detect": "yolos",
    "depth": "glpn",
    "video": "vivit",
    "two towers": "clip siglip",
    "sound": "wav2vec2 audio-spectrogram-transformer",
    "ctc": "hubert",
    "speech": "whisper moonshine",
}
TYPES = [(name, kind) for kind, names in CHOSEN.items() for name in names.split()]
RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/results/coverage.json").read_text())
LEVELS = {(row["type"], row["as"]): row["level"] for row in RECORDED["rows"]}
ORDER = ("-", "none", "module", "block")
"""Levels in ascending order: a type below its level in the committed results fails."""


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
    newest = transformers.__version__ == RECORDED["transformers"]
    if result.level == "-" and not newest:
        pytest.skip(result.why)
    assert result.level != "-", result.why
    row = {
        "type": model_type,
        "as": kind,
        "level": result.level,
        "error": f"{result.error:.1e}",
        "tokens": result.tokens,
    }
    record_property("architectures", row)
    # GLPN's depths are sigmoids times 10, so float32 rounding errors are ten times larger: 1.4e-4 with AVX2.
    assert result.error <= TOLERANCE * (2 if model_type == "glpn" else 1), result.report
    if newest:
        known = LEVELS.get((model_type, kind), result.level)
        assert ORDER.index(result.level) >= ORDER.index(known), f"{known} is recorded: {result.report}"


def test_no_recorded_type_failed_and_all_are_known() -> None:
    if transformers.__version__ == RECORDED["transformers"]:
        assert set(LEVELS) <= set(model_types())
    assert "failed" not in LEVELS.values()


def test_every_exception_names_a_type() -> None:
    known = set(transformers.CONFIG_MAPPING)
    # The oldest supported transformers lacks some types; the newest has them all.
    newest = transformers.__version__ >= "5.23"
    named = {name.partition("/")[0] for name in (*SPECIAL, *NOT_BUILT, *NOT_RUN)}
    assert not newest or named <= known, named - known

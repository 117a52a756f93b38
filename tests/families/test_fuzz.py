"""A few cases of the fuzzer as tests; `python -m tests.families.fuzz` runs any number of them."""

from __future__ import annotations

import random

import pytest

from tests.families.fuzz import one
from tests.families.sweep import VARIANTS

TAKES_TOKENS = [variant for variant in VARIANTS if variant[1].model.endswith(("ForCausalLM", "LMHeadModel"))]


@pytest.mark.parametrize("seed", range(16))
def test_models_of_other_numbers_answer_like_the_original(seed: int) -> None:
    level, wrong = one(random.Random(seed).choice(TAKES_TOKENS), seed)
    assert level.startswith("unmade") or not [line for line in wrong if not line.startswith("level")], wrong

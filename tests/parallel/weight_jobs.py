"""What ranks do with weights in tests: stream them from files, write them anew, save and adapt them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.families.sweep import NEW_TOKENS, VARIANTS, peaked_model
from tests.parallel.jobs import answer_of, group, inputs_of, split


def streamed(index: int, size: int, settings: dict[str, Any], place: str) -> dict[str, Any]:
    """A model without values that ranks fill from a folder, beside ranks that were handed the model."""
    original = peaked_model(VARIANTS[index][1])
    folder = Path(place) / f"{index}"
    if dist.get_rank() == 0:
        original.save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
    dist.barrier(group(size))
    with torch.device("meta"):
        hollow = type(original)(copy.deepcopy(original.config)).eval()
    reference: Any = split(copy.deepcopy(original), size, **settings)
    engine: Any = split(hollow, size, checkpoint=str(folder), **settings)
    rows = [(row.name, row.how) for row in engine.report().split]
    return compared(reference, engine, original) | {"rows": rows}


def compared(reference: Any, engine: Any, original: Any) -> dict[str, Any]:
    """The largest difference of two engines' answers, and whether they choose the same tokens."""
    errors = []
    with torch.no_grad():
        for given, _ in inputs_of(original):
            answers = []
            for one in (reference, engine):
                torch.manual_seed(1)  # some shuffle their patches
                answers.append(answer_of(one(**given)))
            errors.append(float((answers[0] - answers[1]).abs().max()))
    same = True
    if hasattr(original, "generate") and original.can_generate():
        given = {n: t for n, t in inputs_of(original)[0][0].items() if not n.startswith("decoder_")}
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        same = torch.equal(reference.generate(**given, **options), engine.generate(**given, **options))
    return {"error": max(errors), "same": same}

"""Splits those parts of fused layers that run their own code, such as state spaces and convolutions.

Nothing is known of such a part except its linears: each is cut by its rows, and the ranks join their outputs.
That is right for any linear, and every rank holds its share of the part's large matrices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from slipstream.errors import InjectionError
from slipstream.model.layers import Found
from slipstream.model.report import SplitReport
from slipstream.model.selfcheck.check import RecordedCall
from slipstream.model.tensor_parallel.autotp import LayerPlan, is_shared_out, staged
from slipstream.model.tensor_parallel.cuts import gathered
from slipstream.model.tensor_parallel.flow import is_matrix, watch_flow
from slipstream.model.tensor_parallel.plan_layers import Recorded, kind_of
from slipstream.model.tensor_parallel.sizes import Sizes
from slipstream.model.tensor_parallel.split import LayerSplit

__all__ = ["own_parts", "plan_parts"]

log = logging.getLogger(__name__)


def own_parts(found: Found) -> tuple[str, ...]:
    """Paths of the parts of a fused layer that run their own code."""
    return () if found.family is None or found.spec is None else found.family.own_parts(found.spec)


def plan_parts(
    layers: Sequence[Found],
    sizes: Sizes,
    recorded: Recorded,
    lent: Callable[[Found], AbstractContextManager[None]],
) -> dict[str, LayerPlan]:
    """Decide how the parts of fused layers are cut; the model is only read.

    Args:
        layers: Fused layers, some of whose parts run their own code.
        sizes: How many parts to cut into, and where.
        recorded: Recorded calls of the layers.
        lent: Context in which a layer has its values.

    Returns:
        Plans by layer name. Parts that cannot be run, or whose output changes once they are cut, stay whole.
    """
    plans: dict[str, LayerPlan] = {}
    of_kind: dict[tuple[Any, ...], LayerPlan] = {}
    for found in layers:
        kind = kind_of(found)
        if kind not in of_kind:
            calls = recorded[found.root][0].get(found.name, [])
            with lent(found):
                split, error, reason = _rehearsed(found, calls, sizes)
            of_kind[kind] = LayerPlan(split, _rows(found, split, reason), error)
        plans[found.name] = of_kind[kind]
    return plans


def _rehearsed(
    found: Found, calls: Sequence[RecordedCall], sizes: Sizes
) -> tuple[LayerSplit, float | None, str]:
    """Return how a layer's parts are cut, the error of the rehearsal, and why they are not cut."""
    stage, reason = staged(found.layer, calls)
    if stage is None:
        return {}, None, reason
    flow = watch_flow(stage.layer, stage.given_calls())
    split = {
        path: gathered(module, sizes)
        for path, module in _inside(found)
        if is_shared_out(path, module, flow, sizes)
    }
    try:
        return split, stage.error(split, sizes.ranks), ""
    except InjectionError as failure:
        log.info("the parts of %s stay whole: %s", found.name, failure)
        return {}, None, str(failure)


def _inside(found: Found) -> list[tuple[str, nn.Module]]:
    heads = tuple(f"{part}." for part in own_parts(found))
    return [(path, module) for path, module in found.layer.named_modules() if f"{path}.".startswith(heads)]


def _rows(found: Found, split: Mapping[str, object], reason: str) -> tuple[SplitReport, ...]:
    """Report rows: one for each matrix of the parts, and one for each other module with parameters."""
    rows = []
    for path, module in _inside(found):
        if is_matrix(module):
            cut = path in split
            how = "rows, joined" if cut else "whole on every rank"
            rows.append(SplitReport(path, how, "any linear" if cut else "", "" if cut else reason))
        elif any(p is not None for p in module._parameters.values()):
            rows.append(SplitReport(path, "whole on every rank", "", "it is not a linear"))
    return tuple(rows)

"""Plans the split of every layer that runs its own code; layers of a kind share plans, up to their turn.

Layers of one kind share a plan where it is right for all of them. Where heads are not dealt evenly, and the
rest of a layer does not compensate for it, the rank with one more head changes from layer to layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from slipstream.errors import InjectionError, UnsupportedError
from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import MODEL_ERRORS, RecordedCall, record_calls
from slipstream.model.tensor_parallel.autotp import LayerPlan, plan_layer, staged
from slipstream.model.tensor_parallel.sizes import Sizes
from slipstream.model.tensor_parallel.split import ModuleSplit
from slipstream.parallel import Turns

__all__ = ["Recorded", "kind_of", "plan_layers", "record_layers"]

log = logging.getLogger(__name__)

Recorded = Mapping[str, tuple[dict[str, list[RecordedCall]], str]]
"""By the layers' root: the recorded calls of each layer by its name, and the reason if there are none."""


def record_layers(model: nn.Module, layers: Sequence[Found]) -> Recorded:
    """Record the calls that a model in eval mode makes of some layers, which must have their values."""
    of_root: dict[str, list[Found]] = {}
    for found in layers:
        of_root.setdefault(found.root, []).append(found)
    return {root: _record(model.get_submodule(root), members) for root, members in of_root.items()}


def plan_layers(
    model: nn.Module,
    layers: Sequence[Found],
    sizes: Sizes,
    recorded: Recorded,
    *,
    reducing: Mapping[str, Sequence[str]],
    strict: bool,
    lent: Callable[[Found], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, LayerPlan]:
    """Decide how layers are cut; the model is only read.

    Args:
        model: In eval mode.
        layers: Layers that are not fused.
        sizes: How many parts to cut into, and where.
        recorded: From `record_layers`.
        reducing: By layer, path suffixes of the linears that end branches according to the user.
        strict: Raise an error for a linear that the user names but that ends no branch.
        lent: Context in which a layer has its values.

    Returns:
        Plans by layer name.

    Raises:
        InjectionError: See `strict`.
        UnsupportedError: Layers that share a module would cut it differently.
    """
    kinds: dict[tuple[Any, ...], list[Found]] = {}
    for found in layers:
        kinds.setdefault(kind_of(found), []).append(found)
    plans: dict[str, LayerPlan] = {}
    turns = _Turned(sizes)
    for root in sorted({members[0].root for members in kinds.values()}):
        of_root = [members for members in kinds.values() if members[0].root == root]
        calls, why = recorded[root]
        known = _plan_of(model, root)
        for members in of_root:
            kind = _Kind(calls, why, known, reducing, strict)
            for found in members:
                with lent(found):
                    plans[found.name] = turns.plan(found, kind)
    _check_shared(layers, plans)
    return plans


@dataclass
class _Kind:
    """A kind of layers, and the plans made for it so far, by turn."""

    calls: Mapping[str, list[RecordedCall]]
    why: str
    known: Sequence[str]
    reducing: Mapping[str, Sequence[str]]
    strict: bool
    made: dict[int, list[LayerPlan]] = field(default_factory=dict)

    def plan(self, found: Found, sizes: Sizes) -> LayerPlan:
        """Return the first existing plan that is right for a layer, or make one for it."""
        own, made = self.calls.get(found.name, []), self.made.setdefault(sizes.turn, [])
        plan = next((plan for plan in made if _fits(found, own, plan, sizes)), None)
        if plan is None:
            known = (self.reducing.get(found.name, ()), self.known, self.why)
            plan = plan_layer(found, own, sizes, known, strict=self.strict)
            made.append(plan)
        return plan


class _Turned:
    """Rotates which rank holds one more head (`Turns`); layers that share modules have the same turn."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._turns = sizes, Turns(sizes.ranks)
        self._of: dict[int, int] = {}

    def plan(self, found: Found, kind: _Kind) -> LayerPlan:
        """Choose a layer's turn and return its plan."""
        own = [id(module) for module in found.layer.modules() if module._parameters]
        decided = next((self._of[module] for module in own if module in self._of), None)
        plan = kind.made[0][0] if kind.made.get(0) else kind.plan(found, self._sizes)
        loads, _ = self._sizes.loads(found.layer, plan.split)
        of_heads, _ = self._sizes.loads(found.layer, plan.of_heads())
        turn = self._turns.next(loads, of_heads, decided)
        self._of |= dict.fromkeys(own, turn)
        return kind.plan(found, replace(self._sizes, turn=turn))


def kind_of(found: Found) -> tuple[Any, ...]:
    """Return the key of a layer's kind: classes, shapes, and attributes that may be counts of heads."""
    modules = tuple(
        (
            path,
            type(module),
            tuple((n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None),
            tuple((n, v) for n, v in vars(module).items() if type(v) is int and "head" in n),
        )
        for path, module in found.layer.named_modules()
    )
    return found.root, modules


def _record(root: nn.Module, layers: Sequence[Found]) -> tuple[dict[str, list[RecordedCall]], str]:
    try:
        calls = record_calls(root, layers)
    except MODEL_ERRORS as error:
        return {}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return calls, "" if any(calls.values()) else "no suitable input is known"


def _plan_of(model: nn.Module, root: str) -> tuple[str, ...]:
    """Path suffixes of linears whose outputs transformers' own plan sums over ranks."""
    config = getattr(model.get_submodule(root), "config", None)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return tuple(name.replace("*", "#") for name, style in plan.items() if style.startswith("rowwise"))


def _fits(found: Found, calls: Sequence[RecordedCall], plan: LayerPlan, sizes: Sizes) -> bool:
    """Whether another layer's plan is right for this layer, which may be called with other arguments."""
    if not calls or plan.max_error is None:
        return not calls and plan.max_error is None
    stage, reason = staged(found.layer, calls[:1])
    try:
        if stage is None:
            raise InjectionError(reason)
        stage.error(plan.split, sizes.ranks)
    except InjectionError as failure:
        log.info("%s is not split like another layer of its kind: %s", found.name, failure)
        return False
    return True


def _check_shared(layers: Sequence[Found], plans: Mapping[str, LayerPlan]) -> None:
    """Refuse layers that share a module and would cut it differently.

    Raises:
        UnsupportedError: There are such layers; the message names both.
    """
    seen: dict[int, tuple[str, ModuleSplit | None]] = {}
    for found in layers:
        split = plans[found.name].split
        for path, module in found.layer.named_modules():
            own = split.get(path)
            name, other = seen.setdefault(id(module), (found.name, own))
            if own != other:
                raise UnsupportedError(
                    f"{found.name} and {name} share {path or 'a module'}, but would split it differently "
                    "over several ranks; use one rank"
                )

"""The ops: each file defines a signature, its reference in plain torch, and the test cases for kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from slipstream.ops import (
    activation,
    attention,
    draw,
    feed_forward,
    linear,
    moe,
    norm,
    paged_attention,
    rope,
    rope_cache,
    sample,
)
from slipstream.ops.bind import Bound, Facts, Kernel, Op, bind

__all__ = ["OPS", "Ops", "bind_ops"]

OPS: dict[str, Op] = {
    module.OP.name: module.OP
    for module in (
        activation,
        attention,
        draw,
        feed_forward,
        linear,
        moe,
        norm,
        paged_attention,
        rope,
        rope_cache,
        sample,
    )
}
"""Every op by name."""


@dataclass(frozen=True)
class Ops:
    """The implementations bound for one kind of block; the fields are the ops' names."""

    activation: Bound
    attention: Bound
    draw: Bound
    feed_forward: Bound
    linear: Bound
    moe: Bound
    norm: Bound
    paged_attention: Bound
    rope: Bound
    rope_cache: Bound
    sample: Bound

    def names(self) -> dict[str, str]:
        """Return the name of each op's implementation, for the report."""
        return {f.name: getattr(self, f.name).name for f in fields(self)}


def bind_ops(facts: Facts, kernels: Iterable[Kernel] = ()) -> Ops:
    """Bind every op for these facts, trying `kernels` in order before the reference."""
    candidates = tuple(kernels)
    return Ops(**{name: bind(op, facts, candidates) for name, op in OPS.items()})

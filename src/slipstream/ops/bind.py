"""Chooses, once and before the first token, which implementation runs each op, and notes why others did not.

An op is a name, a reference in plain torch and a table of cases. A kernel is another implementation of the
same signature for one device. `bind` asks the kernels in order; each accepts or says why not; the reference
always accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.spec import BlockSpec

__all__ = ["Bound", "Case", "Facts", "Kernel", "Op", "bind"]


@dataclass(frozen=True)
class Case:
    """One row of an op's table: how to make its arguments.

    Attributes:
        name: What is awkward about it ("one row", "prime width").
        make: Called with a seeded generator and a dtype; returns the keyword arguments of the op, on the CPU.
    """

    name: str
    make: Callable[[torch.Generator, torch.dtype], dict[str, Any]]


@dataclass(frozen=True)
class Op:
    """A signature that every implementation shares.

    Attributes:
        name: The op's file.
        reference: The definition, in plain torch, right on every device.
        cases: What each kernel is compared on.
        writes: Arguments that it updates in place, which are compared as well.
    """

    name: str
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a kernel may ask before it accepts.

    Attributes:
        device: Where it would run.
        dtype: Of the activations.
        spec: The block it would serve; None for ops outside of a block.
        format: The weight format ("plain" for a dense matrix).
    """

    device: torch.device
    dtype: torch.dtype
    spec: BlockSpec | None = None
    format: str = "plain"


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op for one device.

    Attributes:
        op: The op's name.
        name: What the report calls it.
        device: The device type it runs on ("cpu", "cuda").
        refuse: Why it cannot serve these facts, or None if it can.
        run: The implementation, with the op's signature.
        by_rows: Of a linear: it reads a matrix faster whose rows lie one after the other than one that lies
            transposed, so that such are laid out anew when an engine is built.
    """

    op: str
    name: str
    device: str
    refuse: Callable[[Facts], str | None]
    run: Callable[..., Any]
    by_rows: bool = False


@dataclass(frozen=True)
class Bound:
    """An op's chosen implementation.

    Attributes:
        op: The op's name.
        name: The implementation's name; "reference" for plain torch.
        run: What to call.
        refused: Reason by name of each kernel that was asked and declined.
        by_rows: See `Kernel`.
    """

    op: str
    name: str
    run: Callable[..., Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    by_rows: bool = False


def bind(op: Op, facts: Facts, kernels: Iterable[Kernel]) -> Bound:
    """Return the first kernel that accepts, or the reference.

    Args:
        op: What is to be implemented.
        facts: Device, dtype, spec and weight format.
        kernels: Candidates in order of preference, for any op.
    """
    refused: dict[str, str] = {}
    for kernel in kernels:
        if kernel.op != op.name:
            continue
        if kernel.device != facts.device.type:
            refused[kernel.name] = f"runs on {kernel.device}, the engine is on {facts.device.type}"
            continue
        reason = kernel.refuse(facts)
        if reason is None:
            return Bound(op.name, kernel.name, kernel.run, refused, kernel.by_rows)
        refused[kernel.name] = reason
    return Bound(op.name, "reference", op.reference, refused)

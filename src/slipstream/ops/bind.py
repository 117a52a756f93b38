"""Select, once and before the first token, the implementation of each op, and record why others declined.

An op is a name, a reference in plain torch and a table of test cases. A kernel is another implementation of
the same signature for one device. `bind` tries the kernels in order; each accepts or returns a reason for
declining; the reference always accepts.
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
    """One test case of an op: how to make its arguments.

    Attributes:
        name: What is special about the case ("one row", "prime width").
        make: Called with a seeded generator and a dtype; returns the keyword arguments of the op, on the CPU.
    """

    name: str
    make: Callable[[torch.Generator, torch.dtype], dict[str, Any]]


@dataclass(frozen=True)
class Op:
    """An op: a signature that all implementations share.

    Attributes:
        name: The name of the op and of its file.
        reference: The definition, in plain torch, correct on every device.
        cases: Cases on which each kernel is compared with the reference.
        writes: Arguments that the op updates in place, which are compared as well.
    """

    name: str
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The facts by which a kernel decides whether it accepts.

    Attributes:
        device: The device that the op would run on.
        dtype: Dtype of the activations.
        spec: The block that the op belongs to; None for ops outside of a block.
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
        name: The kernel's name in the report.
        device: The device type it runs on ("cpu", "cuda").
        refuse: Returns why it cannot run with these facts, or None if it can.
        run: The implementation, with the op's signature.
        by_rows: For a linear: it reads row-major matrices faster than transposed ones, so that transposed
            ones are converted when an engine is built.
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
        run: The function to call.
        refused: For each kernel that was tried and declined, its name and reason.
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
        op: The op to bind.
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

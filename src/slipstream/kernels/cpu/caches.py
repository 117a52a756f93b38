"""Describes the caches of several layers, and a step over them, to the native library.

Shapes: T packed tokens, N sequences, P cache blocks, Z tokens per cache block, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.paged_attention import cache_dtype, cache_of, serves_pair, step_of
from slipstream.kernels.requirements import BlockLike
from slipstream.ops.kv_cache import Caches, LayerCache
from slipstream.ops.step import Step
from slipstream.spec import BlockSpec, Recurrence

__all__ = ["pages_of_layers", "serves_caches", "step_over"]

_UNBOUNDED = torch.Size((2**31 - 1, 2**31 - 1))
"""Blocks, and tokens per block, as large as the library accepts."""


def serves_caches(blocks: Sequence[BlockLike], caches: Caches) -> bool:
    """Whether what the blocks keep has a layout that the library uses."""
    first = _first_pages(blocks, caches)
    return all(
        (not block.spec.cached or _serves_pages(block.spec, kept, first))
        and (block.spec.recurrence is None or _serves_states(block.spec.recurrence, kept.states))
        for block, kept in zip(blocks, caches, strict=True)
    )


def _first_pages(blocks: Sequence[BlockLike], caches: Caches) -> Any:
    """Return the keys of the first layer that has a KV cache; None if none of these layers has one."""
    pairs = zip(blocks, caches, strict=True)
    return next((kept.k for block, kept in pairs if block.spec.cached), None)


def _serves_pages(spec: BlockSpec, kept: LayerCache, first: Any) -> bool:
    return (
        serves_pair(*kept.pages, adjacent=spec.latent is not None)
        and all(t.dtype == first.dtype and t.shape[:2] == first.shape[:2] for t in kept.pages)
        and tuple(tuple(t.shape[2:]) for t in kept.pages) == spec.cached
    )


def _serves_states(recurrence: Recurrence, states: Tensor | None) -> bool:
    return (
        states is not None
        and states.dtype == torch.float32
        and states.device.type == "cpu"
        and states.is_contiguous()
        and states.shape[1:] == (recurrence.state,)
    )


def pages_of_layers(blocks: Sequence[BlockLike], caches: Caches) -> tuple[Any, int]:
    """Describe caches that `serves_caches` accepts to the library, and return their dtype as well.

    The tensors must be kept alive.
    """
    pages = _first_pages(blocks, caches)
    structs = (abi.Cache * len(caches))()
    for index, (block, kept) in enumerate(zip(blocks, caches, strict=True)):
        if block.spec.cached:
            structs[index] = cache_of(*kept.pages)
        structs[index].states = address(kept.states)
    dtype = DTYPES[torch.float32] if pages is None else cache_dtype(pages)
    return structs, dtype


def step_over(blocks: Sequence[BlockLike], caches: Caches, step: Step) -> abi.Step:
    """Describe a step over the caches of some layers to the library; its tensors must be kept alive.

    Args:
        blocks: The layers in order.
        caches: Accepted by `serves_caches`.
        step: Accepted by `paged_attention.serves`.
    """
    pages = _first_pages(blocks, caches)
    # Where no layer has pages none are read, so that the step's slots may have any value.
    described = step_of(step, _UNBOUNDED if pages is None else pages.shape)
    states = next((kept.states for kept in caches if kept.states is not None), None)
    if states is not None:
        described.states, described.num_states = address(step.states), states.shape[0]
    return described

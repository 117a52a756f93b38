"""Runs layers with a recurrence in one call when a model's own forward begins their sequences.

Such a layer's mixer is a module that keeps its state in transformers' cache. It runs its own code, except for
what begins sequences (a forward without a cache, or the first with one), which takes most of the time: then
the whole layer is one call over packed tokens, and the mixer's state is handed over to the cache.

Shapes: B batch, S rows, T packed tokens, C hidden, D channels of the convolution, W its width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from slipstream.families.family import OwnMixer
from slipstream.model.block.block import Block
from slipstream.model.block.layer_call import LayerCall
from slipstream.model.fused.defer import current
from slipstream.model.fused.layer_changes import is_hooked
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.ops.kv_cache import Caches, LayerCache
from slipstream.ops.recurrence import RecurrentLike, convolved, final_state
from slipstream.ops.step import Step

__all__ = ["Begins", "Layouts", "MixerLayer", "Placed", "RunsLayers", "begin", "is_fresh", "kept_as", "put"]

_FEW = 6
"""Tokens of the comparison with a module's own code: more than a convolution covers."""
_CLOSE = 0.05
"""How far a state may be from that of the module's own code, relative to its largest number."""


@runtime_checkable
class RunsLayers(Protocol):
    """Runs layers over packed tokens: `kernels.cpu.stack.NativeStack`."""

    def takes(self, block: Any, x: Tensor) -> bool:
        """Whether one call can run a layer on rows `(T, C)`."""
        ...

    def __call__(self, blocks: Sequence[Any], x: Tensor, step: Step, caches: Caches, tables: Any) -> Tensor:
        """Run consecutive layers."""
        ...


@dataclass(frozen=True)
class Placed:
    """How transformers keeps a mixer's state.

    Attributes:
        inputs: Dtype of the convolution's inputs.
        state: Dtype of the recurrence's state, where the mixer has a rule.
        turned: The last two dimensions of that state are swapped.
    """

    inputs: torch.dtype
    state: torch.dtype | None = None
    turned: bool = False


Layouts = dict[tuple[type, torch.dtype], Placed | None]
"""How transformers keeps states, by class of the module and dtype, as far as known; None where it is not."""


@dataclass
class Begins:
    """How a layer with a recurrence begins sequences.

    Attributes:
        run: Runs it.
        kept: Shared by the layers of a model.
    """

    run: RunsLayers
    kept: Layouts


@dataclass(frozen=True)
class MixerLayer:
    """The mixer of a layer: its module, how that is called, its tensors, and its index in the cache."""

    part: nn.Module
    mixer: OwnMixer
    recurrent: RecurrentLike
    index: int

    @property
    def key(self) -> tuple[type, torch.dtype]:
        """What decides how its state is kept: a key of `Layouts`."""
        return type(self.part), self.recurrent.last.computes_in


def begin(
    begins: Begins, block: Block, part: nn.Module, mixer: OwnMixer, call: LayerCall, index: int
) -> Tensor | None:
    """Run a layer on the beginning of sequences.

    Args:
        begins: Belongs to the layer.
        block: The fused layer; its mixer replaces attention.
        part: The mixer's module.
        mixer: How that is called.
        call: The arguments of the layer's call, including `given`.
        index: The layer's index in the cache.

    Returns:
        `(B, S, C)`, zero where a row is padded; None if the module's own code has to run: for a single token,
        for padding that is read, or for a state that exists already or is kept in an unknown way.
    """
    x, given = call.hidden, call.given or {}
    cache = given.get("past_key_values", given.get("cache_params"))
    spans = _spans(given.get(mixer.mask), x)
    if block.part is None or spans is None or x.shape[1] < 2 or torch.is_autocast_enabled(x.device.type):
        return None
    # The residual stream may be wider than the weights, but not narrower.
    fits = torch.promote_types(x.dtype, block.part.last.computes_in) == x.dtype
    if not fits or not begins.run.takes(block, x.flatten(0, 1)):
        return None
    layer, kept = MixerLayer(part, mixer, block.part, index), None
    scope, is_padded = current(), set(spans) != {(0, x.shape[1])}
    if any(map(is_hooked, part.modules())) or (is_padded and (scope is None or not scope.drops)):
        return None
    if cache is not None:
        known = _ends_together(spans, x) and is_fresh(cache, index, x.shape[0])
        kept = kept_as(begins, block, layer, cache) if known else None
        if kept is None:
            return None
    packed = torch.cat([row[first:last] for row, (first, last) in zip(x, spans, strict=True)])
    lens = [last - first for first, last in spans]
    out, states = _run(begins.run, block, packed, lens)
    if kept is not None:
        inputs = _inputs(block, layer.recurrent, x, spans)
        put(cache, index, kept, inputs, final_state(states, layer.recurrent.spec))
    if not is_padded:
        return out.view(*x.shape[:2], -1)
    whole = out.new_zeros(x.shape)
    for row, rows, (first, last) in zip(whole, out.split(lens), spans, strict=True):
        row[first:last] = rows
    return whole


def put(cache: Any, index: int, kept: Placed, inputs: Tensor, state: Tensor | None) -> None:
    """Store a mixer's first state in a cache.

    Args:
        cache: A cache of transformers, updated in place.
        index: The layer's index in it.
        kept: How it keeps the state.
        inputs: The last inputs of the convolution, `(B, D, W)`.
        state: From `final_state`.
    """
    cache.update_conv_state(inputs.to(kept.inputs), index, conv_kernel_size=inputs.shape[-1])
    if state is not None:
        cache.update_recurrent_state((state.mT if kept.turned else state).to(kept.state), index)


def _spans(mask: Any, x: Tensor) -> list[tuple[int, int]] | None:
    """Return each row's tokens as `(first, end)`; None if they are not consecutive, or there are none.

    A mask may only have zeros and ones, because modules multiply by it.
    """
    if mask is None:
        return [(0, x.shape[1])] * x.shape[0]
    if not isinstance(mask, Tensor) or mask.shape != x.shape[:2]:
        return None
    seen = (mask != 0).int()
    if not bool((mask == seen).all()):
        return None
    count, first = seen.sum(1), seen.argmax(1)
    ends = x.shape[1] - seen.flip(1).argmax(1)
    if not bool(((count > 0) & (ends - first == count)).all()):
        return None
    return list(zip(first.tolist(), ends.tolist(), strict=True))


def _ends_together(spans: Sequence[tuple[int, int]], x: Tensor) -> bool:
    """Whether no row is padded behind its tokens: padding would go on changing its state."""
    return all(last == x.shape[1] for _, last in spans)


def is_fresh(cache: Any, index: int, rows: int) -> bool:
    """Whether a cache has a layer for the state, which keeps nothing yet, and need not keep older ones.

    Args:
        cache: A cache of transformers.
        index: The layer's index in it.
        rows: B; what was reset has a number of rows already.
    """
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    known = getattr(layer, "has_previous_state", None)
    empty = isinstance(known, dict) and not any(known.values())
    own = "update_conv_state" in vars(cache) or "update_recurrent_state" in vars(cache)
    fits = all(state is None or len(state) == rows for state in _states(layer)) if empty else False
    return fits and not own and not getattr(layer, "record_past", False)


def _states(layer: Any) -> list[Tensor | None]:
    return [*layer.conv_states.values(), *layer.recurrent_states.values()]


def _run(run: RunsLayers, block: Block, x: Tensor, lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run a layer on packed sequences; return its output and their states."""
    spec, rows, device = block.part.spec, len(lens), x.device  # type: ignore[union-attr]
    states = torch.zeros(rows, spec.state, dtype=torch.float32, device=device)
    counts = torch.tensor(lens, dtype=torch.int32, device=device)
    starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, out=starts[1:])
    positions = torch.cat([torch.arange(count, device=device) for count in lens])
    empty = torch.empty(0, dtype=torch.float32, device=device)
    step = Step(
        token_ids=positions,
        positions=positions,
        query_starts=starts,
        kv_lens=counts,
        block_table=torch.zeros(rows, 1, dtype=torch.int32, device=device),
        slots=torch.zeros_like(positions),
        logit_rows=positions[:0],
        max_query_len=max(lens),
        max_kv_len=max(lens),
        states=torch.arange(rows, dtype=torch.int32, device=device),
    )
    return run([block], x, step, [LayerCache(empty, empty, states)], {}), states


def _inputs(block: Block, part: RecurrentLike, x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the last inputs of the convolution, `(B, D, W)`, zero before the first token."""
    spec = part.spec
    out = torch.zeros(len(spans), spec.channels, spec.width, dtype=x.dtype, device=x.device)
    for into, row, (first, last) in zip(out, x, spans, strict=True):
        normed = block.entered(row[max(first, last - spec.width) : last])
        inputs = convolved(part.projected(normed, block.ops.linear.run), spec)
        into[:, spec.width - len(inputs) :] = inputs.mT
    return out


def kept_as(begins: Begins, block: Block, layer: MixerLayer, cache: Any) -> Placed | None:
    """Return how transformers keeps a module's state, by what its own code keeps; None if unknown."""
    if layer.key not in begins.kept:
        if any(state is not None for state in _states(cache.layers[layer.index])):
            return None  # it was reset, and the module's own code would write into it
        with torch.autocast("cpu", enabled=False):
            begins.kept[layer.key] = _compared(begins.run, block, layer, cache)
    return begins.kept[layer.key]


def _compared(run: RunsLayers, block: Block, layer: MixerLayer, cache: Any) -> Placed | None:
    spec, index = layer.recurrent.spec, layer.index
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_FEW, block.spec.hidden, generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(layer.recurrent.last.computes_in)
    own = copy.copy(cache)
    own.layers = list(cache.layers)
    own.layers[index] = copy.deepcopy(cache.layers[index])  # it is empty
    try:
        layer.mixer.call(layer.part, block.entered(x)[None], {"past_key_values": own})
        convolution, state = (
            _first(getattr(own.layers[index], name)) for name in ("conv_states", "recurrent_states")
        )
    except MODEL_ERRORS:
        return None
    _, ours = _run(run, block, x, [_FEW])
    inputs, final = _inputs(block, layer.recurrent, x[None], [(0, _FEW)]), final_state(ours, spec)
    if convolution is None or not _agree(convolution, inputs) or (state is None) != (final is None):
        return None
    if state is None or final is None:
        return Placed(convolution.dtype)
    turned = next((turned for turned in (False, True) if _agree(state, final.mT if turned else final)), None)
    return None if turned is None else Placed(convolution.dtype, state.dtype, turned)


def _first(states: Any) -> Tensor | None:
    """Return the only state of a layer of a cache; None if it keeps none, or several."""
    states = list(states.values()) if isinstance(states, dict) else list(states)
    return states[0] if len(states) == 1 else None


def _agree(theirs: Tensor, ours: Tensor) -> bool:
    if theirs.shape != ours.shape:
        return False
    theirs, ours = theirs.float(), ours.float()
    return bool((theirs - ours).abs().max() <= _CLOSE * ours.abs().max())

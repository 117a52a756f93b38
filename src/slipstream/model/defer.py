"""Layers that follow each other run in one call: what a layer returns is computed when somebody looks at it.

Within a forward of a watched model (`watch.py`), an injected layer that is handed no cache returns a
`Pending` tensor, and the next layer adds itself to it. The last layer runs them all: where a model reads
text and no loss is asked for, padding is dropped before the first of them, and zeros stand in its place
afterwards. Whoever looks at a state in between (a hook,
a model's own loop) has it computed then, from the layers up to there: the tensor becomes a plain one in its
place. So nothing depends on how a model's loop is written, and no state outlives its forward unseen.

Shapes: B batch, S sequence, C hidden, T packed tokens, R rotated dims.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.model.block import Block, RopeTable
from slipstream.model.layer_call import LayerCall, run_block
from slipstream.model.rows import Rows, pack, real_tokens
from slipstream.ops.rope import half_tables
from slipstream.ops.step import Packed
from slipstream.spec import Rope

__all__ = [
    "Chain",
    "Encoder",
    "Pending",
    "Scope",
    "current",
    "defer",
    "enter",
    "is_plain_run",
    "join",
    "leave",
]


class Encoder(Protocol):
    """What runs layers without a cache: `kernels.cpu.stack.NativeStack`."""

    name: str
    most_tokens: int

    @property
    def blocks(self) -> Sequence[Any]: ...  # noqa: D102
    def has(self, block: Any) -> bool: ...  # noqa: D102
    def kind(self, block: Any) -> int | None: ...  # noqa: D102

    def encode(  # noqa: D102
        self, blocks: Sequence[Any], x: Tensor, packed: Packed, tables: dict[Rope, RopeTable]
    ) -> Tensor | None: ...


@dataclass
class Scope:
    """A forward of a watched model, within which layers may wait for each other.

    Attributes:
        encoder: Runs its layers; None where nothing does, or where every state is asked for.
        drops: What leaves padded positions is read by nobody.
        outer: The forward that this one is a part of.
        waiting: States that were not computed when they were returned.
    """

    encoder: Encoder | None
    drops: bool
    outer: Scope | None
    waiting: list[weakref.ref[Pending]] = field(default_factory=list)


_scope: ContextVar[Scope | None] = ContextVar("slipstream_scope", default=None)


def current() -> Scope | None:
    """The forward that is running in this context, if any is watched."""
    return _scope.get()


def enter(encoder: Encoder | None, *, drops: bool) -> None:
    """Begin a forward of a watched model: `encoder` and `drops` as in `Scope`, or as an outer one's."""
    outer = _scope.get()
    if outer is not None:
        encoder, drops = encoder if outer.encoder is not None else None, drops and outer.drops
    _scope.set(Scope(encoder, drops, outer))


def leave(*, failed: bool) -> None:
    """End it: states that are still waiting and that somebody holds are computed, unless it failed."""
    scope = _scope.get()
    if scope is None:
        return
    _scope.set(scope.outer)
    for one in scope.waiting:
        pending = one()
        if pending is not None and not failed:
            _settle(pending)


class Pending(Tensor):
    """The states that will leave a layer, `(B, S, C)`: shape, dtype and device are known, values are not.

    Anything but a look at those computes the values, after which this is a plain tensor. What passes by
    torch's functions reads NaN.

    Attributes:
        chain: The layers.
        count: How many of them, from the first.
    """

    chain: Chain
    count: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute whatever is waiting among the arguments, then go on."""
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        waiting = [*_waiting(args), *_waiting(kwargs.values())]
        if not waiting:
            raise AssertionError(f"a state that waits for its layers is hidden in the arguments of {func}")
        for pending in waiting:
            _settle(pending)
        return func(*args, **kwargs)


_KNOWN = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.is_floating_point,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    }
)


def _settle(pending: Pending) -> None:
    """Compute the values; the tensor is a plain one from now on."""
    if type(pending) is not Pending:
        return
    values = pending.chain.run(pending.count)
    with torch._C.DisableTorchFunctionSubclass():
        pending.data = values
        del pending.chain, pending.count
        pending.__class__ = Tensor  # type: ignore[assignment]


def _waiting(values: Iterable[Any]) -> list[Pending]:
    found: list[Pending] = []
    for value in values:
        if type(value) is Pending:
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _waiting(value)
        elif isinstance(value, dict):
            found += _waiting(value.values())
    return found


@dataclass
class Chain:
    """Layers that wait, and what entered the first of them.

    Attributes:
        encoder: Runs them.
        drops: As of its scope.
        x: `(B, S, C)`.
        real: Which tokens are, `(B, S)`; None for all.
        steps: Each layer's block, and the mask and the angles that the model passed to it.
        masks: What masks say, by their identity and the kind of layer that they were read for; and they
            themselves, so that nothing else takes their identity.
        tables: The model's cosines and sines by rope, `(B | 1, S, R)`.
        versions: Of what was handed in, which must not change before the layers run.
        blank: NaN in the shape of the states.
        told: What the layer that joined last was handed beside the states (`follow.py`).
    """

    encoder: Encoder
    drops: bool
    x: Tensor
    real: Tensor | None
    steps: list[tuple[Block, Tensor | None, tuple[Tensor, Tensor] | None]] = field(default_factory=list)
    masks: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None | bool]] = field(default_factory=dict)
    tables: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    blank: Tensor | None = None
    told: Any = None

    def accept(self, block: Block, call: LayerCall) -> bool:
        """Add a layer; False where it cannot run with those that wait."""
        spec = block.spec
        if not self.encoder.has(block) or self.steps and spec.causal != self.steps[0][0].spec.causal:
            return False
        if spec.rope is not None and not self._turns(spec.rope, call.rope):
            return False
        if not _same(self.read(block, call.mask), self.real):
            return False
        self.steps.append((block, call.mask, call.rope))
        return True

    def read(self, block: Block, mask: Tensor | None) -> Tensor | None | bool:
        """What `real_tokens` says of a layer's mask."""
        spec = block.spec
        key = (id(mask), spec.causal, spec.window, spec.mask, spec.alibi is None)
        if key not in self.masks:
            if mask is not None:
                self.watch(mask)
            self.masks[key] = mask, real_tokens(mask, spec, *self.x.shape[:2], drops=self.drops)
        return self.masks[key][1]

    def _turns(self, rope: Rope, pair: tuple[Tensor, Tensor] | None) -> bool:
        """Whether the angles that a layer is handed are those of the other layers of its kind."""
        if pair is None:
            return False
        known = self.tables.get(rope)
        if known is not None:
            return all(_is_view(a, b) for a, b in zip(known, pair, strict=True))
        batch, length = self.x.shape[:2]
        shapes = {(rows, length, t.shape[-1]) for t in pair for rows in (1, batch) if t.dim() == 3}
        if pair[0].shape != pair[1].shape or tuple(pair[0].shape) not in shapes:
            return False
        self.tables[rope] = pair
        for table in pair:
            self.watch(table)
        return True

    def watch(self, tensor: Tensor) -> None:
        """Notice if something that was handed in is written to; tensors of inference mode do not tell."""
        if not tensor.is_inference():
            self.versions.append((tensor, tensor._version))

    def run(self, count: int) -> Tensor:
        """What leaves the first `count` layers, `(B, S, C)`.

        Raises:
            DeviceError: Something that they were handed was written to since.
        """
        if any(tensor._version != version for tensor, version in self.versions):
            raise DeviceError(
                "a model wrote in place into what it had handed to its layers before they ran; build the "
                "engine with replace_with_kernel_inject=False for this model"
            )
        steps = self.steps[:count]
        batch, length, width = self.x.shape
        rows = pack(self.real, batch, length, causal=steps[0][0].spec.causal, drops=self.drops)
        x = self.x.reshape(batch * length, width)
        entering = x if rows.index is None else x[rows.index]
        packed, tables = _turned(rows, self.tables, batch, length)
        left = self.encoder.encode([step[0] for step in steps], entering, packed, tables)
        if left is None:
            return self._one_by_one(steps)
        if rows.index is not None:
            left = torch.zeros_like(x).index_copy_(0, rows.index, left)
        return left.view(batch, length, width)

    def _one_by_one(self, steps: Sequence[tuple[Block, Any, Any]]) -> Tensor:
        x = self.x
        for block, mask, rope in steps:
            x = run_block(block, LayerCall(x, mask, None, None, rope, None), 0, None)[0]
        return x


def _turned(
    rows: Rows, tables: dict[Rope, tuple[Tensor, Tensor]], batch: int, length: int
) -> tuple[Packed, dict[Rope, RopeTable]]:
    """The tables by row, each angle once, and the packed tokens with their rows in them."""
    shared = all(cos.shape[0] == 1 for cos, _ in tables.values())
    angles: dict[Rope, RopeTable] = {}
    for rope, pair in tables.items():
        cos, sin = (t if shared else t.expand(batch, -1, -1) for t in pair)
        cos, sin = half_tables(cos, sin, rope)
        angles[rope] = (cos.flatten(0, 1), sin.flatten(0, 1))
    if not tables or not shared:
        return rows.packed, angles
    return replace(rows.packed, positions=rows.packed.positions % length), angles


def _is_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same values at the same place."""
    places = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other))
    return one is other or next(places) == next(places)


def _same(one: Tensor | None | bool, other: Tensor | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other


def defer(block: Block, call: LayerCall) -> Tensor | None:
    """The states that a layer will return: computed where it is the last, else waiting.

    Args:
        block: The layer's.
        call: What the model passed; its states may be waiting.

    Returns:
        `(B, S, C)`; None where the layer has to run now, and by itself.
    """
    scope, hidden = _scope.get(), call.hidden
    if scope is None or scope.encoder is None or call.cache is not None or call.bias is not None:
        return None
    chain = hidden.chain if isinstance(hidden, Pending) and hidden.count == len(hidden.chain.steps) else None
    if (
        chain is None
        or (chain.encoder, chain.drops) != (scope.encoder, scope.drops)
        or not chain.accept(block, call)
    ):
        if chain is not None or not _may_begin(scope.encoder, hidden):
            return None
        chain = _begin(scope.encoder, block, call, drops=scope.drops)
        if chain is None:
            return None
    return join(scope, chain, block)


def join(scope: Scope, chain: Chain, block: Block) -> Tensor:
    """What the layer that joined a chain last returns."""
    count, blocks = len(chain.steps), chain.encoder.blocks
    if 1 < count == len(blocks) and block is blocks[-1]:
        return chain.run(count)
    pending = _pending(chain, count)
    scope.waiting.append(weakref.ref(pending))
    return pending


def _may_begin(encoder: Encoder, hidden: Tensor) -> bool:
    """Whether layers may wait for each other at all, by the states that enter the first."""
    return (
        type(hidden) is Tensor
        and 0 < hidden.shape[0] * hidden.shape[1] <= encoder.most_tokens
        and is_plain_run(hidden)
    )


def is_plain_run(x: Tensor) -> bool:
    """Whether nothing but values on the CPU is wanted: no gradients, other dtypes, traces or transforms."""
    return (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
    )


def _begin(encoder: Encoder, block: Block, call: LayerCall, *, drops: bool) -> Chain | None:
    """A chain of one layer, or None where that must run by itself."""
    hidden = call.hidden
    if not encoder.has(block):
        return None
    # Without versions, nobody could tell whether it was changed before it is read.
    chain = Chain(encoder, drops, hidden.clone() if hidden.is_inference() else hidden, None)
    real = chain.read(block, call.mask)
    if isinstance(real, bool):
        return None
    chain.real = real
    chain.watch(chain.x)
    return chain if chain.accept(block, call) else None


def _pending(chain: Chain, count: int) -> Pending:
    if chain.blank is None:
        blank = torch.full((1,), torch.nan, dtype=chain.x.dtype, device="cpu")
        chain.blank = blank.expand(chain.x.shape)
    pending: Pending = chain.blank.as_subclass(Pending)
    pending.chain, pending.count = chain, count
    return pending

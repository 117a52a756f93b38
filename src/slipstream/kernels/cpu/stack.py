"""All blocks of an engine in one native call: the structs are made once per engine, a step is one call.

Shapes: T packed tokens, N sequences, C hidden, P cache blocks, Z tokens per cache block, K kv heads, D head
dim.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, StackCall, address
from slipstream.kernels.cpu.abi_text import TextCall
from slipstream.kernels.cpu.angles import tables_of
from slipstream.kernels.cpu.blocks import Prepared, biased, prepare, refuse_block
from slipstream.kernels.cpu.caches import pages_of_layers, serves_caches, step_over
from slipstream.kernels.cpu.dynamic_cache import extended
from slipstream.kernels.cpu.leases import Turns
from slipstream.kernels.cpu.library import Library, load, rest_torch
from slipstream.kernels.cpu.paged_attention import serves
from slipstream.kernels.cpu.text import NativeText, refuse_text
from slipstream.kernels.requirements import BlockLike
from slipstream.ops.kv_cache import Caches
from slipstream.ops.step import Older, Packed, Step
from slipstream.ops.text import TextFrame
from slipstream.spec import BlockSpec, Role, Rope

__all__ = ["NativeStack", "Run"]

_MOST_TOKENS = 1 << 20
"""Packed tokens per step up to which this is faster than one layer at a time; no step has more."""

_MOST_TOKENS_BESIDE_AMX = 64
"""The limit in bfloat16 where torch's matrix products use AMX and the library's unit does not."""

Tables = dict[Rope, tuple[Tensor, Tensor]]
Run = Callable[[Any, Tensor, Step, Caches, Tables, Tensor | None], Tensor]
"""The signature of `model.frame.run_stack`."""

_WEIGHTS = operator.attrgetter("weights")


class NativeStack:
    """Runs every layer over packed tokens and the paged cache, as `model.frame.run_stack` does.

    Weights are read in place. Tensors that are moved, cast or replaced later are noticed by their addresses.

    Attributes:
        name: Its name in the report.
        most_tokens: Maximum number of tokens per step; longer steps go to the fallback.
        library: For one instruction set.
        blocks: The layers in order.
    """

    def __init__(self, blocks: Sequence[BlockLike], library: Library, otherwise: Run) -> None:
        """Describe the blocks to the library.

        Args:
            blocks: Accepted by `refuse_block`.
            library: For one instruction set.
            otherwise: The fallback for steps of many tokens, and for blocks that are no longer accepted.
        """
        self.name = f"cpu-{library.isa}"
        roles = (block.weights.matrices for block in blocks if block.spec.cached)
        lasts = (block.part.last for block in blocks if block.part is not None)
        weight = next((matrices[Role.ATTN_OUT] for matrices in roles), None) or next(lasts)
        dtype = weight.planes[0].dtype if weight.dtype is None else weight.dtype
        beside_amx = (
            dtype == torch.bfloat16
            and torch.cpu._is_amx_tile_supported()
            and not library.isa.startswith("amx")
        )
        self.most_tokens = _MOST_TOKENS_BESIDE_AMX if beside_amx else _MOST_TOKENS
        self.library, self._otherwise = library, otherwise
        self.blocks: tuple[BlockLike, ...] = tuple(blocks)
        self._place = {id(block): index for index, block in enumerate(blocks)}
        first: dict[BlockSpec, int] = {}
        self._kinds = tuple(first.setdefault(block.spec, index) for index, block in enumerate(blocks))
        streams = blocks[0].spec.streams
        self._state = (*(() if streams is None else (streams.count,)), blocks[0].spec.hidden)
        self._prepared: Prepared | None = None
        self.ready()  # may return None: the blocks of a copy may no longer be accepted

    @staticmethod
    def refuses(block: BlockLike) -> str | None:
        """Return why the library cannot run a block, or None; subclasses may accept more blocks."""
        return refuse_block(block)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies make structs of their own blocks, since addresses cannot be copied."""
        return _restore, (type(self), self.blocks, self.library.isa, self._otherwise, self.most_tokens)

    def __call__(
        self,
        blocks: Sequence[Any],
        x: Tensor,
        step: Step,
        caches: Caches,
        tables: Tables,
        inputs: Tensor | None = None,
    ) -> Tensor:
        """Run consecutive layers over packed tokens and the paged cache.

        Args:
            blocks: All blocks of the engine, or a contiguous part of them.
            x: `(T, C)`, or `(T, S, C)` if the blocks have several streams; not modified.
            step: Lengths, slots and block table.
            caches: What each of the blocks keeps; updated in place.
            tables: Cosines and sines by rope, `(T, R / 2)`.
            inputs: `(T, blocks, P)`, the blocks' own inputs, where they have some.

        Returns:
            The output of the last block, in the shape of `x`.

        Raises:
            DeviceError: The step points outside of the cache.
        """
        prepared = self.ready()
        first = self._place.get(id(blocks[0])) if len(blocks) else None
        if (
            prepared is None
            or first is None
            or not 0 < x.shape[0] <= self.most_tokens
            or x.shape != (step.slots.shape[0], *self._state)
            or any(t.shape[0] != x.shape[0] for rope in prepared.ropes for t in tables[rope])
            or not self._serves(blocks, first, x, step, caches)
        ):
            return self._otherwise(blocks, x, step, caches, tables, inputs)
        call = StackCall()
        inputs = None if inputs is None else inputs.float().contiguous()
        if inputs is not None:
            call.inputs, call.inputs_stride = inputs.data_ptr(), inputs.stride(0)
        return self._run(prepared, slice(first, first + len(blocks)), call, x, step, caches, tables)

    def takes(self, block: Any, x: Tensor) -> bool:
        """Whether a call for one layer and rows `(T, C)` runs natively, given a cache that serves it."""
        place = self._place.get(id(block))
        mine = place is not None and self.blocks[place] is block
        return mine and self._reads(x) and self.ready() is not None

    def has(self, block: Any) -> bool:
        """Whether a block belongs to this stack, and runs without a paged cache, too."""
        place = self._place.get(id(block))
        if place is None or self.blocks[place] is not block:
            return False
        spec = block.spec
        alone = spec.recurrence is None and spec.sharing == "own" and spec.values == "own"
        return alone and not spec.inputs and spec.growth is None

    def kind(self, block: Any) -> int | None:
        """Return the index of the first block with the same spec; None if `block` is not in this stack."""
        place = self._place.get(id(block))
        return None if place is None or self.blocks[place] is not block else self._kinds[place]

    def ready(self, *, recurring: bool = True) -> Prepared | None:
        """Return the structs, rebuilt if a tensor has moved; None if the blocks are no longer accepted.

        Args:
            recurring: Blocks with a recurrence may run; without them, their mixers need no look.
        """
        prepared = self._prepared
        if (
            prepared is not None
            and self._is_of(prepared)
            and tuple(map(Tensor.data_ptr, prepared.tensors)) == prepared.addresses
            and (not recurring or prepared.keeps_parts)
        ):
            return prepared
        accepted = all(self.refuses(block) is None for block in self.blocks)
        self._prepared = prepare(self.blocks) if accepted else None
        return self._prepared

    def _serves(self, blocks: Sequence[Any], first: int, x: Tensor, step: Step, caches: Caches) -> bool:
        ours = self.blocks[first : first + len(blocks)]
        return (
            len(ours) == len(blocks) == len(caches)
            and all(block.spec.causal for block in ours)
            and step.positions.dtype == torch.int64
            and step.positions.is_contiguous()
            and all(a is b for a, b in zip(ours, blocks, strict=True))
            and x.dtype in DTYPES
            and x.device.type == "cpu"
            and serves(step)
            and serves_caches(ours, caches)
        )

    def _run(
        self,
        prepared: Prepared,
        which: slice,
        call: StackCall,
        x: Tensor,
        step: Step,
        caches: Caches,
        tables: Tables,
    ) -> Tensor:
        ours = self.blocks[which]
        x = (x.float() if ours[0].spec.wide else x).contiguous()
        out = torch.empty_like(x)
        angles, rows = tables_of(prepared.ropes, tables)
        size = ctypes.sizeof(abi.Block) * which.start
        call.x, call.out, call.dtype = x.data_ptr(), out.data_ptr(), DTYPES[x.dtype]
        call.blocks = ctypes.pointer(abi.Block.from_buffer(prepared.blocks, size))
        call.num_blocks = len(ours)
        call.tables, call.num_tables = rows, len(angles)
        call.places, call.step = step.positions.data_ptr(), step_over(ours, caches, step)
        call.caches, call.cache_dtype = pages_of_layers(ours, caches)
        self._call(call, ours)
        del angles
        return out

    def _call(self, call: StackCall, blocks: Sequence[BlockLike], whole: TextCall | None = None) -> None:
        """Run a call, or the text call `whole` that contains it; take and end the leases of leased blocks."""
        turns = Turns.of(blocks)
        if turns is not None:
            turns.point(call)
        self.library.run(*(("stack", call) if whole is None else ("text", whole)))
        if turns is not None:
            turns.check()

    def encode(
        self,
        blocks: Sequence[Any],
        x: Tensor,
        packed: Packed,
        tables: Tables,
        relative: Tensor | None = None,
    ) -> Tensor | None:
        """Run some layers on packed, complete sequences, without a cache.

        Args:
            blocks: Blocks of this stack, in any order, possibly repeated.
            x: `(T, C)`; not modified.
            packed: Where the sequences begin and end.
            tables: Cosines and sines by rope, `(rows, R / 2)`; `packed.positions` has the row of each token.
            relative: `(H, 2 * S - 1)` float32 contiguous, added to the scores of layers that are not causal:
                column S - 1 + d is for keys d tokens before the query. None for no bias.

        Returns:
            `(T, C)`, the output of the last block; None if another implementation must run it or is faster.

        Raises:
            DeviceError: `packed` points outside of `x` or of the tables.
        """
        prepared = self.prepared_for(blocks, x)
        if prepared is None:
            return None
        call = StackCall()
        call.step = abi.Step(kv_lens=packed.kv_lens.data_ptr())
        return self._run_packed(prepared, call, blocks, x, packed, tables, relative)

    def extend(
        self,
        blocks: Sequence[Any],
        x: Tensor,
        packed: Packed,
        tables: Tables,
        older: Sequence[Older],
        past: int | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
        """Run some layers on equally long continuations of sequences whose keys and values are cached.

        Args:
            blocks: Causal ones, in any order.
            x: `(B * S, C)`; not modified.
            packed: Where the sequences begin; `positions` as in `encode`.
            tables: As in `encode`.
            older: Keys and values of each layer `(B, K, L, D)`, in the dtype of `x`; L is the same for all.
            past: How many of the L tokens are filled; those of `x` are written behind them, in place. None
                if all L are filled; then `older` is not written to.

        Returns:
            `(B * S, C)`, the output of the last block, and the keys and values of each layer including the
            new tokens, `(B, K, L + S, D)` contiguous, or `older` where these were written to; None if another
            implementation must run it or is faster.

        Raises:
            DeviceError: `packed` points outside of `x` or of the tables.
        """
        prepared = self.prepared_for(blocks, x)
        latents = {block.spec.latent is not None for block in blocks}
        if prepared is None or len(latents) > 1 or (past is not None and True in latents):
            return None
        batch = packed.kv_lens.shape[0]
        kept = extended(blocks, x, batch, older, past)
        end = kept.past + x.shape[0] // batch
        lens = torch.full((batch,), end, dtype=torch.int32, device="cpu")
        pages = torch.arange(batch, dtype=torch.int32, device="cpu")
        slots = torch.arange(kept.past, end, device="cpu")
        if batch > 1:
            slots = (slots + kept.room * torch.arange(batch, device="cpu")[:, None]).flatten()
        call = StackCall(caches=kept.caches, cache_dtype=DTYPES[x.dtype])
        call.step = abi.Step(
            table_width=1,
            cache_blocks=batch,
            block_size=kept.room,
            kv_lens=lens.data_ptr(),
            block_table=pages.data_ptr(),
            slots=slots.data_ptr(),
            past=kept.copied,
            heads_first=int(kept.heads_first),
        )
        out = self._run_packed(prepared, call, blocks, x, packed, tables)
        return out, [(k.contiguous(), v.contiguous()) for k, v in kept.pairs]

    def _is_of(self, prepared: Prepared) -> bool:
        return all(map(operator.is_, map(_WEIGHTS, self.blocks), prepared.weights))

    def _takes(self, blocks: Sequence[Any], x: Tensor) -> bool:
        return all(map(self.has, blocks)) and self._reads(x)

    def _reads(self, x: Tensor) -> bool:
        rows = 0 < x.shape[0] <= self.most_tokens and x.shape[1:] == self._state
        return rows and x.dtype in DTYPES and x.device.type == "cpu"

    def prepared_for(self, blocks: Sequence[Any], x: Tensor) -> Prepared | None:
        """Return the structs if the given layers can run on the rows `x` in one call, else None."""
        return self.ready(recurring=False) if self._takes(blocks, x) else None

    def serves(self, prepared: Prepared, blocks: Sequence[Any], x: Tensor) -> bool:
        """Whether structs made earlier are still valid; assumes that no tensor has moved since."""
        return prepared is self._prepared and self._is_of(prepared) and self._takes(blocks, x)

    def _run_packed(
        self,
        prepared: Prepared,
        call: StackCall,
        blocks: Sequence[Any],
        x: Tensor,
        packed: Packed,
        tables: Tables,
        relative: Tensor | None = None,
    ) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        call.x = x.data_ptr()
        if relative is not None:
            prepared = replace(prepared, blocks=biased(prepared.blocks, relative))
        self.run_layers(prepared, call, blocks, out, packed, tables)
        return out

    def expect(self) -> None:
        """Announce an upcoming call, so that parked threads wake up."""
        self.library.rouse()

    def text(self, frame: TextFrame) -> NativeText | None:
        """Return the runner of a whole text encoder around these layers, or None if the frame is refused."""
        return NativeText(self, frame) if refuse_text(frame) is None else None

    def run_layers(
        self,
        prepared: Prepared,
        call: StackCall,
        blocks: Sequence[Any],
        out: Tensor,
        packed: Packed,
        tables: Tables,
        whole: TextCall | None = None,
    ) -> None:
        """Fill in a call, except for caches, lengths and input, and run it, or `whole` that contains it."""
        angles, rows = tables_of(prepared.ropes, tables)
        places = [self._place[id(block)] for block in blocks]
        call.out, call.dtype = out.data_ptr(), DTYPES[out.dtype]
        call.blocks, call.num_blocks = self._structs(prepared, places), len(places)
        call.tables, call.num_tables = rows, len(angles)
        call.positions = address(packed.positions)
        call.step.tokens, call.step.sequences = out.shape[0], packed.kv_lens.shape[0]
        call.step.query_starts = packed.query_starts.data_ptr()
        rest_torch()
        self._call(call, [self.blocks[place] for place in places], whole)
        del angles

    def _structs(self, prepared: Prepared, places: Sequence[int]) -> Any:
        """Return the structs of some blocks in order; a view of the existing ones if they are contiguous."""
        if places == list(range(places[0], places[0] + len(places))):
            return ctypes.pointer(
                abi.Block.from_buffer(prepared.blocks, ctypes.sizeof(abi.Block) * places[0])
            )
        return (abi.Block * len(places))(*(prepared.blocks[place] for place in places))


def _restore(
    kind: type[NativeStack], blocks: Sequence[BlockLike], isa: str, otherwise: Run, most_tokens: int
) -> NativeStack | Run:
    library = load(isa)
    if library is None:
        return otherwise
    stack = kind(blocks, library, otherwise)
    stack.most_tokens = most_tokens
    return stack

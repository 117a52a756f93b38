"""The parts around the layers of a causal language model: embedding, final norm, head, rotary angles.

Shapes: T packed tokens, C hidden, V vocabulary, R rotated dims.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.block.block import Block, Mix, RopeTable
from slipstream.model.block.gate import Turning
from slipstream.model.block.latent_attention import attend_paged
from slipstream.model.fused.layer_changes import modules_of, numbers_of
from slipstream.model.weights.packed import weight_of
from slipstream.ops import Ops
from slipstream.ops.kv_cache import CachePart, write_cache
from slipstream.ops.linear import Weight, times
from slipstream.ops.rope import both_tables, half_tables
from slipstream.ops.step import Step
from slipstream.spec import FrameSpec, Role, Rope
from slipstream.weights.load import Vector

__all__ = ["Frame", "run_stack"]


_FIXED_ROPES = frozenset({"default", "linear", "yarn", "llama3"})
"""Rope types whose angles depend on the position alone."""


class Frame:
    """The parts of a causal language model outside its layers, computed with the model's own tensors.

    Nothing is copied: the tensors (or packed planes) are looked up in the live model at each use, so that
    moved or newly tied weights take effect immediately.
    """

    def __init__(self, model: nn.Module, spec: FrameSpec, ops: Ops, *, rope_table: str | None = None) -> None:
        """Resolve the names.

        Args:
            model: The causal language model.
            spec: Names and options.
            ops: Bound implementations for norms and for the head's format.
            rope_table: Path of a `[sin | cos]` table within a layer, where the model has no rotary module.

        Raises:
            AttributeError: A name is not in the model.
        """
        self.spec, self.ops = spec, ops
        self._parts: dict[str, nn.Module] = {}

        def part(name: str | None) -> Any:
            return None if name is None else self._parts.setdefault(name, model.get_submodule(name))

        self.embed, self.head, self.rotary = part(spec.embed), part(spec.head), part(spec.rotary)
        for name in (spec.embed, spec.head):
            if not isinstance(getattr(held := self._parts[name], "weight", None), Tensor):
                raise AttributeError(f"{name} ({type(held).__name__}) does not hold a single matrix")
        self.embed_norm, self.final_norm = part(spec.embed_norm), part(spec.final_norm)
        self.pos_embed = None if spec.pos_embed is None else _table_of(model, spec.pos_embed)
        self._logit_bias = None if spec.logit_bias is None else _table_of(model, spec.logit_bias)
        self.project_in, self.project_out = part(spec.project_in), part(spec.project_out)
        self.layers: nn.ModuleList = part(spec.layers)
        self._rope_table = rope_table
        around = {"", *(path[:i] for path in self._parts for i in range(len(path)) if path[i] == ".")}
        self._forwards = {name: _own_forward(model, name) for name in (*self._parts, *sorted(around))}
        self._by_type = (
            self.rotary is not None and "layer_type" in inspect.signature(self.rotary.forward).parameters
        )
        self._has_scale = self._own_scale == self._scale
        # Some rotary modules keep a running maximum of the length as an attribute.
        excluded = {*self.layers, *(() if self.rotary is None else self.rotary.modules())}
        self._numbers = numbers_of(part for part in modules_of(model, self.layers) if part not in excluded)

    def replaced(self, model: nn.Module) -> str | None:
        """Return the name of a part that was replaced in the model or given another forward, or None.

        The forwards of all modules that contain parts are checked too, up to the model itself, named "".
        """
        other = (name for name, part in self._parts.items() if _at(model, name) is not part)
        patched = (name for name, own in self._forwards.items() if _own_forward(model, name) is not own)
        return next(itertools.chain(other, patched), None)

    @property
    def keeps_numbers(self) -> bool:
        """Whether the numeric attributes of the parts, and of the modules around them, are unchanged."""
        return self._numbers.hold()

    @property
    def keeps_scale(self) -> bool:
        """Whether an embedding module that scales its rows itself still has the original scale."""
        return not self._has_scale or self._own_scale == self._scale

    @property
    def _scale(self) -> float:
        """The multiplier of the embedding, rounded as the module's own is for comparison."""
        return (
            self.embed_factor if self.spec.embed_scale_rounded else _rounded(self.embed_factor, torch.float32)
        )

    @property
    def _own_scale(self) -> float | None:
        """The multiplier that the embedding module itself has; None where it has none, or no value yet."""
        own = getattr(self.embed, "embed_scale", None)
        if own is None or (isinstance(own, Tensor) and own.is_meta):
            return None
        return _rounded(float(own), self._embed_dtype if self.spec.embed_scale_rounded else torch.float32)

    @property
    def _embed_dtype(self) -> torch.dtype:
        embed = weight_of(self.embed)
        return embed.dtype or embed.planes[0].dtype

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the position embedding covers; None where there is no such embedding."""
        table = self.pos_table
        return None if table is None else int(table.shape[0]) - self.spec.pos_offset

    @property
    def most_angles(self) -> int | None:
        """Number of positions that the layers' own table of angles covers; None where there is none."""
        return None if self._rope_table is None else int(self._layer_table().shape[0])

    @property
    def angles_share_a_length(self) -> bool:
        """Whether a token's angles depend on the longest sequence of the batch (dynamic and long rope)."""
        kinds = getattr(self.rotary, "rope_type", None)
        return not _FIXED_ROPES.issuperset(
            kinds.values() if isinstance(kinds, dict) else {kinds or "default"}
        )

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embed packed tokens.

        Args:
            token_ids: `(T,)` int64.
            positions: `(T,)` int64, from 0 within each sequence.

        Returns:
            `(T, C)`, the input of the first layer.
        """
        spec = self.spec
        x = weight_of(self.embed).rows(token_ids)
        if spec.embed_scale != 1.0:
            x = x * self.embed_factor
        if self.project_in is not None:
            x = self._linear(self.project_in, x)
        if spec.pos_after_norm and self.embed_norm is not None:
            return self._at_places(self._norm(self.embed_norm, x), token_ids, positions)
        x = self._at_places(x, token_ids, positions)
        return x if self.embed_norm is None else self._norm(self.embed_norm, x)

    def _at_places(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Add the position embedding, if there is one."""
        table, padding = self.pos_table, self.spec.pos_padding
        if table is None:
            return x
        rows = positions + self.spec.pos_offset
        if padding is not None:
            rows = rows.masked_fill(token_ids == padding, padding)
        return x + table[rows].to(x.dtype)

    @property
    def embed_factor(self) -> float:
        """The multiplier of the token embedding, rounded as the original rounds it."""
        scale = self.spec.embed_scale
        if not self.spec.embed_scale_rounded:
            return scale
        return _rounded(scale, self._embed_dtype)

    @property
    def pos_table(self) -> Tensor | None:
        """The model's current position embedding, `(rows, C)`, or None."""
        return _tensor_at(self.pos_embed)

    @property
    def logit_bias(self) -> Tensor | None:
        """The model's current bias of the logits, `(1, V)`, or None."""
        return _tensor_at(self._logit_bias)

    def matrices(self) -> dict[str, Weight]:
        """Return the current matrices by their names in `FrameSpec`; `embed` has a row per id."""
        parts = {name: getattr(self, name) for name in ("embed", "project_in", "project_out", "head")}
        return {name: weight_of(part) for name, part in parts.items() if part is not None}

    def norms(self) -> dict[str, Vector]:
        """Return the current norms by their names in `FrameSpec`."""
        parts = {name: getattr(self, name) for name in ("embed_norm", "final_norm")}
        return {name: _vector_of(part) for name, part in parts.items() if part is not None}

    def leave(self, x: Tensor) -> Tensor:
        """Return the logits `(R, V)` of rows `(R, C)` from the last layer."""
        spec = self.spec
        if self.final_norm is not None:
            x = self._norm(self.final_norm, x)
        if self.project_out is not None:
            x = self._linear(self.project_out, x)
        logits = self._linear(self.head, x)
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        return times(self.ops.linear.run, x, weight_of(module))

    def _norm(self, module: Any, x: Tensor) -> Tensor:
        vector = _vector_of(module)
        return self.ops.norm.run(x, vector.weight, vector.bias, spec=self.spec.norm)  # type: ignore[no-any-return]

    def angles(self, positions: Tensor, ropes: Sequence[Rope | None]) -> dict[Rope, RopeTable]:
        """Get the angles of these positions from the model's own rotary module (or table).

        Args:
            positions: `(T,)` int64.
            ropes: The layers' ropes; each distinct one is evaluated once.

        Returns:
            Tables `(T, R / 2)` by rope.
        """
        tables: dict[Rope, RopeTable] = {}
        for rope in ropes:
            if rope is None or rope in tables:
                continue
            if rope.source == "buffer":
                sin, cos = self._layer_table()[positions].chunk(2, dim=-1)
            else:
                extra = {"layer_type": rope.layer_type} if self._by_type else {}
                probe = torch.empty(1, dtype=torch.float32, device=positions.device)
                cos, sin = both_tables(self._turned(probe, positions, extra))
                cos, sin = half_tables(cos[0], sin[0], rope)
            tables[rope] = (cos, sin)
        return tables

    def _turned(self, probe: Tensor, positions: Tensor, extra: Mapping[str, Any]) -> Any:
        try:
            return self.rotary(probe, positions[None], **extra)
        except IndexError:  # some modules read positions in time, height and width, which are equal for text
            return self.rotary(probe, positions.expand(3, 1, -1), **extra)

    def angle_tables(self) -> list[Tensor]:
        """Return the tensors that the angles are computed from."""
        tensors = [] if self.rotary is None else [*self.rotary.buffers(), *self.rotary.parameters()]
        return tensors if self._rope_table is None else [*tensors, self._layer_table()]

    def angle_numbers(self) -> tuple[tuple[str, Any], ...]:
        """Return the plain attributes of the rotary module, on which its angles may depend."""
        plain = () if self.rotary is None else vars(self.rotary).items()
        return tuple((name, value) for name, value in plain if isinstance(value, int | float | str))

    def _layer_table(self) -> Tensor:
        if self._rope_table is None:
            raise AssertionError("the family has no rope_table")
        return self.layers[0].get_buffer(self._rope_table)


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype, device="cpu").item())


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path, or None if there is none now."""
    at: nn.Module | None = model
    for name in path.split(".") if path else ():
        at = None if at is None else at._modules.get(name)
    return at


def _own_forward(model: nn.Module, path: str) -> Any:
    """Return the `forward` set on an object itself, as accelerate does, or None."""
    return vars(model.get_submodule(path)).get("forward")


def _vector_of(module: Any) -> Vector:
    return Vector(getattr(module, "weight", None), getattr(module, "bias", None))


def _table_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return owner and attribute of a table, a module's weights or a buffer, as the model may replace it."""
    parent, _, leaf = path.rpartition(".")
    owner = model.get_submodule(parent)
    if leaf in owner._buffers:
        return owner, leaf
    module = owner.get_submodule(leaf)
    return module, "weights" if hasattr(module, "weights") else "weight"


def _tensor_at(place: tuple[nn.Module, str] | None) -> Tensor | None:
    """Return the current tensor at an owner's attribute; None for None."""
    return None if place is None else getattr(*place)


def run_stack(
    blocks: Sequence[Block],
    x: Tensor,
    step: Step,
    caches: Sequence[tuple[CachePart, CachePart]],
    tables: dict[Rope, RopeTable],
) -> Tensor:
    """Run every layer over packed tokens and the paged cache.

    This is the definition of the largest op: everything it needs is in its arguments, so that one native
    call, or a captured graph, can replace it.

    Args:
        blocks: The layers in order.
        x: `(T, C)`.
        step: Lengths, slots and block table.
        caches: `(k, v)` of each layer, with latent attention `(latents, keys)`, with a recurrence its states
            twice; updated in place.
        tables: From `Frame.angles`.

    Returns:
        `(T, C)`, the output of the last layer.
    """
    for block, pair in zip(blocks, caches, strict=True):

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            angles: RopeTable | None,
            block: Block = block,
            caches: tuple[CachePart, CachePart] = pair,
        ) -> Tensor:
            ops, spec = block.ops, block.spec
            if (latent := spec.latent) is not None:
                write_cache(k, v, *caches, step.slots)
                up = block.weights.matrices[Role.KV_UP].dense().to(q.dtype)
                return attend_paged(q, caches, step, up, latent=latent, scale=spec.scale)
            pairs = spec.rope is not None and spec.rope.interleaved
            q = ops.rope_cache.run(q, k, v, *caches, step.slots, tables=angles, interleaved=pairs)
            return ops.paged_attention.run(q, *caches, step, mask=block.mask)  # type: ignore[no-any-return]

        mix = None if block.spec.recurrence is None else _recurrent(block, step, pair[0])
        table = None if block.spec.rope is None else tables[block.spec.rope]
        x = block(x, table, Turning(attend), mix=mix, positions=step.positions)
    return x


def _recurrent(block: Block, step: Step, states: CachePart) -> Mix:
    """Return what replaces the attention of a block with a recurrence, on `(T, C)`."""
    part = block.part
    if part is None or not isinstance(states, Tensor):
        raise AssertionError("a block with a recurrence runs without its mixer or its states")
    return lambda x: part(x, step, states, block.ops.linear.run)

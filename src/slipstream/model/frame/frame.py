"""The parts around the layers of a causal language model: embedding, final norm, head, rotary angles.

Shapes: T packed tokens, C hidden, V vocabulary, R rotated dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.block.block import RopeTable
from slipstream.model.block.streams import join_streams, split_streams
from slipstream.model.frame.embed_scale import EmbedScale
from slipstream.model.frame.rotary import Rotary
from slipstream.model.fused.layer_changes import modules_of, numbers_of
from slipstream.model.weights.packed import weight_of
from slipstream.ops import Ops
from slipstream.ops.activation import ACTIVATIONS
from slipstream.ops.linear import Weight, times
from slipstream.spec import FrameSpec, Rope
from slipstream.weights.load import Vector

__all__ = ["Frame"]


_MATRICES = ("embed", "project_in", "project_out", "head", "inputs_embed", "inputs_project")
_NORMS = ("embed_norm", "final_norm", "inputs_norm", "out_norm")


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
            AttributeError: A name is not in the model, or an activation is not known.
        """
        self.spec, self.ops = spec, ops
        self._parts: dict[str, nn.Module] = {}

        def part(name: str | None) -> Any:
            return None if name is None else self._parts.setdefault(name, model.get_submodule(name))

        self.embed, self.head = part(spec.embed), part(spec.head)
        for name in (spec.embed, spec.head):
            if not isinstance(getattr(held := self._parts[name], "weight", None), Tensor):
                raise AttributeError(f"{name} ({type(held).__name__}) does not hold a single matrix")
        self.embed_norm, self.final_norm = part(spec.embed_norm), part(spec.final_norm)
        self.pos_embed = None if spec.pos_embed is None else _table_of(model, spec.pos_embed)
        self._type_embed = None if spec.type_embed is None else _table_of(model, spec.type_embed)
        self._logit_bias = None if spec.logit_bias is None else _table_of(model, spec.logit_bias)
        self.project_in, self.project_out = part(spec.project_in), part(spec.project_out)
        self.out_norm = part(spec.out_norm)
        if spec.out_activation is not None and spec.out_activation not in ACTIVATIONS:
            raise AttributeError(f"the activation {spec.out_activation!r} before the head is not known")
        self.layers: nn.ModuleList = part(spec.layers)
        inputs = spec.inputs
        self.inputs_embed = None if inputs is None else part(inputs.embed)
        self.inputs_project = None if inputs is None else part(inputs.project)
        self.inputs_norm = None if inputs is None else part(inputs.norm)
        self._embedders = [part(path) for path in spec.embedders]
        streams = spec.streams
        self._splits = [] if streams is None else [part(path) for path in streams.enter]
        self._joins = [] if streams is None else [part(path) for path in streams.leave]
        by_type: dict[str | None, Any] = {kind: part(path) for kind, path in spec.rotaries}
        if spec.rotary is not None:
            by_type[None] = part(spec.rotary)
        self.rotary = Rotary(by_type, self.layers, rope_table)
        around = {"", *(path[:i] for path in self._parts for i in range(len(path)) if path[i] == ".")}
        self._forwards = {name: _own_forward(model, name) for name in (*self._parts, *sorted(around))}
        self._scale = EmbedScale(self.embed, spec.embed_scale, rounded=spec.embed_scale_rounded)
        self._inputs_scale = None if inputs is None else EmbedScale(self.inputs_embed, inputs.embed_scale)
        # Some rotary modules keep a running maximum of the length as an attribute.
        excluded = {*self.layers, *self.rotary.modules()}
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
        """Whether embedding modules that scale their rows themselves still have the original scale."""
        return self._scale.is_kept and (self._inputs_scale is None or self._inputs_scale.is_kept)

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the position embedding covers; None where there is no such embedding."""
        table = self.pos_table
        return None if table is None else int(table.shape[0]) - self.spec.pos_offset

    @property
    def most_angles(self) -> int | None:
        """Number of positions that the layers' own table of angles covers; None where there is none."""
        return self.rotary.most_positions

    @property
    def angles_share_a_length(self) -> bool:
        """Whether a token's angles depend on the longest sequence of the batch (dynamic and long rope)."""
        return self.rotary.shares_a_length

    def enter(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embed packed tokens.

        Args:
            token_ids: `(T,)` int64.
            positions: `(T,)` int64, from 0 within each sequence.

        Returns:
            `(T, C)`, the input of the first layer.
        """
        spec = self.spec
        x = weight_of(self.embed).rows(self._embedded_as(token_ids))
        if spec.embed_scale != 1.0:
            x = x * self.embed_factor
        for embedder in self._embedders:
            x = _embedded_by(embedder, token_ids, x)
        if self.project_in is not None:
            x = self._linear(self.project_in, x)
        if spec.pos_after_norm and self.embed_norm is not None:
            return self._at_places(self._norm(self.embed_norm, x), token_ids, positions)
        x = self._at_places(x, token_ids, positions)
        return x if self.embed_norm is None else self._norm(self.embed_norm, x)

    @property
    def embeds_below(self) -> int | None:
        """The first token that another module than `embed` embeds; None where there is none."""
        return min((embedder.vocab_offset for embedder in self._embedders), default=None)

    def _embedded_as(self, token_ids: Tensor) -> Tensor:
        """Replace placeholders by the token as which they are embedded."""
        spec = self.spec
        for placeholder in spec.placeholders:
            token_ids = token_ids.masked_fill(token_ids == placeholder, spec.stand_in)
        return token_ids

    def _at_places(self, x: Tensor, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Add the embeddings of the tokens' type and positions, where there are any."""
        table, padding, row = self.pos_table, self.spec.pos_padding, self.type_row
        if row is not None:
            x = x + row.to(x.dtype)
        if table is None:
            return x
        rows = positions + self.spec.pos_offset
        if padding is not None:
            rows = rows.masked_fill(token_ids == padding, padding)
        return x + table[rows].to(x.dtype)

    def layer_inputs(self, token_ids: Tensor, x: Tensor) -> Tensor | None:
        """Return the layers' own inputs, `(T, layers, P)`, or None where they have none.

        Args:
            token_ids: `(T,)` int64.
            x: `(T, C)`, from `enter`.
        """
        spec = self.spec.inputs
        if spec is None or self.inputs_embed is None:
            return None
        projected = self._linear(self.inputs_project, x) * spec.project_scale
        projected = self._norm(self.inputs_norm, projected.unflatten(-1, (-1, spec.width)))
        ids = self._embedded_as(token_ids)
        if spec.rows is not None:
            ids = ids.masked_fill(ids >= spec.rows, 0)
        rows = weight_of(self.inputs_embed).rows(ids) * self.inputs_factor
        both: Tensor = (projected + rows.view(projected.shape)) * spec.scale
        return both

    def split(self, x: Tensor) -> Tensor:
        """Return the streams `(T, S, C)` of embeddings `(T, C)`; these themselves if layers have one only."""
        return split_streams(x, [self._linear(one, x) for one in self._splits]) if self._splits else x

    def join(self, x: Tensor) -> Tensor:
        """Return rows `(R, C)` of the last layer's output: `(R, S, C)` if it has several streams."""
        if not self._joins:
            return x
        return join_streams(x[:, 0], [self._linear(m, x[:, i]) for i, m in enumerate(self._joins, 1)])

    @property
    def inputs_factor(self) -> float:
        """The multiplier of the second embedding, rounded as the original rounds it; 0 without one."""
        return 0.0 if self._inputs_scale is None else self._inputs_scale.factor

    @property
    def embed_factor(self) -> float:
        """The multiplier of the token embedding, rounded as the original rounds it."""
        return self._scale.factor

    @property
    def pos_table(self) -> Tensor | None:
        """The model's current position embedding, `(rows, C)`, or None."""
        return _tensor_at(self.pos_embed)

    @property
    def type_row(self) -> Tensor | None:
        """What is added to every token for its type, `(C,)`, or None."""
        table = _tensor_at(self._type_embed)
        return None if table is None else table[0]

    @property
    def logit_bias(self) -> Tensor | None:
        """The model's current bias of the logits, `(1, V)`, or None."""
        return _tensor_at(self._logit_bias)

    def matrices(self) -> dict[str, Weight]:
        """Return the current matrices by the names of the attributes; embeddings have a row per id.

        Those that make streams of an embedding, and one state of these, are "split.0", ..., "join.0", ...
        """
        parts = {name: getattr(self, name) for name in _MATRICES}
        for name, modules in (("split", self._splits), ("join", self._joins)):
            parts |= {f"{name}.{i}": module for i, module in enumerate(modules)}
        return {name: weight_of(part) for name, part in parts.items() if part is not None}

    def norms(self) -> dict[str, Vector]:
        """Return the current norms by the names of the attributes."""
        parts = {name: getattr(self, name) for name in _NORMS}
        return {name: _vector_of(part) for name, part in parts.items() if part is not None}

    def leave(self, x: Tensor) -> Tensor:
        """Return the logits `(R, V)` of rows from the last layer: `(R, C)`, or `(R, S, C)` of S streams."""
        spec, x = self.spec, self.join(x)
        if self.final_norm is not None:
            x = self._norm(self.final_norm, x)
        if self.project_out is not None:
            x = self._linear(self.project_out, x)
        if spec.out_activation is not None:
            x = ACTIVATIONS[spec.out_activation](x)
        if self.out_norm is not None:
            x = self._norm(self.out_norm, x)
        logits = self._linear(self.head, x)
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def _linear(self, module: Any, x: Tensor) -> Tensor:
        weight = weight_of(module)
        return times(self.ops.linear.run, x.to(weight.computes_in), weight)  # the layers' states may be wider

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
        return self.rotary.angles(positions, ropes)

    def angle_tables(self) -> list[Tensor]:
        """Return the tensors that the angles are computed from."""
        return self.rotary.tables()

    def angle_numbers(self) -> tuple[tuple[str, Any], ...]:
        """Return the plain attributes of the rotary modules, on which the angles may depend."""
        return self.rotary.numbers()


def _at(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path, or None if there is none now."""
    at: nn.Module | None = model
    for name in path.split(".") if path else ():
        at = None if at is None else at._modules.get(name)
    return at


def _own_forward(model: nn.Module, path: str) -> Any:
    """Return the `forward` set on an object itself, as accelerate does, or None."""
    return vars(model.get_submodule(path)).get("forward")


def _embedded_by(embedder: Any, token_ids: Tensor, x: Tensor) -> Tensor:
    """Replace the rows of `x`, `(T, C)`, of the tokens that an embedder has."""
    end = embedder.vocab_offset + embedder.vocab_size
    own = (token_ids >= embedder.vocab_offset) & (token_ids < end)
    rows: Tensor = embedder(input_ids=token_ids.masked_fill(~own, end - 1))
    return torch.where(own[:, None], rows.to(x.dtype), x)


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

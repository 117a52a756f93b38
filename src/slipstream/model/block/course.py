"""Runs a block whose family orders the layer's branches itself (`OwnCourse`).

Shapes: B batch, S rows, C hidden, H heads, K kv heads, D head dim, L keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from slipstream.families import OwnCourse
from slipstream.model.block.block import Block, RopeTable
from slipstream.model.block.layer_call import LayerCall
from slipstream.model.block.positions import rope_table
from slipstream.model.block.run import attention_of
from slipstream.model.block.streams import run_streams
from slipstream.ops.moe import Routed, chosen_by
from slipstream.spec import SECOND, BlockSpec, MoE, Norm, Role
from slipstream.weights.load import BlockWeights

__all__ = ["run_course"]

_LATENT_NORMS = (Role.Q_DOWN_NORM, Role.KV_DOWN_NORM)
_HEAD_NORMS = (Role.Q_NORM, Role.K_NORM)
_FIRST_FEED = {Role.MLP_IN: Role.SHARED_IN, Role.MLP_OUT: Role.SHARED_OUT}


@dataclass(frozen=True)
class _Branches:
    """`families.Branches` for a block and one call of its layer."""

    block: Block
    call: LayerCall
    index: int
    rope: RopeTable | None

    @property
    def spec(self) -> BlockSpec:
        return self.block.spec

    def norm(self, role: Role, x: Tensor) -> Tensor:
        return self.block.norm(role, x.flatten(0, -2), self._norm_of(role)).view(x.shape)

    def _norm_of(self, role: Role) -> Norm | None:
        spec = self.block.spec
        if spec.latent is not None and role in _LATENT_NORMS:
            return spec.latent.norm
        return spec.qk_norm.norm if spec.qk_norm is not None and role in _HEAD_NORMS else None

    def linear(self, role: Role, x: Tensor) -> Tensor:
        return self.block.linear(role, x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def attend(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        mask_of: Callable[[Tensor], Tensor] | None = None,
        shared_as: Any = None,
        beyond: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        used = self.call.mask if mask is None else mask
        call = replace(self.call, mask=used, mask_of=mask_of, shared_as=shared_as, beyond=beyond)
        attention = attention_of(self.block, call, self.index)
        return self.block.attention(x.flatten(0, 1), self.rope, attention).view(*x.shape[:-1], -1)

    def feed(self, x: Tensor) -> Tensor:
        return self.block.feed_forward(x.flatten(0, -2)).view(x.shape)

    def choose(self, x: Tensor) -> Routed:
        vector = self.block.weights.vectors.get(Role.ROUTER_BIAS)
        choice = None if vector is None else vector.weight
        return chosen_by(x, self.block.weights.matrices[Role.ROUTER], self._moe, choice)

    def mix(self, x: Tensor, chosen: Routed) -> Tensor:
        spec, moe, held = self.block.spec, self._moe, self.block.weights.matrices
        first, busy = held[Role.EXPERTS_IN], moe.experts
        # Kernels take the number of experts from the first matrix; the second has none for idle experts.
        first = replace(
            first, shape=(busy, *first.shape[1:]), planes=tuple(plane[:busy] for plane in first.planes)
        )
        options = {"spec": moe, "activation": spec.activation, "gated": spec.gated}
        mixed: Tensor = self.block.ops.moe.run(x, chosen, first, held[Role.EXPERTS_OUT], **options)
        return mixed

    @property
    def _moe(self) -> MoE:
        if self.block.spec.moe is None:
            raise AssertionError("a course chose among experts that the block has not")
        return self.block.spec.moe

    def halves(self) -> tuple[_Branches, _Branches]:
        first = {role: role for role in SECOND} | _FIRST_FEED
        return self._half(0, first), self._half(1, SECOND)

    def _half(self, which: int, roles: Mapping[Role, Role]) -> _Branches:
        own = self.block.weights
        matrices = {role: own.matrices[there] for role, there in roles.items() if there in own.matrices}
        vectors = {role: own.vectors[there] for role, there in roles.items() if there in own.vectors}
        half = Block(self.block.spec.half, BlockWeights(matrices, vectors), self.block.ops)
        return replace(self, block=half, index=2 * self.index + which)

    def streams(self, x: Tensor, inputs: Tensor, *, shared_as: Any = None) -> Tensor:
        attention = attention_of(self.block, replace(self.call, shared_as=shared_as), self.index)
        packed = x.permute(1, 2, 0, 3).flatten(0, 1)
        out = run_streams(self.block, packed, self.rope, attention, inputs.flatten(0, 1))
        return out.view(*x.shape[1:3], *out.shape[1:]).permute(2, 0, 1, 3).contiguous()

    def heed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        options = {"scale": self.block.spec.scale, "softcap": None, "sinks": None}
        attended: Tensor = self.block.ops.attention.run(q, k, v, mask=mask, causal=False, **options)
        return attended.flatten(2)


def run_course(
    block: Block,
    call: LayerCall,
    index: int,
    *,
    layer: nn.Module,
    course: OwnCourse,
    hidden: Tensor,
    given: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """Run a block in the order of its family's course, in place of its layer.

    Args:
        block: The fused layer.
        call: The arguments that the model passed.
        index: The layer's index in the cache.
        layer: The module with the parts that remain the layer's own.
        course: The family's course.
        hidden: `(B, S, C)`, or several such streams, stacked.
        given: The arguments of the call by name.

    Returns:
        Hidden states in the shape of `hidden`, then whatever else the layer returns.
    """
    rope = None if block.spec.rope is None else rope_table(block.spec.rope, call, None)
    heads = _Branches(block, call, index, rope)
    result = block.follow(lambda: course.run(heads, layer, hidden, given))
    return result if isinstance(result, tuple) else (result,)

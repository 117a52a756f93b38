"""Cuts a block's roles to one rank's part, and reassembles the whole tensors from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.parallel.collectives import broadcast
from slipstream.parallel.experts import refuse_apart
from slipstream.parallel.shard import Share
from slipstream.spec import Role
from slipstream.weights.load import BlockWeights, restore_block
from slipstream.weights.recipe import Piece, Plan, narrowed

__all__ = ["cut_plans", "rejoined"]

Like = Callable[[str], Tensor]
"""Returns, by name, a tensor of the shape and dtype of the layer's own; it may be on the meta device."""


def cut_plans(plans: Mapping[Role, Plan], share: Share, like: Like) -> dict[Role, Plan]:
    """Return the plans of a rank's part of a block; no tensor is read."""

    def dims(plan: Plan) -> int:
        return like(plan.weight[0].name).dim() if plan.weight else 1

    return {role: plan.cut(share.slice(role, plan.rows, dims(plan))) for role, plan in plans.items()}


def rejoined(
    weights: BlockWeights, plans: Mapping[Role, Plan], share: Share, like: Like
) -> dict[str, Tensor]:
    """Reassemble the layer's own tensors from all ranks' parts; a collective call of the replica's ranks.

    Args:
        weights: The rank's weights.
        plans: Plans of the whole block, from `plan_block`.
        share: The rank's share.
        like: Shapes and dtypes of the layer's own tensors.

    Returns:
        Whole tensors by name. A bias that only the first rank adds is returned there alone; on other ranks
        the layer has kept its own.

    Raises:
        RequestError: The ranks run independent calls.
    """
    refuse_apart(share)
    if weights.lease is not None:
        with weights.lease:
            tensors = rejoined(replace(weights, lease=None), plans, share, like)
            return {name: tensor.clone() for name, tensor in tensors.items()}
    axis = share.mesh.replica
    device = weights.device
    cuts = [cut_plans(plans, share.at(place), like) for place in range(axis.size)]
    own = cuts[axis.rank]
    whole = {role for role in plans if own[role].slice.is_whole}
    out = restore_block(
        BlockWeights(
            {role: w for role, w in weights.matrices.items() if role in whole},
            {role: v for role, v in weights.vectors.items() if role in whole},
        ),
        own,
    )
    for role in (role for role in plans if role not in whole):
        matrix, vector = weights.matrices.get(role), weights.vectors.get(role)
        dense = matrix.dense() if matrix is not None else None if vector is None else vector.weight
        bias = matrix.bias if matrix is not None else None if vector is None else vector.bias
        for name in plans[role].names:
            out[name] = torch.empty_like(like(name), device=device)
        for place, cut in enumerate(part[role] for part in cuts):
            mine = place == axis.rank
            for pieces, joined in ((cut.weight, dense), (cut.bias, bias)):
                if pieces:
                    targets = _targets(pieces, cut, out)
                    _fill(pieces, targets, broadcast(_buffer(targets, joined if mine else None), axis, place))
    return out


def _targets(pieces: Sequence[Piece], cut: Plan, out: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of the whole tensors at the places of a rank's pieces."""
    some = next(iter(out.values()))
    return [
        narrowed(piece.of(out[piece.name]), piece, cut.slice) if piece.name else some.new_empty(piece.count)
        for piece in pieces  # rows of zeros in a bias have no name
    ]


def _buffer(targets: Sequence[Tensor], joined: Tensor | None) -> Tensor:
    """The buffer to broadcast: the rank's own rows, or an empty one to receive another rank's."""
    if joined is None:
        count = sum(target.numel() for target in targets)
        return torch.empty(count, dtype=targets[0].dtype, device=targets[0].device)
    return joined.to(targets[0].dtype).reshape(-1).contiguous()


def _fill(pieces: Sequence[Piece], targets: Sequence[Tensor], flat: Tensor) -> None:
    axis = -1 if pieces[0].bias or targets[0].dim() == 1 else -2
    shape = list(targets[0].shape)
    counts = [target.shape[axis] for target in targets]
    shape[axis] = sum(counts)
    for target, rows in zip(targets, flat.view(shape).split(counts, dim=axis), strict=True):
        target.copy_(rows)

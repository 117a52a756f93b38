"""Matrices that a model stores transposed, as GPT-2's Conv1D does, are laid out by rows in memory.

A parameter stays the object it is, `(I, O)` with its values, and so does what a state dict says of it; its
strides alone change: input lies beside input, as in a linear. Kernels that read a matrix at the memory's rate
read it faster so, and torch's own products take either. Whoever holds the parameter, an optimizer or a module
that is tied to it, sees the new memory; whoever holds other tensors in the old keeps that as it was.

Shapes: I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from slipstream.spec import Role
from slipstream.weights.heap import give_back
from slipstream.weights.load import lies_transposed, may_be_packed
from slipstream.weights.mapped import MappedFiles
from slipstream.weights.recipe import Plan

__all__ = ["lay_by_rows"]


def lay_by_rows(
    layer: nn.Module,
    plans: Mapping[Role, Plan],
    mapped: MappedFiles,
    *,
    is_packed: bool,
    plain_roles: frozenset[Role],
) -> None:
    """Lay out the transposed matrices of a layer that stay dense, in place, one at a time.

    Args:
        layer: Has its values.
        plans: How its tensors make up a block's.
        mapped: Files of which what was laid out is dropped.
        is_packed: Roles that may be quantized are going to be, from either layout.
        plain_roles: Others that stay dense.
    """
    laid = False
    for role, plan in plans.items():
        if not role.is_matrix or not plan.is_whole or (is_packed and may_be_packed(role, plain_roles)):
            continue  # rows that are put in another order are copied anyway
        for piece in plan.weight:
            path, _, leaf = piece.name.rpartition(".")
            parameter = layer.get_submodule(path)._parameters.get(leaf)
            if parameter is not None and lies_transposed(piece, parameter) and _is_alone(parameter):
                stored = parameter.data
                parameter.data = stored.mT.contiguous().mT
                mapped.drop(mapped.holding([stored]))
                del stored  # or the last of a layer is let go of after the rest was given back
                laid = True
    if laid:  # or holes of what was let go of stay between what was laid out: 200 MB of 450
        give_back()


def _is_alone(tensor: Tensor) -> bool:
    """Whether nothing else lies in a tensor's storage, which would stay in memory for its sake."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes

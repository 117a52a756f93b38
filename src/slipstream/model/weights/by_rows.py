"""Lays out matrices that a model stores transposed, as GPT-2's Conv1D does, by output rows in memory.

A parameter stays the same object, `(I, O)` with the same values, and so does its entry in a state dict; only
its strides change: the inputs of one output are adjacent, as in a linear. Kernels that are bound by memory
bandwidth read this layout faster, and torch's own products accept either. References to the parameter, such
as an optimizer's or a tied module's, see the new memory; other tensors in the old memory keep it unchanged.

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
    """Lay out a layer's transposed matrices that stay dense, in place, one at a time.

    Args:
        layer: A layer that has its values.
        plans: The plans of the layer's block.
        mapped: Mapped files, whose pages of converted matrices are dropped.
        is_packed: Whether quantizable roles will be packed, which works from either layout.
        plain_roles: Further roles that stay dense.
    """
    laid = False
    for role, plan in plans.items():
        if not role.is_matrix or not plan.is_whole or (is_packed and may_be_packed(role, plain_roles)):
            continue  # rows that are reordered are copied anyway
        for piece in plan.weight:
            path, _, leaf = piece.name.rpartition(".")
            parameter = layer.get_submodule(path)._parameters.get(leaf)
            if parameter is not None and lies_transposed(piece, parameter) and _is_alone(parameter):
                stored = parameter.data
                parameter.data = stored.mT.contiguous().mT
                mapped.drop(mapped.holding([stored]))
                del stored  # otherwise the layer's last matrix would be freed only after `give_back`
                laid = True
    if laid:  # otherwise holes remain in the heap between the new matrices: 200 MB of 450
        give_back()


def _is_alone(tensor: Tensor) -> bool:
    """Whether a tensor fills its storage: other tensors in it would keep the old memory alive."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes

"""Constants inside a block: describes them to the native library, and explains why it cannot apply them."""

from __future__ import annotations

from slipstream.kernels.cpu import abi
from slipstream.kernels.requirements import BlockLike
from slipstream.spec import Multipliers, Role

__all__ = ["multipliers_of", "refuse_multipliers"]


def refuse_multipliers(block: BlockLike) -> str | None:
    """Return why the library cannot multiply inside a block by its constants, or None if it can.

    The library multiplies the inputs of the first matrices. So a gate's factor has to come out of the other
    half again, and the factor of attention out of the mixer's inputs.
    """
    spec = block.spec
    if (by := spec.multipliers) is None:
        return None
    if spec.place == "post" or spec.parallel or spec.residual_from == "norm" or spec.moe is not None:
        return "multipliers of experts, or of post-norm or parallel layers, are not supported"
    if by.attention_in == 0.0 or by.gate == 0.0:
        return f"{by!r} is not supported"
    if by.gate != 1.0 and block.weights.matrices[Role.MLP_IN].bias is not None:
        return "a multiplier of a gate with a bias is not supported"
    return None


def multipliers_of(by: Multipliers, *, gated: bool) -> abi.Multipliers:
    """Describe constants that `refuse_multipliers` accepts."""
    return abi.Multipliers(
        attention_in=by.attention_in,
        keys=by.keys,
        attention_out=by.attention_out,
        mixer_out=by.mixer_out,
        feed_in=by.gate,
        feed_out=by.feed_out / by.gate if gated else by.feed_out,
    )

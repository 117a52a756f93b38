"""`moe` on the GPU: pairs of token and expert sorted by expert, two products over all pairs, a weighted sum.

Nothing is read back to the host: the number of tiles is bounded by the shapes, and tiles beyond the last do
nothing.

Source: Gale et al. 2022 (arXiv 2211.15841), section 4, for products over sorted pairs.

Shapes: T packed tokens, C hidden, E experts, F feed-forward width of one expert, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.triton.decode import kind_of
from slipstream.kernels.triton.matmul import Pairs, tile_rows, times_matrix
from slipstream.kernels.triton.operands import Around, Matrix
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.target import refuse
from slipstream.ops.activation import KINDS
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight
from slipstream.ops.moe import Routed, chosen_by, moe
from slipstream.spec import MoE

__all__ = ["KERNELS"]


def sort_pairs(chosen: Tensor, experts: int) -> Pairs:
    """Sort pairs of token and expert by expert, and lay them out in tiles of one expert each.

    Args:
        chosen: `(T, k)` int64; pairs with an expert below 0, or not below E, are in no tile.
        experts: E.
    """
    flat = torch.where((chosen >= 0) & (chosen < experts), chosen, experts).flatten()
    pairs, device = flat.shape[0], flat.device
    height = tile_rows(-(-pairs // experts))
    tiles = min(pairs, experts + 1) + pairs // height
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    tiles_of = (counts + height - 1) // height
    ends = tiles_of.cumsum(0)
    order = flat.argsort(stable=True)
    expert = flat[order]
    within = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[expert]
    row_of = torch.full((tiles * height,), -1, dtype=torch.int32, device=device)
    row_of[(ends - tiles_of)[expert] * height + within] = order.to(torch.int32)
    expert_of = torch.searchsorted(ends, torch.arange(tiles, device=device), right=True)
    expert_of = torch.where(expert_of < experts, expert_of, -1)
    return Pairs(row_of, expert_of.to(torch.int32), flat.clamp(max=experts - 1).to(torch.int32), height)


def _launch(
    x: Tensor,
    planes: list[Tensor],
    bias: Tensor | None,
    numbers: list[int],
    row_of: Tensor,
    expert_of: Tensor,
    expert_of_pair: Tensor,
) -> Tensor:
    kind, blocks, outputs, each, height, activation, gated = numbers
    matrix, pairs = (
        Matrix(planes, bias, kind, blocks, outputs),
        Pairs(row_of, expert_of, expert_of_pair, height),
    )
    around = Around(activation=activation, gated=bool(gated))
    return times_matrix(x.contiguous(), matrix, around, pairs=pairs, each=each)


_pair_linear = operator(
    "pair_linear(Tensor x, Tensor[] planes, Tensor? bias, int[] numbers, Tensor row_of, Tensor expert_of, "
    "Tensor expert_of_pair) -> Tensor",
    _launch,
    lambda x, planes, bias, numbers, row_of, expert_of, expert_of_pair: x.new_empty(
        expert_of_pair.shape[0], numbers[2] // (2 if numbers[6] else 1)
    ),
)


def _over_pairs(x: Tensor, weight: Weight, each: int, pairs: Pairs, activation: int, gated: bool) -> Tensor:
    kind, blocks = kind_of(weight.format) or (0, 1)
    numbers = [kind, blocks, weight.shape[1], each, pairs.height, activation, int(gated)]
    sorted_pairs = (pairs.row_of, pairs.expert_of, pairs.expert_of_pair)
    return _pair_linear(x, list(weight.planes), weight.bias, numbers, *sorted_pairs)  # type: ignore[no-any-return]


def _reads(weight: Weight) -> bool:
    plain = weight.format != "plain" or len(weight.planes) == 1
    return kind_of(weight.format) is not None and plain and all(p.is_contiguous() for p in weight.planes)


def _run(
    x: Tensor,
    router: Weight | Routed,
    experts_in: Weight,
    experts_out: Weight,
    *,
    spec: MoE,
    activation: str,
    gated: bool,
    choice: Tensor | None = None,
) -> Tensor:
    weights, chosen = chosen_by(x, router, spec, choice)
    reads = _reads(experts_in) and _reads(experts_out) and activation in KINDS
    if not (reads and x.shape[0]) or spec.weighs_input:
        return moe(
            x, (weights, chosen), experts_in, experts_out, spec=spec, activation=activation, gated=gated
        )
    pairs = sort_pairs(chosen, experts_in.shape[0])
    y = _over_pairs(x, experts_in, chosen.shape[1], pairs, KINDS[activation], gated)
    y = _over_pairs(y, experts_out, 1, pairs, -1, False)
    weighted = y.view(*chosen.shape, -1).float() * weights[..., None]
    if isinstance(router, tuple):  # rows of pairs that are in no tile have not been written
        weighted = torch.where((chosen >= 0)[..., None], weighted, 0.0)
    return weighted.sum(1).to(x.dtype)


def _refuse(facts: Facts) -> str | None:
    if kind_of(facts.format) is None:
        return f"does not read the weight format {facts.format!r}"
    return refuse(facts, dtypes=(torch.float32, torch.bfloat16, torch.float16))


KERNELS = (Kernel("moe", "triton", "cuda", _refuse, _run),)

"""The mixture of experts: the choice of experts for each token, and the weighted sum of their outputs.

Shapes: T packed tokens, C hidden, E experts, F feed-forward width of one expert, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.activation import activate
from slipstream.ops.bind import Case, Op
from slipstream.ops.linear import Weight
from slipstream.spec import MoE

__all__ = ["OP", "Routed", "chosen_by", "mix", "moe", "route", "router_logits"]

Routed = tuple[Tensor, Tensor]
"""A routing decision: weights `(T, k)` float32 and experts `(T, k)` int64."""


def router_logits(x: Tensor, router: Weight, spec: MoE) -> Tensor:
    """Return the router's logits `(T, E)`, in float32 if `spec.exact`, else in the dtype of `x`."""
    if spec.exact:
        return F.linear(
            x.float(), router.dense().float(), None if router.bias is None else router.bias.float()
        )
    return F.linear(x, router.dense().to(x.dtype), router.bias)


def route(logits: Tensor, spec: MoE, choice: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), eqs. 12-16, for the sigmoid, the groups and `choice`.

    Args:
        logits: `(T, E)`.
        spec: Scoring, `top_k` and normalisation.
        choice: `(E,)`, a bias that is added to the scores only to choose the experts.

    Returns:
        Weights `(T, k)` float32 and experts `(T, k)` int64, best first.
    """
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, spec.jitter)
    logits = logits.float()
    if spec.scoring == "topk_softmax":
        best, experts = logits.topk(spec.top_k, dim=-1)
        return best.softmax(-1), experts
    if spec.scoring == "topk_sigmoid":
        experts = (logits if choice is None else logits + choice).topk(spec.top_k, dim=-1).indices
        return _weighted(logits.gather(-1, experts).sigmoid(), spec), experts
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
    ranking = scores if choice is None else scores + choice
    experts = _among_the_best_groups(ranking, spec).topk(spec.top_k, dim=-1).indices
    return _weighted(scores.gather(-1, experts), spec), experts


def _weighted(scores: Tensor, spec: MoE) -> Tensor:
    """Turn the scores of the chosen experts, `(T, k)`, into weights."""
    if spec.normalize:
        scores = scores / (scores.sum(-1, keepdim=True) + spec.more_sum).clamp(min=spec.least_sum)
    return scores * spec.factor


def _among_the_best_groups(scores: Tensor, spec: MoE) -> Tensor:
    """Return the scores with those outside the best groups set to minus infinity."""
    if spec.top_groups >= spec.groups:
        return scores
    grouped = scores.unflatten(-1, (spec.groups, -1))
    group_scores = grouped.topk(2, dim=-1).values.sum(-1) if spec.group_score == "top2" else grouped.amax(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(
        -1, group_scores.topk(spec.top_groups).indices, True
    )
    masked: Tensor = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return masked


def _sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Choose two experts, each weighted by a softmax over the logits close to the best remaining one.

    Computed in the dtype of the logits, like the original: closeness is decided by a threshold, and different
    rounding would move some experts across it.

    Source: Liu et al. 2023 (arXiv 2310.00811), as PhiMoE uses it at inference (without noise).
    """
    weights, experts, remaining = [], [], logits
    for _ in range(2):
        best, expert = remaining.max(dim=-1, keepdim=True)
        distance = (best - logits) / logits.abs().clamp(min=best)
        close = remaining.masked_fill(distance > 2 * jitter, -torch.inf).softmax(-1)
        weights.append(close.gather(-1, expert))
        experts.append(expert)
        remaining = remaining.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, dim=-1).float(), torch.cat(experts, dim=-1)


def chosen_by(x: Tensor, router: Weight | Routed, spec: MoE, choice: Tensor | None) -> Routed:
    """Return the router's choice for `x`, or the given choice if it was made before."""
    return router if isinstance(router, tuple) else route(router_logits(x, router, spec), spec, choice)


def moe(
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
    """Return `sum_e weight_e * out_e(activation(in_e(x)))` over the chosen experts of each token.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), eq. 1.

    Args:
        x: `(T, C)`.
        router: `(E, C)`; or the choice, if it was made before. The given experts may then be a subset of all,
            numbered from 0, and -1 stands for an expert on another rank, which adds nothing.
        experts_in: `(E, 2F, C)`, rows `[gate | up]`, or `(E, F, C)` if not gated.
        experts_out: `(E, C, F)`.
        spec: Scoring, `top_k` and normalisation.
        activation: A name that `activate` accepts.
        gated: Whether the experts' first matrix holds gate and up halves.
        choice: `(E,)`, a bias that is added to the experts' scores only to choose the experts.

    Returns:
        `(T, C)` in the dtype of `x`.
    """
    routed = chosen_by(x, router, spec, choice)

    def feed(rows: Tensor, first: Weight, last: Weight) -> Tensor:
        return _linear(activate(_linear(rows, first), name=activation, gated=gated), last)

    return mix(x, routed, experts_in, experts_out, spec=spec, feed=feed)


def mix(
    x: Tensor,
    routed: Routed,
    experts_in: Weight,
    experts_out: Weight,
    *,
    spec: MoE,
    feed: Callable[[Tensor, Weight, Weight], Tensor],
) -> Tensor:
    """Run each expert on its tokens and sum the weighted outputs in float32: `moe` after the choice.

    Args:
        x: `(T, C)`.
        routed: The choice.
        experts_in: As in `moe`.
        experts_out: As in `moe`.
        spec: Determines whether the weights are applied to the experts' inputs or outputs.
        feed: Computes the output of one expert for rows `(n, C)`, given its two matrices.

    Returns:
        `(T, C)` in the dtype of `x`.
    """
    weights, chosen = routed
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in (e for e in chosen.unique().tolist() if e >= 0):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        weight = weights[tokens, place, None]
        rows = x[tokens] * weight.to(x.dtype) if spec.weighs_input else x[tokens]
        y = feed(rows, experts_in.at(expert), experts_out.at(expert)).float()
        out.index_add_(0, tokens, y if spec.weighs_input else y * weight)
    return out.to(x.dtype)


def _linear(x: Tensor, weight: Weight) -> Tensor:
    return F.linear(x, weight.dense(), weight.bias)


def _case(
    name: str,
    tokens: int,
    spec: MoE,
    *,
    activation: str = "silu",
    bias: bool = False,
    choice: bool = False,
    routed: bool = False,
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        hidden, width = 32, 24

        def weight(*shape: int) -> Weight:
            matrix = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            b = torch.randn(*shape[:-1], generator=generator).to(dtype) if bias else None
            return Weight("plain", shape, (matrix.to(dtype),), lambda planes: planes[0], b)

        def chosen() -> Routed:
            scores = torch.rand(tokens, spec.experts + 1, generator=generator)
            weights, experts = scores.topk(spec.top_k)
            return weights, experts - 1  # each expert at most once per token, and -1 for some

        return {
            "x": torch.randn(tokens, hidden, generator=generator).to(dtype),
            "router": chosen() if routed else weight(spec.experts, hidden),
            "experts_in": weight(spec.experts, 2 * width, hidden),
            "experts_out": weight(spec.experts, hidden, width),
            "spec": spec,
            "activation": activation,
            "gated": True,
            "choice": torch.randn(spec.experts, generator=generator) if choice else None,
        }

    return Case(name, make)


OP = Op(
    "moe",
    moe,
    (
        _case("softmax then best two, normalised", 7, MoE(4, 2, normalize=True)),
        _case("softmax then best, not normalised", 1, MoE(5, 1)),
        _case(
            "best two then softmax, biases", 6, MoE(4, 2, "topk_softmax"), activation="swiglu_oai", bias=True
        ),
        _case("sparsemixer", 9, MoE(4, 2, "sparsemixer", jitter=0.01)),
        _case("every expert", 3, MoE(3, 3, normalize=True)),
        _case(
            "sigmoid, biased choice",
            7,
            MoE(5, 2, "sigmoid", normalize=True, factor=2.5, exact=True),
            choice=True,
        ),
        _case(
            "the best two of four groups",
            9,
            MoE(8, 3, "sigmoid", groups=4, top_groups=2, group_score="top2"),
            choice=True,
        ),
        _case("chosen before, some elsewhere", 7, MoE(3, 2), bias=True, routed=True),
        _case("chosen before, one expert", 5, MoE(1, 1), routed=True),
        _case(
            "best two by biased logits, sigmoid", 6, MoE(5, 2, "topk_sigmoid", normalize=True), choice=True
        ),
        _case("many tokens of each", 300, MoE(4, 2), bias=True, routed=True),
        _case("many tokens of some", 300, MoE(5, 1), activation="swiglu_oai", routed=True),
        _case("weights on what enters", 5, MoE(4, 2, "topk_sigmoid", weighs_input=True)),
        _case("weights on what enters, many tokens", 80, MoE(4, 2, "topk_sigmoid", weighs_input=True)),
        _case("a sum with something more", 4, MoE(5, 2, "sigmoid", normalize=True, more_sum=0.5)),
        _case(
            "one of three groups, softmax", 5, MoE(6, 2, groups=3, factor=0.5, least_sum=0.25, normalize=True)
        ),
    ),
)

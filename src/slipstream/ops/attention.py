"""Attention over a padded batch with transformers' mask, used by the compatible road (`engine(...)`).

Shapes: B batch, S queries, L keys, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.bind import Case, Op

__all__ = ["OP", "attention", "scores_to_output"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `softmax(softcap(q k^T scale) + mask) v`, with queries sharing kv heads in groups of `H / K`.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), eq. 1; Ainslie et al. 2023 (arXiv 2305.13245) for groups.

    Args:
        q: `(B, H, S, D)`.
        k: `(B, K, L, D)`.
        v: `(B, K, L, D)`.
        mask: `(B | 1, H | 1, S | 1, L)`; bool (true: visible) or floating (added to the scores), or None.
        causal: Without a mask, query `i` sees keys up to `i + L - S`. Ignored if there is a mask.
        scale: Multiplies the scores.
        softcap: Bounds the scores before the mask is added.
        sinks: `(H,)`, a logit per head that takes part in the softmax and carries no value.

    Returns:
        `(B, S, H, D)`, contiguous, in the dtype of `q`. Rows of queries that see no key are finite but
        otherwise undefined.
    """
    queries, keys = q.shape[2], k.shape[2]
    if mask is None and causal and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)[None, None]
    if softcap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).contiguous()
    return scores_to_output(q, k, v, mask=mask, scale=scale, softcap=softcap, sinks=sinks)


def scores_to_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with explicit float32 scores: the definition, for which `attention` has fast paths.

    Arguments and result as in `attention`; if the mask is None, every key is visible.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, dim=1).float()
    values = v.repeat_interleave(group, dim=1).float()
    scores = q.float() @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        else:
            scores = (scores + mask.float()).clamp(min=lowest)
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).transpose(1, 2).contiguous().to(q.dtype)


def _case(
    name: str, heads: int, kv_heads: int, queries: int, keys: int, *, extra: dict[str, Any] | None = None
) -> Case:
    options = extra or {}

    def make(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        batch, dim = 2, options.get("dim", 24)
        q = torch.randn(batch, heads, queries, dim, generator=generator).to(dtype)
        q = q * options.get("times", 1)
        k, v = (torch.randn(batch, kv_heads, keys, dim, generator=generator).to(dtype) for _ in range(2))
        mask = None
        if "hidden" in options:
            # The last keys of one sequence are hidden from all queries.
            mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
            mask[0, ..., keys - options["hidden"] :] = False
            mask = mask.expand(-1, -1, queries, -1) if options.get("expanded") else mask
        if "padding" in options:
            visible = (
                torch.ones(queries, keys, dtype=torch.bool)
                .tril(keys - queries)
                .expand(batch, 1, -1, -1)
                .clone()
            )
            visible[0, :, :, : options["padding"]] = False
            mask = visible
            if options.get("additive"):
                mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        if "bias" in options:
            mask = torch.randn(1, heads, queries, keys, generator=generator).to(dtype)
        if options.get("strided"):
            # The layout of a projection's output: the heads of a token are contiguous.
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        sinks = torch.randn(heads, generator=generator).to(dtype) if options.get("sinks") else None
        return {
            "q": q,
            "k": k,
            "v": v,
            "mask": mask,
            "causal": options.get("causal", True),
            "scale": options.get("scale", dim**-0.5),
            "softcap": options.get("softcap"),
            "sinks": sinks,
        }

    return Case(name, make)


OP = Op(
    "attention",
    attention,
    (
        _case("prefill", 4, 4, 9, 9),
        _case("prefill, grouped", 6, 2, 17, 17),
        _case("one query", 4, 2, 1, 31),
        _case("a few queries on a cache", 4, 1, 3, 20),
        _case("bidirectional", 4, 4, 9, 9, extra={"causal": False}),
        _case("padded", 4, 2, 8, 12, extra={"padding": 3}),
        _case("padded, additive mask", 4, 2, 8, 12, extra={"padding": 3, "additive": True}),
        _case("soft cap", 4, 2, 7, 12, extra={"softcap": 5.0, "padding": 2}),
        _case("sinks", 4, 2, 7, 7, extra={"sinks": True, "padding": 1}),
        _case("encoder", 12, 12, 130, 130, extra={"causal": False, "dim": 32, "strided": True}),
        _case("encoder, padded", 3, 3, 70, 70, extra={"causal": False, "dim": 33, "hidden": 50}),
        _case(
            "encoder, expanded mask",
            4,
            2,
            33,
            65,
            extra={"causal": False, "hidden": 1, "expanded": True},
        ),
        _case("a bias per head", 4, 2, 20, 70, extra={"causal": False, "bias": True, "strided": True}),
        # Scores of 1e11 and more, of which the highest takes all: float32 cannot tell those beside it.
        _case("huge scores", 4, 2, 20, 70, extra={"times": 2**12, "scale": 2.0**24}),
        _case("huge scores, biased", 4, 2, 20, 70, extra={"times": 2**12, "scale": 2.0**24, "padding": 3}),
        _case("long prefill", 6, 2, 200, 257, extra={"dim": 80}),
    ),
)

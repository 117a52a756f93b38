"""Every op's reference agrees, on its own cases and in every dtype, with a definition written another way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops import OPS
from slipstream.ops.bind import Case, Op
from slipstream.ops.kv_cache import Int8Cache
from slipstream.ops.linear import Weight

CASES = [(op, case) for op in OPS.values() for case in op.cases]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""A few roundings of the dtype's epsilon (6e-8, 5e-4, 4e-3) on values of about one, summed over 577 terms."""


def _name(pair: tuple[Op, Case]) -> str:
    return f"{pair[0].name}: {pair[1].name}"


def _arguments(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    return case.make(torch.Generator().manual_seed(5), dtype)


def _double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, Int8Cache):
        return value.codes.double() * value.scales.double().unsqueeze(-1)
    return value.apply(lambda t: t.double()) if isinstance(value, Weight) else value


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("pair", CASES, ids=_name)
def test_reference_agrees_with_its_definition(pair: tuple[Op, Case], dtype: torch.dtype) -> None:
    op, case = pair
    arguments = _arguments(case, dtype)
    exact = {name: _double(value) for name, value in _arguments(case, dtype).items()}
    got = op.reference(**arguments)
    expected = DEFINITIONS[op.name](**exact)
    for name in op.writes:
        written = _double(arguments[name])
        # Of int8 codes half a step of a row's largest is the bound.
        most = 1 / 250 if isinstance(arguments[name], Int8Cache) else TOLERANCE[dtype]
        assert float((written - exact[name]).abs().max() / exact[name].abs().max()) <= most
    assert got.shape == expected.shape
    if got.is_floating_point():
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert float(error) <= TOLERANCE[dtype]
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("pair", CASES, ids=_name)
def test_reference_leaves_its_arguments_alone(pair: tuple[Op, Case]) -> None:
    op, case = pair
    arguments, untouched = _arguments(case, torch.float32), _arguments(case, torch.float32)
    op.reference(**arguments)
    for name, value in untouched.items():
        if isinstance(value, Tensor) and name not in op.writes:
            assert torch.equal(torch.nan_to_num(arguments[name].float()), torch.nan_to_num(value.float())), (
                name
            )


def test_every_op_has_a_definition_to_be_compared_with() -> None:
    assert set(DEFINITIONS) == set(OPS)


def _feed_forward(x: Tensor, first: Weight, last: Weight, *, gate_last: bool = False, **how: Any) -> Tensor:
    inner = _linear(x, first)
    half = inner.shape[-1] // 2
    ordered = torch.cat([inner[:, half:], inner[:, :half]], dim=-1) if gate_last else inner
    return _linear(_activation(ordered, **how), last)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, spec: Any) -> Tensor:
    width = (x.shape[-1],)
    scale = None if weight is None else weight + spec.offset
    if spec.kind == "layer":
        return F.layer_norm(x, width, scale, bias, spec.eps)
    return F.rms_norm(x, width, scale, spec.eps)


def _activation(x: Tensor, *, name: str, gated: bool) -> Tensor:
    from transformers.activations import ACT2FN

    if not gated:
        return ACT2FN[name](x)
    gate, up = x.tensor_split(2, dim=-1)
    if name == "swiglu_oai":
        gate, up = gate.clip(max=7.0), up.clip(-7.0, 7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return ACT2FN[name](gate) * up


def _linear(x: Tensor, weight: Weight) -> Tensor:
    if weight.rounding is not None:
        x = torch.stack([_rounded(row, symmetric=weight.rounding.symmetric) for row in x])
    out = torch.einsum("ti,oi->to", x, weight.dense())
    return out if weight.bias is None else out + weight.bias


def _rounded(row: Tensor, *, symmetric: bool) -> Tensor:
    """A row of codes of 8 bits times their step; codes are decided in float32, or they would be others."""
    x = row.float().numpy()
    low, high = (-abs(x).max(), abs(x).max()) if symmetric else (min(x.min(), 0), max(x.max(), 0))
    steps, span = (np.float32(127), high) if symmetric else (np.float32(255), np.float32(high - low))
    if span < 2.0**-100:
        return torch.zeros_like(row)
    zero = np.float32(0) if symmetric else np.rint(-low * (steps / span))
    codes = np.rint(x * (steps / span)) + zero
    codes = codes if symmetric else codes.clip(0, 255)
    return torch.from_numpy(codes - zero).double() * float(span / steps)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    out, half = x.clone(), cos.shape[-1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[:, None, i], sin[:, None, i]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


def _rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    tables: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    if tables is not None:
        q, k = (_rope(t, *(table.double() for table in tables), interleaved=interleaved) for t in (q, k))
    for token, slot in enumerate(slots.tolist()):
        place = divmod(slot, k_cache.shape[1])
        k_cache[place], v_cache[place] = k[token], v[token]
    return q


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: Any,
    sinks: Any,
) -> Tensor:
    batch, heads, queries, _ = q.shape
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            head = h * k.shape[1] // heads
            for i in range(queries):
                row = (k[b, head] @ q[b, h, i]) * scale
                row = row if softcap is None else softcap * torch.tanh(row / softcap)
                seen = _visible_row(mask, b, h, i, row, causal, queries)
                out[b, h, i] = _mix(row + seen, v[b, head], None if sinks is None else sinks[h])
    return out.transpose(1, 2)


def _visible_row(
    mask: Tensor | None, b: int, h: int, i: int, row: Tensor, causal: bool, queries: int
) -> Tensor:
    keys = torch.arange(len(row))
    if mask is None:
        allowed = keys <= i + len(row) - queries if causal else keys >= 0
        return torch.zeros_like(row).masked_fill(~allowed, -1e300)
    part = mask[b if mask.shape[0] > 1 else 0, min(h, mask.shape[1] - 1), min(i, mask.shape[2] - 1)]
    return part.double().log().clamp(min=-1e300) if mask.dtype == torch.bool else part.clamp(min=-1e300)


def _mix(row: Tensor, values: Tensor, sink: Tensor | None) -> Tensor:
    top = row.max() if sink is None else torch.maximum(row.max(), sink)
    weights = torch.exp(row - top)
    total = weights.sum() + (0 if sink is None else torch.exp(sink - top))
    return (weights / total) @ values


def _paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, step: Any, *, mask: Any) -> Tensor:
    size, out, token = k_cache.shape[1], torch.zeros_like(q), 0
    starts = step.query_starts.tolist()
    for n, length in enumerate(step.kv_lens.tolist()):
        places = [(int(step.block_table[n, p // size]), p % size) for p in range(length)]
        k, v = (torch.stack([cache[place] for place in places]) for cache in (k_cache, v_cache))
        for token in range(starts[n], starts[n + 1]):
            position = length - (starts[n + 1] - token)
            for h in range(q.shape[1]):
                head = h * k.shape[1] // q.shape[1]
                first = 0 if mask.window is None else max(0, position - mask.window + 1)
                first = first if mask.chunk is None else mask.chunk * (position // mask.chunk)
                row = (k[first : position + 1, head] @ q[token, h]) * mask.scale
                row = row if mask.softcap is None else mask.softcap * torch.tanh(row / mask.softcap)
                if mask.alibi is not None:
                    row = row + mask.alibi[h] * (torch.arange(first, position + 1) - position)
                sink = None if mask.sinks is None else mask.sinks[h].double()
                out[token, h] = _mix(row, v[first : position + 1, head], sink)
    return out


def _moe(
    x: Tensor,
    router: Weight | tuple[Tensor, Tensor],
    experts_in: Weight,
    experts_out: Weight,
    *,
    spec: Any,
    activation: str,
    gated: bool,
    choice: Tensor | None,
) -> Tensor:
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        if isinstance(router, Weight):
            logits = _linear(row[None], router)[0]
            grouped = choice is not None or spec.groups > 1 or "sigmoid" in spec.scoring
            chosen = _choose_grouped(logits, spec, choice) if grouped else _choose(logits, spec)
        else:
            pairs = zip(router[1][t].tolist(), router[0][t].tolist(), strict=True)
            chosen = [(expert, weight) for expert, weight in pairs if expert >= 0]
        for expert, weight in chosen:
            entry, share = (row * weight, 1.0) if spec.weighs_input else (row, weight)
            first = Weight(
                "plain", (), (experts_in.dense()[expert],), lambda p: p[0], _bias(experts_in, expert)
            )
            second = Weight(
                "plain", (), (experts_out.dense()[expert],), lambda p: p[0], _bias(experts_out, expert)
            )
            out[t] += (
                share
                * _linear(_activation(_linear(entry[None], first), name=activation, gated=gated), second)[0]
            )
    return out


def _choose_grouped(logits: Tensor, spec: Any, choice: Tensor | None) -> list[tuple[int, Tensor]]:
    """The best experts of the best groups, one by one."""
    scores = 1 / (1 + (-logits).exp()) if "sigmoid" in spec.scoring else logits.exp() / logits.exp().sum()
    entries = logits if spec.scoring == "topk_sigmoid" else scores
    by = [float(s) + (0.0 if choice is None else float(choice[e])) for e, s in enumerate(entries)]
    size = len(by) // spec.groups
    members = [sorted(by[g * size : (g + 1) * size], reverse=True) for g in range(spec.groups)]
    worth = [sum(m[:2]) if spec.group_score == "top2" else m[0] for m in members]
    best = sorted(range(spec.groups), key=lambda g: -worth[g])[: spec.top_groups]
    order = sorted((e for e in range(len(by)) if e // size in best), key=lambda e: -by[e])[: spec.top_k]
    total = sum(float(scores[e]) for e in order) + spec.more_sum if spec.normalize else 1.0
    return [(e, scores[e] / max(total, spec.least_sum) * spec.factor) for e in order]


def _bias(weight: Weight, expert: int) -> Tensor | None:
    return None if weight.bias is None else weight.bias[expert]


def _choose(logits: Tensor, spec: Any) -> list[tuple[int, Tensor]]:
    order = logits.argsort(descending=True).tolist()
    if spec.scoring == "sparsemixer":
        return _sparsemixer(logits, order, spec.jitter)
    best = order[: spec.top_k]
    if spec.scoring == "topk_softmax":
        return list(zip(best, logits[best].softmax(0), strict=True))
    weights = logits.softmax(0)[best]
    return list(zip(best, weights / weights.sum() if spec.normalize else weights, strict=True))


def _sparsemixer(logits: Tensor, order: list[int], jitter: float) -> list[tuple[int, Tensor]]:
    chosen: list[tuple[int, Tensor]] = []
    for rank in range(2):
        best = logits[order[rank]]
        rivals = [
            e for e in order[rank:] if (best - logits[e]) / torch.maximum(logits[e].abs(), best) <= 2 * jitter
        ]
        chosen.append((order[rank], logits[rivals].softmax(0)[0]))
    return chosen


def _sample(scores: Tensor, *, greedy: bool) -> Tensor:
    assert greedy, "the cases are greedy: a draw has no definition to be compared with"
    return torch.tensor([row.index(max(row)) for row in scores.tolist()])


def _draw(scores: Tensor, noise: Tensor, numbers: Tensor) -> Tensor:
    """Row by row, token by token, from the best one down."""
    temperature, most, rest, floor = numbers.tolist()
    chosen = []
    for row, chance in zip((scores / temperature).softmax(-1), noise, strict=True):
        order = sorted((i for i in range(len(row)) if row[i] > 0), key=lambda i: -float(row[i]))[: int(most)]
        whole, left, above = float(row[order].sum()), [], 0.0
        for i in order:
            if rest < 0 or not left or above < (1 - rest) * whole:
                left.append(i)
            above += float(row[i])
        left = [i for i in left if row[i] >= floor * row[order[0]]]
        chosen.append(max(left, key=lambda i: float(row[i] / chance[i])))
    return torch.tensor(chosen)


DEFINITIONS = {
    "draw": _draw,
    "activation": _activation,
    "attention": _attention,
    "feed_forward": _feed_forward,
    "linear": _linear,
    "moe": _moe,
    "norm": _norm,
    "paged_attention": _paged_attention,
    "rope": _rope,
    "rope_cache": _rope_cache,
    "sample": _sample,
}

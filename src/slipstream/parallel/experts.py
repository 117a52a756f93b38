"""Expert parallelism: each rank runs its own experts on the tokens routed to them, and results are summed.

Ranks that run the same call have the same tokens: each runs its experts on its tokens, and one sum over the
ranks gives the result. Ranks that run independent calls send tokens to the ranks of their experts and receive
sums. This takes an exchange per layer with experts, in which all ranks take part each time, although one call
may have fewer steps than another: a rank whose call is over keeps serving until all calls are (`Meeting`).

Source: Rajbhandari et al. 2022 (arXiv 2201.05596), section 5, for experts spread beside split layers.

Shapes: T packed tokens, C hidden, k experts per token, D ranks that meet, N rows that a rank received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import DeviceError, RequestError
from slipstream.ops.moe import Routed
from slipstream.parallel.collectives import all_sum, exchange, together
from slipstream.parallel.mesh import Axis
from slipstream.parallel.shard import Share, spread

__all__ = ["Compute", "Host", "apart", "refuse_apart", "spread_experts"]

Compute = Callable[[Tensor, Routed], Tensor]
"""Runs a rank's own experts on rows `(N, C)`, given local expert numbers (-1 for none); returns `(N, C)`."""

_OVER = -1


@dataclass(frozen=True)
class Host:
    """What a `Meeting` needs to know of a layer whose experts are spread.

    Attributes:
        share: The rank's part of the layer.
        compute: Runs the rank's experts.
        width: C.
        dtype: Dtype of the rows that are exchanged.
        device: Device on which they are computed.
    """

    share: Share
    compute: Compute
    width: int
    dtype: torch.dtype
    device: torch.device


class Meeting:
    """Exchanges tokens between the ranks of an axis, each of which runs an independent call.

    Each exchange begins with a line from every rank: the layer that it is at, or that its call is over, and
    the number of rows that it has for each rank.
    """

    def __init__(self, axis: Axis, hosts: Sequence[tuple[object, Host]]) -> None:
        """Prepare the exchanges.

        Args:
            axis: The ranks.
            hosts: The layers with experts, in the model's order, each with the key that identifies it.
        """
        self._axis = axis
        self._hosts = [host for _, host in hosts]
        self._places = {id(key): place for place, (key, _) in enumerate(hosts)}
        self._lost = False

    def deal(self, key: object, x: Tensor, routed: Routed) -> Tensor:
        """Run one layer's experts on this rank's tokens and on those that other ranks send.

        Args:
            key: Identifies the layer.
            x: `(T, C)`.
            routed: Weights and numbers of the chosen experts, among all experts.

        Returns:
            `(T, C)`: the weighted sum of the outputs of this axis' experts for `x`.
        """
        place, (weights, chosen) = self._places[id(key)], routed
        host = self._hosts[place]
        owners = _owners(host.share, x.device)[chosen]
        index = [(owners == rank).any(-1).nonzero()[:, 0] for rank in range(self._axis.size)]
        order = torch.cat(index)
        rows = _packed(x[order].to(host.dtype), weights[order], chosen[order])
        lines = self._announce(place, [len(one) for one in index], x.device)
        self._refuse_another_layer(lines, place)
        received = self._swap(lines, place, rows, chosen.shape[1])
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add_(0, order, received.float()).to(x.dtype)

    def serve(self) -> None:
        """Take part in exchanges, without tokens of its own, until the calls of all ranks are over."""
        while not self._lost:
            device = self._hosts[0].device
            lines = self._announce(_OVER, [0] * self._axis.size, device)
            place = max(line[0] for line in lines)
            if place == _OVER:
                return
            self._refuse_another_layer(lines, place)
            host = self._hosts[place]
            width = host.share.whole.moe.top_k if host.share.whole.moe else 0
            empty = torch.empty(0, _bytes_of(host, width), dtype=torch.uint8, device=host.device)
            self._swap(lines, place, empty, width)

    def _announce(self, place: int, counts: list[int], device: torch.device) -> list[list[int]]:
        mine = torch.tensor([place, *counts], dtype=torch.int64, device=device)
        lines = [torch.empty_like(mine) for _ in range(self._axis.size)]
        try:
            with together(self._axis, "exchanged tokens in a layer with experts"):
                dist.all_gather(lines, mine, group=self._axis.group)
        except BaseException:  # even an interrupt: nothing tells how far the exchange came
            self._lost = True
            raise
        result: list[list[int]] = torch.stack(lines).tolist()
        return result

    def _refuse_another_layer(self, lines: list[list[int]], place: int) -> None:
        places = {self._axis.ranks[rank]: line[0] for rank, line in enumerate(lines)}
        if any(other not in (place, _OVER) for other in places.values()):
            self._lost = True
            raise DeviceError(
                f"ranks that run separate calls are in different layers with experts ({places}): each call "
                "must run all layers in order; run one call on all ranks, or do not run layers on their own"
            )

    def _swap(self, lines: list[list[int]], place: int, rows: Tensor, top_k: int) -> Tensor:
        """Send rows to their experts, compute the received rows, and return the sent rows' results."""
        host, axis = self._hosts[place], self._axis
        send, receive = lines[axis.rank][1:], [line[1 + axis.rank] for line in lines]
        try:
            received = exchange(rows, axis, send, receive)
            x, weights, chosen = _unpacked(received, host, top_k)
            own = host.share.experts
            mine = (chosen >= own.start) & (chosen < own.stop)
            local = torch.where(mine, chosen - own.start, _OVER)
            results = host.compute(x, (weights, local)) if len(x) else x
            return exchange(results, axis, receive, send)
        except BaseException:
            self._lost = True
            raise


def _owners(share: Share, device: torch.device) -> Tensor:
    """Place in the axis of the rank that holds each expert, `(E,)`; -1 for experts outside of the axis."""
    mesh = share.mesh
    runs = spread(share.whole.moe.experts if share.whole.moe else 0, mesh.expert_places)
    own = mesh.expert_place % mesh.inner
    ranks = [place // mesh.inner if place % mesh.inner == own else _OVER for place in range(len(runs))]
    flat = [rank for rank, run in zip(ranks, runs, strict=True) for _ in run]
    return torch.tensor(flat, dtype=torch.int64, device=device)


def _bytes_of(host: Host, top_k: int) -> int:
    return host.width * host.dtype.itemsize + top_k * 8


def _packed(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Pack rows, weights and expert numbers as bytes, so that one exchange carries all of them."""
    parts = (x.contiguous(), weights.float().contiguous(), chosen.to(torch.int32).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def _unpacked(rows: Tensor, host: Host, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    widths = (host.width * host.dtype.itemsize, top_k * 4, top_k * 4)
    x, weights, chosen = (part.contiguous() for part in rows.split(widths, dim=-1))
    if not len(rows):
        return rows.new_empty(0, host.width, dtype=host.dtype), rows.new_empty(0), rows.new_empty(0)
    return x.view(host.dtype), weights.view(torch.float32), chosen.view(torch.int32).long()


_meeting: ContextVar[Meeting | None] = ContextVar("slipstream_meeting", default=None)


@contextmanager
def apart(axis: Axis, hosts: Sequence[tuple[object, Host]]) -> Iterator[None]:
    """Context in which this rank runs an independent call; on exit it serves until all ranks' calls are over.

    A call that fails or is interrupted does not break the others: its error is raised once they are over.
    """
    meeting = Meeting(axis, hosts)
    token = _meeting.set(meeting)
    try:
        yield
    except BaseException:  # even an interrupt: otherwise the other ranks would wait until they time out
        meeting.serve()
        raise
    else:
        meeting.serve()
    finally:
        _meeting.reset(token)


def refuse_apart(share: Share) -> None:
    """Refuse to gather whole experts while ranks run independent calls.

    Raises:
        RequestError: The ranks run independent calls (see `apart`).
    """
    if share.mesh.ep.size > 1 and _meeting.get() is not None:
        raise RequestError(
            "this call needs a layer's original code (attention maps, router logits, or an argument that its "
            f"block does not read), but its experts are on the ranks {list(share.mesh.replica.ranks)}, which "
            "run separate calls; make this call on all of them"
        )


def spread_experts(key: object, share: Share, compute: Compute, x: Tensor, routed: Routed) -> Tensor:
    """Run the experts of all ranks of the expert-parallel axis on some tokens.

    Args:
        key: Identifies the layer in a `Meeting`.
        share: The rank's part of the layer.
        compute: Runs the rank's experts.
        x: `(T, C)`.
        routed: Weights and numbers of the chosen experts, among all experts.

    Returns:
        `(T, C)`; where layers are split, a partial result that the ranks of `tp` still have to sum.
    """
    weights, chosen = routed
    mesh, own, meeting = share.mesh, share.experts, _meeting.get()
    if mesh.ep.size == 1 or meeting is None:
        mine = (chosen >= own.start) & (chosen < own.stop)
        local = torch.where(mine, chosen - own.start, _OVER)
        return all_sum(compute(x, (weights, local)), mesh.ep)
    return meeting.deal(key, x, routed)

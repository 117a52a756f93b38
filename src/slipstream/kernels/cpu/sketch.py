"""A sketch of a vocabulary projection in fewer bits, with a bound on the error of each token's score.

The Cauchy-Schwarz inequality bounds the error of a score by a product of two lengths, which alone would spare
few tokens. But the rows that enter a model's projection lie mostly along few directions: the sketch's error
along these is stored beside each token's sketch, so that the bound covers only the rest of a row. The rest is
measured with a weight per channel, which reflects how much rows vary there and how large the errors are.

A row x is `(U x) @ U + r` for directions U `(K, C)`, and the weights w of a token are `s + e`: its sketch s
and the error e. Beside s an approximation `m` of `U e` is stored. Then

    x . w = x . s + (U x) . m + error,    error = r . e + (U x) . (U e - m)
    |error| <= |(r * weights, along * U x)| * |(e / weights, (U e - m) / along)|

of which the last factor is known beforehand: the token's entry in `errors`. The bound holds for any
directions and weights; these only decide how many tokens are spared.

Source: Cauchy's and Schwarz's inequality; Teflioudi, Gemulla and Mykytiuk 2015 (SIGMOD, LEMP), section 4, for
such bounds in a search for the largest of many inner products.

Shapes: V vocabulary, C width, K directions, R recorded rows, n tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from slipstream.devices.huge_pages import in_huge_pages
from slipstream.kernels.cpu import abi, abi_model
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.library import Library, rest_torch
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.kernels.cpu.memory import digest
from slipstream.kernels.cpu.pack import FormatLike
from slipstream.ops.linear import Weight

__all__ = ["Basis", "Making", "Screen", "SketchFormat", "Sketched", "learn", "share_of", "source_of"]

_TOGETHER, _SAMPLED = 16, 128
"""Tokens that the library computes together (a run), and the number of runs that sample the vocabulary."""

_CHUNK = 1 << 21
"""Weights that are sketched per native call."""

_FLOOR = 0.05
"""Lower limit of a channel's spread, relative to the overall one: few rows say little about each channel."""


class SketchFormat(FormatLike, Protocol):
    """The part of `formats.Format` that is used here; this package does not import that one."""

    @property
    def group(self) -> int: ...  # noqa: D102
    @property
    def unpack(self) -> Unpack: ...  # noqa: D102


class Unpack(Protocol):
    """Makes a dense matrix of planes, a shape and a dtype."""

    def __call__(  # noqa: D102
        self, planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype, /
    ) -> Tensor: ...


@dataclass(frozen=True)
class Basis:
    """Directions, and weights by which the lengths of rows are measured.

    Attributes:
        directions: U `(K, C)`, orthonormal, float32.
        weights: One per channel, `(C,)` float32, positive.
        stretch: Unit in which `m` is stored, so that its values are about as large as the projection's.
        along: Weight of a row's components along the directions.
    """

    directions: Tensor
    weights: Tensor
    stretch: float = 1.0
    along: float = 1.0

    def extended(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows `(R, C)` extended for the product with a sketch, `(R, C + K)`, and lengths `(R,)`."""
        along = rows @ self.directions.T
        rest = (rows - along @ self.directions) * self.weights
        length = (rest.square().sum(1) + (along * self.along).square().sum(1)).sqrt()
        return torch.cat([rows, along * self.stretch], dim=1), length


class Sketched:
    """A sketch `(V, C + K)` with its bounds, filled in by `make` some tokens at a time.

    Attributes:
        planes: The packed planes; the last K columns of the sketch hold `m`.
        errors: The second factor of the bound, `(V,)` float32; infinite where a row holds NaN or infinity.
        longest: The largest sum of the lengths of a token's row in the projection and in the sketch.
    """

    def __init__(self, head: Weight, basis: Basis, sketch: SketchFormat, library: Library) -> None:
        """Allocate the planes and errors; no token is sketched yet.

        Args:
            head: The projection; its width is a multiple of the sketch's group.
            basis: Directions and weights of the rows that it is multiplied by.
            sketch: The format, int4 with a minimum.
            library: For one instruction set.
        """
        self.shape = (head.shape[0], head.shape[1] + len(basis.directions))
        self.planes = tuple(torch.empty(s, dtype=d, device="cpu") for s, d in sketch.layout(self.shape))
        in_huge_pages(self.planes, new=True)
        self.errors = torch.empty(self.shape[0], dtype=torch.float32, device="cpu")
        self.longest = 0.0
        plain = replace(head, bias=None)
        self.matrix = _matrix(
            Weight(sketch.name, self.shape, self.planes, sketch.unpack, dtype=head.computes_in)
        )
        self._head, self._basis, self._library, self._unpack = _matrix(plain), basis, library, sketch.unpack
        self._kept = plain

    def make(self, first: int, count: int) -> None:
        """Sketch `count` tokens from `first` on."""
        lengths = torch.empty(count, dtype=torch.float32, device="cpu")
        basis = self._basis
        call = abi_model.SketchCall(
            head=self._head,
            sketch=self.matrix,
            directions=address(basis.directions),
            weights=address(basis.weights),
            errors=address(self.errors),
            lengths=address(lengths),
            first=first,
            count=count,
            stretch=basis.stretch,
            along=basis.along,
        )
        rest_torch()
        self._library.run("sketch", call)
        self.longest = max(self.longest, float(lengths.max()))

    def values(self) -> Tensor:
        """Return the unpacked sketch, `(V, C + K)` float32."""
        return self._unpack(self.planes, self.shape, torch.float32)


def _matrix(weight: Weight) -> abi.Matrix:
    matrix = matrix_of(weight)
    if isinstance(matrix, str):
        raise AssertionError(matrix)
    return matrix


def _sketched(rows: Tensor, basis: Basis, sketch: SketchFormat, library: Library) -> Sketched:
    head = Weight("plain", tuple(rows.shape), (rows,), sketch.unpack)
    made = Sketched(head, basis, sketch, library)
    made.make(0, len(rows))
    return made


def learn(head: Weight, rows: Tensor, sketch: SketchFormat, library: Library) -> Basis | None:
    """Choose directions and weights, or return None if the rows or the projection are not finite.

    Args:
        head: The projection.
        rows: Recorded inputs of the projection, `(R, C)` float32; R is at least twice the sketch's group.
        sketch: The format; there are as many directions as inputs in its group.
        library: For one instruction set.
    """
    sample = _sample(head)
    if not (torch.isfinite(rows).all() and torch.isfinite(sample).all()):
        return None
    # The other half of the rows, which the directions were not learned from, shows what they leave over.
    directions = torch.linalg.svd(rows[::2], full_matrices=False)[2][: sketch.group].contiguous()
    basis = Basis(directions, torch.ones_like(rows[0]))
    along = rows[1::2] @ directions.T
    rest = rows[1::2] - along @ directions
    error = sample - _sketched(sample, basis, sketch, library).values()[:, : rows.shape[1]]
    lacking = error @ directions.T
    stretch = float(_spread(lacking, None) / _spread(sample, None))
    weights = (_spread(error, 0) / _spread(rest, 0)).sqrt()
    basis = Basis(directions, weights, stretch)
    stored = _sketched(sample, basis, sketch, library).values()[:, rows.shape[1] :]
    of_rows = _spread(rest * weights, None) / _spread(along, None)
    of_tokens = _spread(lacking - stored * stretch, None) / _spread(error / weights, None)
    # This weight minimises the product of both factors on these rows and tokens.
    return Basis(directions, weights, stretch, float((of_rows * of_tokens).sqrt()))


def _spread(x: Tensor, dim: int | None) -> Tensor:
    """Return the root mean square over a dimension, or over all elements; never 0."""
    whole = x.square().mean().sqrt()
    part = whole if dim is None else x.square().mean(dim).sqrt()
    return torch.maximum(part, _FLOOR * whole + 1e-20)


def share_of(
    head: Weight, basis: Basis, rows: Tensor, tokens: Tensor, sketch: SketchFormat, library: Library
) -> float:
    """Return the share of the vocabulary whose exact scores would have to be computed for some rows.

    Args:
        head: The projection.
        basis: Returned by `learn`.
        rows: `(R, C)` float32.
        tokens: `(R,)` int64, the best token of each row.
        sketch: As in `learn`.
        library: For one instruction set.
    """
    sketched = _sketched(_sample(head), basis, sketch, library)
    extended, length = basis.extended(rows)
    upper = extended @ sketched.values().T + length[:, None] * sketched.errors
    best = torch.stack([_rows(head, token, token + 1)[0] for token in tokens.tolist()])
    score = (rows * best).sum(1)
    if head.bias is not None:
        upper += torch.cat([head.bias[start : start + _TOGETHER] for start in _starts(head)]).float()
        score = score + head.bias[tokens].float()
    computed = (upper >= score[:, None]).unflatten(1, (-1, _TOGETHER)).any(-1)
    return float(computed.float().mean())


def _starts(head: Weight) -> range:
    runs = head.shape[0] // _TOGETHER
    return range(0, runs * _TOGETHER, max(1, runs // _SAMPLED) * _TOGETHER)


def _sample(head: Weight) -> Tensor:
    """Return runs of rows spread over the vocabulary, `(n, C)`."""
    return torch.cat([_rows(head, start, start + _TOGETHER) for start in _starts(head)])


def _rows(head: Weight, start: int, stop: int) -> Tensor:
    """Return rows of a projection in float32, `(n, C)`, with the values that the kernels multiply by."""
    if head.dtype is not None:
        planes = tuple(plane[start:stop] for plane in head.planes)
        return head.unpack(planes, (stop - start, head.shape[1]), torch.float32)
    parts, first = [], 0
    for plane in head.planes:
        parts.append(plane[max(start - first, 0) : max(stop - first, 0)])
        first += len(plane)
    return torch.cat(parts).float().contiguous()


def source_of(head: Weight) -> tuple[int, ...] | None:
    """Return a fingerprint (digests and addresses) of a projection's memory; None if there is no digest."""
    tensors = head.planes if head.bias is None else (*head.planes, head.bias)
    digests = [digest(t) for t in tensors]
    known = [d for d in digests if d is not None]
    return (*known, *(t.data_ptr() for t in tensors)) if len(known) == len(digests) else None


@dataclass(frozen=True)
class Screen:
    """A sketch with its bounds, made of one state of a projection.

    Attributes:
        struct: The description for the library.
        source: The projection's fingerprint in that state, from `source_of`.
        nbytes: Bytes of the screen that a step reads.
        tensors: Owners of the memory that the struct points to.
    """

    struct: abi_model.Screen
    source: tuple[int, ...]
    nbytes: int
    tensors: tuple[object, ...]


class Making:
    """A screen that is made piece by piece, in the pauses between calls."""

    def __init__(self, head: Weight, basis: Basis, sketch: SketchFormat, library: Library) -> None:
        """Prepare the sketch; no token is sketched yet.

        Args:
            head: The projection.
            basis: Returned by `learn`.
            sketch: The format.
            library: For one instruction set.
        """
        self._head, self._basis, self._done = head, basis, 0
        self._source = source_of(head)
        self._sketched = Sketched(head, basis, sketch, library)

    def goes_on(self, seconds: float) -> bool:
        """Sketch tokens for about `seconds` seconds; return whether some are left."""
        end, (tokens, width) = time.perf_counter() + seconds, self._sketched.shape
        while self._done < tokens and time.perf_counter() < end:
            count = min(max(1, _CHUNK // width), tokens - self._done)
            self._sketched.make(self._done, count)
            self._done += count
        return self._done < tokens

    def screen(self) -> Screen | None:
        """Return the finished screen; None if the projection was written to meanwhile."""
        source = source_of(self._head)
        if source is None or source != self._source:
            return None
        basis, made, bias = self._basis, self._sketched, self._head.bias
        matrix = made.matrix
        matrix.bias, matrix.bias_dtype = address(bias), 0 if bias is None else DTYPES[bias.dtype]
        struct = abi_model.Screen(
            sketch=matrix,
            directions=address(basis.directions),
            weights=address(basis.weights),
            errors=address(made.errors),
            num_directions=len(basis.directions),
            stretch=basis.stretch,
            along=basis.along,
            norms=made.longest,
        )
        nbytes = sum(t.nbytes for t in (*made.planes, made.errors))
        return Screen(struct, source, nbytes, (made, basis, bias))

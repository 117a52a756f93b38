"""A sketch of a vocabulary projection in fewer bits, with a bound on what each token's score is off by.

Cauchy's and Schwarz's inequality bounds the error of a score by two lengths, which alone would spare few
tokens. But the rows that enter a model's projection lie along few directions: what each token's sketch lacks
along them is kept beside it, so that the bound is about the rest of a row alone. The rest is measured in
weights that take each channel for how much it varies and how much it is off.

A row x is `(U x) @ U + r` for directions U `(K, C)`, and the weights w of a token are `s + e` with its sketch
s. Beside that lies `m`, near `U e`. Then

    x . w = x . s + (U x) . m + error,    error = r . e + (U x) . (U e - m)
    |error| <= |(r * weights, along * U x)| * |(e / weights, (U e - m) / along)|

of which the last factor is known beforehand: the token's entry in `errors`. It holds for any directions and
weights; those only decide how many tokens it spares.

Source: Cauchy's and Schwarz's inequality; Teflioudi, Gemulla and Mykytiuk 2015 (SIGMOD, LEMP), section 4, for
such bounds in a search for the largest of many inner products.

Shapes: V vocabulary, C width, K directions, R rows that were seen, n tokens.
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
"""How many tokens the library computes together, and so many such runs stand for the vocabulary."""

_CHUNK = 1 << 21
"""Weights that are sketched at a time."""

_FLOOR = 0.05
"""Of the mean: what no channel counts as less than. Few rows say little of how much each of them varies."""


class SketchFormat(FormatLike, Protocol):
    """What is needed of `formats.Format`, which stands beside this room."""

    @property
    def group(self) -> int: ...  # noqa: D102
    @property
    def unpack(self) -> Unpack: ...  # noqa: D102


class Unpack(Protocol):
    """From planes, a shape and a dtype to a dense matrix."""

    def __call__(  # noqa: D102
        self, planes: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype, /
    ) -> Tensor: ...


@dataclass(frozen=True)
class Basis:
    """What rows are measured by.

    Attributes:
        directions: U `(K, C)`, orthonormal, float32.
        weights: `(C,)` float32, positive.
        stretch: What `m` is kept in units of, so that it is about as large as weights are.
        along: The weight of what lies along the directions.
    """

    directions: Tensor
    weights: Tensor
    stretch: float = 1.0
    along: float = 1.0

    def extended(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `(R, C)` as a sketch is multiplied with them, `(R, C + K)`, and their lengths `(R,)`."""
        along = rows @ self.directions.T
        rest = (rows - along @ self.directions) * self.weights
        length = (rest.square().sum(1) + (along * self.along).square().sum(1)).sqrt()
        return torch.cat([rows, along * self.stretch], dim=1), length


class Sketched:
    """A sketch `(V, C + K)` with its bounds, of as many tokens as have been made.

    Attributes:
        planes: Of the sketch with what it lacks.
        errors: The second factor of the bound, `(V,)` float32; infinite where a row holds NaN or infinity.
        longest: Lengths of the longest rows of the projection and of the sketch, added up.
    """

    def __init__(self, head: Weight, basis: Basis, sketch: SketchFormat, library: Library) -> None:
        """Nothing is sketched yet.

        Args:
            head: The projection, of whole groups.
            basis: What rows that they are multiplied with are measured by.
            sketch: int4 with a minimum.
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
        """Sketch some tokens."""
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
        """The sketch unpacked, `(V, C + K)` float32."""
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
    """Choose what rows are measured by, or return None where numbers are missing.

    Args:
        head: The projection.
        rows: `(R, C)` float32 that entered it, at least two for each of the group's inputs.
        sketch: Has as many directions as inputs in a group.
        library: For one instruction set.
    """
    sample = _sample(head)
    if not (torch.isfinite(rows).all() and torch.isfinite(sample).all()):
        return None
    # Rows that directions were not learned from say what is left beside such directions.
    directions = torch.linalg.svd(rows[::2], full_matrices=False)[2][: sketch.group].contiguous()
    basis = Basis(directions, torch.ones_like(rows[0]))
    along = rows[1::2] @ directions.T
    rest = rows[1::2] - along @ directions
    error = sample - _sketched(sample, basis, sketch, library).values()[:, : rows.shape[1]]
    lacking = error @ directions.T
    stretch = float(_spread(lacking, None) / _spread(sample, None))
    weights = (_spread(error, 0) / _spread(rest, 0)).sqrt()
    basis = Basis(directions, weights, stretch)
    found = _sketched(sample, basis, sketch, library).values()[:, rows.shape[1] :]
    of_rows = _spread(rest * weights, None) / _spread(along, None)
    of_tokens = _spread(lacking - found * stretch, None) / _spread(error / weights, None)
    # The product of both factors is then least, as far as these rows and tokens go.
    return Basis(directions, weights, stretch, float((of_rows * of_tokens).sqrt()))


def _spread(x: Tensor, dim: int | None) -> Tensor:
    """The root of the mean square over a dim, or over all; never 0."""
    whole = x.square().mean().sqrt()
    part = whole if dim is None else x.square().mean(dim).sqrt()
    return torch.maximum(part, _FLOOR * whole + 1e-20)


def share_of(
    head: Weight, basis: Basis, rows: Tensor, tokens: Tensor, sketch: SketchFormat, library: Library
) -> float:
    """The share of the vocabulary that would be computed for some rows.

    Args:
        head: The projection.
        basis: As it was learned.
        rows: `(R, C)` float32.
        tokens: `(R,)` int64, the best of each.
        sketch: As of `learn`.
        library: For one instruction set.
    """
    found = _sketched(_sample(head), basis, sketch, library)
    extended, length = basis.extended(rows)
    most = extended @ found.values().T + length[:, None] * found.errors
    best = torch.stack([_rows(head, token, token + 1)[0] for token in tokens.tolist()])
    score = (rows * best).sum(1)
    if head.bias is not None:
        most += torch.cat([head.bias[start : start + _TOGETHER] for start in _starts(head)]).float()
        score = score + head.bias[tokens].float()
    computed = (most >= score[:, None]).unflatten(1, (-1, _TOGETHER)).any(-1)
    return float(computed.float().mean())


def _starts(head: Weight) -> range:
    runs = head.shape[0] // _TOGETHER
    return range(0, runs * _TOGETHER, max(1, runs // _SAMPLED) * _TOGETHER)


def _sample(head: Weight) -> Tensor:
    """Runs of rows that are spread over the vocabulary, `(n, C)`."""
    return torch.cat([_rows(head, start, start + _TOGETHER) for start in _starts(head)])


def _rows(head: Weight, start: int, stop: int) -> Tensor:
    """Rows of a projection in float32, `(n, C)`: what the kernels' products are made of."""
    if head.dtype is not None:
        planes = tuple(plane[start:stop] for plane in head.planes)
        return head.unpack(planes, (stop - start, head.shape[1]), torch.float32)
    parts, first = [], 0
    for plane in head.planes:
        parts.append(plane[max(start - first, 0) : max(stop - first, 0)])
        first += len(plane)
    return torch.cat(parts).float().contiguous()


def source_of(head: Weight) -> tuple[int, ...] | None:
    """What tells one state of a projection's memory from any other; None where nothing can."""
    tensors = head.planes if head.bias is None else (*head.planes, head.bias)
    digests = [digest(t) for t in tensors]
    found = [d for d in digests if d is not None]
    return (*found, *(t.data_ptr() for t in tensors)) if len(found) == len(digests) else None


@dataclass(frozen=True)
class Screen:
    """A sketch with its bounds, of one state of a projection.

    Attributes:
        struct: For the library.
        source: `source_of` that state.
        nbytes: What a step reads of it.
        tensors: What the struct points to.
    """

    struct: abi_model.Screen
    source: tuple[int, ...]
    nbytes: int
    tensors: tuple[object, ...]


class Making:
    """A screen that is made in the pauses between steps."""

    def __init__(self, head: Weight, basis: Basis, sketch: SketchFormat, library: Library) -> None:
        """Nothing is sketched yet.

        Args:
            head: The projection.
            basis: As it was learned.
            sketch: The format.
            library: For one instruction set.
        """
        self._head, self._basis, self._done = head, basis, 0
        self._source = source_of(head)
        self._sketched = Sketched(head, basis, sketch, library)

    def goes_on(self, seconds: float) -> bool:
        """Sketch tokens for about so long; whether some are left."""
        end, (tokens, width) = time.perf_counter() + seconds, self._sketched.shape
        while self._done < tokens and time.perf_counter() < end:
            count = min(max(1, _CHUNK // width), tokens - self._done)
            self._sketched.make(self._done, count)
            self._done += count
        return self._done < tokens

    def screen(self) -> Screen | None:
        """What was made; None where the projection was written to meanwhile."""
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

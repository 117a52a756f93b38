"""Reads the tensors and nodes of an ONNX file, as far as a checkpoint in it needs: a protocol buffer by hand.

Source: github.com/onnx/onnx, onnx/onnx.proto (field numbers); protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Graph", "Node", "read_graph"]

_DTYPES = {1: torch.float32, 2: torch.uint8, 3: torch.int8, 6: torch.int32, 7: torch.int64}
_GRAPH, _NODES, _TENSORS, _ATTRIBUTES, _SUBGRAPH = 7, 1, 5, 5, 6


@dataclass(frozen=True)
class Node:
    """One operation: its name, kind, and the names of what it reads and writes."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass
class Graph:
    """Nodes and tensors of a file, those of graphs within graphs among them."""

    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def read_graph(path: Path) -> Graph:
    """Everything that a file holds."""
    graph = Graph()
    for number, value in _fields(memoryview(path.read_bytes())):
        if number == _GRAPH:
            _read_into(graph, value)
    return graph


def _read_into(graph: Graph, message: memoryview) -> None:
    for number, value in _fields(message):
        if number == _NODES:
            parts: dict[int, list[memoryview]] = {}
            for inner, part in _fields(value):
                parts.setdefault(inner, []).append(part)
            names = {n: tuple(bytes(p).decode() for p in parts.get(n, ())) for n in (1, 2, 3, 4)}
            graph.nodes.append(Node("".join(names[3]), "".join(names[4]), names[1], names[2]))
            for attribute in parts.get(_ATTRIBUTES, ()):
                for inner, part in _fields(attribute):
                    if inner == _SUBGRAPH:
                        _read_into(graph, part)
        elif number == _TENSORS:
            name, tensor = _tensor(value)
            graph.tensors[name] = tensor


def _tensor(message: memoryview) -> tuple[str, Tensor]:
    dims: list[int] = []
    few: list[int] = []
    name, kind, raw = "", 1, b""
    for number, value in _fields(message):
        if number == 1:
            dims += [value] if isinstance(value, int) else list(_varints(value))
        elif number == 2:
            kind = int(value)
        elif number == 8:
            name = bytes(value).decode()
        elif number in (4, 9):  # floats may lie in a field of their own
            raw = bytes(value)
        elif number == 5:
            few += [value] if isinstance(value, int) else list(_varints(value))
    if few:
        return name, torch.tensor(few).view(dims)
    if not raw or kind not in _DTYPES:
        return name, torch.empty(0)
    return name, torch.frombuffer(bytearray(raw), dtype=_DTYPES[kind]).view(dims)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Numbers and values of a message's fields: integers, or the bytes of everything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(key & 7)
        if size is None:
            size, at = _varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _varints(message: memoryview) -> Iterator[int]:
    at = 0
    while at < len(message):
        value, at = _varint(message, at)
        yield value

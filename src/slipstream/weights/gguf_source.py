"""Tensors of a GGUF file under a transformers model's names: int4 planes made from its blocks, or dense.

Types that are converted to int4 without unpacking (w is the weight, q its code, f16 the file's own numbers):

    Q4_1   w = d q + m             groups of 32: the same numbers, bit for bit
    Q4_0   w = d (q - 8)           minimum -8 d: the same, since multiplying by a power of two is exact
    Q4_K   w = (D s) q - (M t)     groups of 32, s and t of 6 bits: D s and M t are rounded to float16, which
                                   changes a weight by at most 2^-10 of the larger of D s q and M t

Q8_0 has a scale for every 32 inputs and int8 one per row, so it fits no format exactly; it is unpacked and
packed again, one tensor at a time, within the error of the requested format. So are Q6_K and all other types.

Source: ggml, `ggml-common.h` (`block_q4_0`, `block_q4_1`, `block_q4_K`) and `get_scale_min_k4`; llama.cpp,
`convert_hf_to_gguf.py` (`permute`), for the order of the rows of q and k in llamas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import UnsupportedError, WeightError
from slipstream.formats import FORMATS, Format
from slipstream.ops.linear import Weight
from slipstream.weights.gguf import READ_ERRORS, names_in_files, unpack_blocks
from slipstream.weights.gguf_header import GgufTensor, read_header
from slipstream.weights.recipe import Piece
from slipstream.weights.source import Source

__all__ = ["GgufSource", "is_direct"]

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model types whose tensors are stored as in transformers, except for the row order of q and k in llamas."""
_BLOCK = 32
_DIRECT = ("Q4_0", "Q4_1", "Q4_K")


def is_direct(model_config: Any) -> bool:
    """Whether tensors of this model can be read from a GGUF file without transformers' loader."""
    return getattr(model_config, "model_type", None) in _ARCHITECTURES


class GgufSource(Source):
    """The tensors of one GGUF file, under the names of a model."""

    def __init__(self, path: Path, model_config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Map the file and find the model's tensors in it.

        Args:
            path: The file.
            model_config: The transformers configuration that the file describes.
            shapes: Shapes of the model's tensors by name.

        Raises:
            WeightError: The file is damaged, or a tensor is not what the model needs.
            UnsupportedError: A model type that is not read directly.
        """
        if not is_direct(model_config):
            unread = getattr(model_config, "model_type", None)
            raise UnsupportedError(f"{path.name} is a {unread}, which is not read directly")
        self._path, self._config = path, model_config
        kind = _ARCHITECTURES[model_config.model_type]
        tensors = read_header(path).tensors
        self._memory = np.memmap(path, dtype=np.uint8, mode="r")
        try:
            names = names_in_files(kind, model_config.num_hidden_layers)
        except READ_ERRORS as error:
            raise WeightError(f"{path} cannot be read as a GGUF model: {str(error)[:120]}") from error
        self._tensors: dict[str, GgufTensor] = {}
        self._own: dict[str, str] = {}
        used: set[str] = set()
        for name, shape in shapes.items():
            module, _, leaf = name.rpartition(".")
            own = f"{names.get_name(module)}.{leaf}"
            if own in tensors:
                found = tensors[own].shape
                if found != shape:
                    raise WeightError(f"{path}: {own} has the shape {found}, the model's {name} {shape}")
                self._tensors[name] = tensors[own]
                self._own[name] = own
                used.add(own)
        if over := sorted(tensors.keys() - used):
            raise WeightError(f"{path} has {over[0]}, which the model does not use")
        self._shapes = {name: shapes[name] for name in self._tensors}

    def names(self) -> Iterable[str]:
        """The model's names of the file's tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the model's tensor."""
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        """Return the dense tensor; float32 where it had to be unpacked from blocks."""
        tensor, blocks = self._tensors[name], self._bytes(name)
        if tensor.kind in ("F32", "F16"):
            dense = blocks.view(torch.float32 if tensor.kind == "F32" else torch.float16)
        else:
            try:
                rows = blocks.view(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1).numpy()
                dense = torch.from_numpy(unpack_blocks(rows, tensor.kind))
            except READ_ERRORS as error:
                raise WeightError(f"{self.place(name)} cannot be unpacked: {str(error)[:120]}") from error
        return self._ordered(name, dense.view(self._shapes[name]))

    def packed(self, name: str, wanted: Format, pieces: Sequence[Piece] = ()) -> Weight | None:
        """Return the file's own blocks as int4 planes, if their type and values allow it."""
        tensor = self._tensors.get(name)
        kind = None if tensor is None else tensor.kind
        if tensor is None or kind not in _DIRECT or wanted.packed_as != FORMATS["int4"].name:
            return None
        rows, inputs = self._shapes[name]
        blocks = self._bytes(name).view(rows, -1)
        planes = (_q4_k if kind == "Q4_K" else _q4)(blocks, inputs, kind)
        if any(bool(plane.isinf().any()) for plane in planes[1:]):
            return None  # overflows float16: the caller packs it again, with a multiplier for each row
        ordered = tuple(self._ordered(name, plane) for plane in planes)
        return Weight(
            wanted.name,
            (rows, inputs),
            (*ordered, torch.ones(rows, dtype=torch.float32, device="cpu")),
            wanted.unpack,
            rounding=wanted.rounding,
        )

    def stored(self, name: str) -> Tensor | None:
        """The scales of packed blocks, or a dense tensor."""
        ready = self.packed(name, FORMATS["int4"])
        return self.read(name) if ready is None else torch.cat([p.flatten() for p in ready.planes[1:3]])

    def is_packed(self, name: str) -> bool:
        """Whether a tensor's blocks can become int4 planes without unpacking."""
        return self._tensors[name].kind in _DIRECT

    def place(self, name: str) -> str:
        """The file, and the tensor's name in it."""
        return f"{self._path}: {self._own.get(name, name)}"

    def __contains__(self, name: str) -> bool:
        """Whether the file has the model's tensor."""
        return name in self._tensors

    def _bytes(self, name: str) -> Tensor:
        """A copy of a tensor's bytes."""
        tensor = self._tensors[name]
        return torch.from_numpy(self._memory[tensor.begin : tensor.begin + tensor.size].copy())

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Restore transformers' row order of a llama's q and k: halves of a head instead of pairs."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        part = name.split(".")[-2] if "." in name else ""
        if self._config.model_type != "llama" or part not in heads:
            return rows
        count = getattr(self._config, heads[part])
        return rows.reshape(count, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()


def _q4(blocks: Tensor, inputs: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Planes of Q4_0 (f16 d, 16 bytes) or Q4_1 (f16 d, f16 m, 16 bytes) blocks."""
    rows, head = len(blocks), 2 if kind == "Q4_0" else 4
    parts = blocks.view(rows, inputs // _BLOCK, head + _BLOCK // 2)
    numbers = parts[..., :head].contiguous().view(torch.float16)
    codes = parts[..., head:].reshape(rows, inputs // 2)
    scales = numbers[..., 0].contiguous()
    minima = numbers[..., 1].contiguous() if kind == "Q4_1" else (scales.float() * -8).half()
    return codes, scales, minima


def _q4_k(blocks: Tensor, inputs: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Planes of Q4_K superblocks: f16 D, f16 M, 12 bytes of 6-bit scales and minima, 4 x 32 bytes of codes.

    In each 32 bytes, the low nibbles are one group of 32 weights and the high nibbles the next group.
    """
    rows = len(blocks)
    parts = blocks.view(rows, inputs // 256, 144)
    ends = parts[..., :4].contiguous().view(torch.float16).float()
    six = parts[..., 4:16].int()
    low, mid, high = six[..., 0:4], six[..., 4:8], six[..., 8:12]
    scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    least = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), dim=-1)
    scales = (ends[..., :1] * scale).half().view(rows, inputs // _BLOCK)
    minima = (-ends[..., 1:] * least).half().view(rows, inputs // _BLOCK)
    bytes_ = parts[..., 16:].reshape(rows, inputs // 256, 4, _BLOCK)
    groups = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-2)  # (rows, superblocks, 4, 2, 32)
    first, second = groups.unflatten(-1, (2, _BLOCK // 2)).unbind(-2)
    codes: Tensor = first | second << 4
    return codes.reshape(rows, inputs // 2), scales, minima

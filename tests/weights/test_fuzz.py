"""Damaged files are refused in one line that names them: no crash, no hang, no memory as they claim."""

from __future__ import annotations

import copy
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream.engine.save import save_packed
from slipstream.errors import WeightError
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.gguf import open_gguf
from slipstream.weights.gguf_header import TYPES
from slipstream.weights.packed_folder import PackedFolder
from slipstream.weights.safe_file import SafeFile
from tests.helpers.models import inject, make

CASES = 150
_MOST_MEMORY = 64 << 20
ABSURD = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def safe(folder: Path) -> Path:
    save_file(
        {"a": torch.zeros(3, 5), "b.weight": torch.ones(64, dtype=torch.bfloat16)}, folder / "w.safetensors"
    )
    return folder / "w.safetensors"


def read_safe(path: Path) -> None:
    file = SafeFile(path)
    for name in file.entries:
        file.tensor(name).sum()


def torch_file(folder: Path) -> Path:
    torch.save(
        {"module": {"a": torch.zeros(3, 5), "b": torch.ones(7)}, "checkpoint_version": 2.0}, folder / "w.bin"
    )
    return folder / "w.bin"


def read_torch(path: Path) -> None:
    (source,) = open_checkpoint(path).ranks
    for name in source.names():
        source.read(name).sum()


def gguf_file(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "w.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b", "cde"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    data = gguf.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "w.gguf"


def read_gguf(path: Path) -> None:
    for tensor in open_gguf(path).tensors:
        tensor.data.sum()


def packed(folder: Path) -> Path:
    engine = inject(make("llama"), quant="int4")
    save_packed(engine.module, engine.inference_config, folder / "packed")
    return folder / "packed/slipstream.json"


def planes(folder: Path) -> Path:
    return packed(folder).with_name("planes.safetensors")


def read_packed(path: Path) -> None:
    folder = PackedFolder(path.parent)
    for name in folder.names():
        folder.shape(name)
        folder.read(name)


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None], int]] = {
    "safetensors": (safe, read_safe, 0),
    "torch": (torch_file, read_torch, 0),
    "gguf": (gguf_file, read_gguf, 0),
    "a manifest": (packed, read_packed, 0),
    "planes": (planes, read_packed, 4000),
}
"""How a file is made, how it is read, and how much of it is header (0 for all)."""


def damaged(whole: bytes, header: int, seed: int) -> bytes:
    """Cut short, with bytes flipped, or with a number in the header that cannot be."""
    luck = random.Random(seed)
    end = header or len(whole)
    kind = seed % 3
    if kind == 0:
        return whole[: luck.randrange(len(whole))]
    out = bytearray(whole)
    if kind == 1:
        for _ in range(luck.choice((1, 1, 4))):
            out[luck.randrange(end)] ^= 1 << luck.randrange(8)
    else:
        at = luck.randrange(max(1, end - 8))
        size = luck.choice((4, 8))
        value = luck.choice(ABSURD) & (1 << 8 * size) - 1
        out[at : at + size] = struct.pack("<Q", value)[:size]
    return bytes(out[: len(whole)])


@pytest.fixture(scope="module", params=READERS)
def reader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, bytes, int, Callable[[Path], None]]]:
    make_file, read, header = READERS[request.param]
    place = make_file(tmp_path_factory.mktemp("fuzz"))
    yield place, place.read_bytes(), header, read


def test_damaged_files_are_refused_by_name(
    reader: tuple[Path, bytes, int, Callable[[Path], None]],
) -> None:
    place, whole, header, read = reader
    read(place)  # as it was, it can be read
    refused = 0
    for seed in range(CASES):
        # A new file: the pages of the last one may still be mapped.
        place.unlink()
        place.write_bytes(damaged(whole, header, seed))
        tracemalloc.start()
        try:
            read(place)
        except WeightError as error:
            refused += 1
            assert str(place.parent) in str(error) and "\n" not in str(error), seed
            assert len(str(error)) < 1000, seed
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most < _MOST_MEMORY, seed
    place.unlink()
    place.write_bytes(whole)
    assert refused > CASES // 3  # a third of them are cut short


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_files_of_a_few_bytes_are_refused(length: int, tmp_path: Path) -> None:
    for name, read in (("w.safetensors", read_safe), ("w.gguf", read_gguf), ("w.bin", read_torch)):
        (tmp_path / name).write_bytes(b"\xff" * length)
        with pytest.raises(WeightError, match=name):
            read(tmp_path / name)


def test_the_fuzzer_damages(tmp_path: Path) -> None:
    whole = safe(tmp_path).read_bytes()
    copies = {damaged(copy.copy(whole), 0, seed) for seed in range(CASES)}
    assert len(copies - {whole}) > CASES // 2


def test_types_are_as_large_as_ggml_says() -> None:
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if int(kind) in TYPES:
            assert TYPES[int(kind)] == (kind.name, *sizes)
    assert {"Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "BF16"} <= {name for name, *_ in TYPES.values()}

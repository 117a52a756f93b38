"""Opens a checkpoint of any form that inference scripts use, as one lazy source or one for each rank.

    a folder             model.safetensors, *.safetensors.index.json, pytorch_model.bin, *.bin.index.json:
                         the first of them that exists, in transformers' order
    a folder with tags   `latest` names a folder of mp_rank_XX_model_states.pt, one per rank
    a JSON description   {"type", "version", "checkpoints", "parallelization", "mp_size", "base_dir"}
    a file               *.safetensors, or a state dict of torch, plain or under "module" or "model"

Torch's files are read with `weights_only=True`: a pickle that would run code is refused. Files that a
description names outside of its folder are not opened.

Source: DeepSpeed, `runtime/state_dict_factory.py` (the description's keys) and `inference/engine.py` (tags);
transformers, `modeling_utils.py` (`_get_resolved_checkpoint_files`), for the order of a folder's files.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import WeightError, one_line
from slipstream.weights.gguf_header import is_gguf
from slipstream.weights.joined import joined
from slipstream.weights.safe_file import SafeFile, SafeSource
from slipstream.weights.source import Source

__all__ = ["Slices", "TorchSource", "open_checkpoint", "weights_file"]

_TORCH_ERRORS = (
    UnpicklingError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    IndexError,
)
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TYPES = ("megatron", "bloom", "ds_model")
_WRAPPERS = ("module", "model", "state_dict", "model_state_dict")
_KEYS = frozenset(
    {"type", "version", "checkpoints", "parallelization", "mp_size", "tp_size", "base_dir", "dtype"}
)
_RANK = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_FOREIGN = re.compile(r"unsupported (?:global: )?GLOBAL ([\w.]+)", re.IGNORECASE)
_LARGEST_JSON = 1 << 28


@dataclass(frozen=True)
class Slices:
    """An open checkpoint, split over ranks as its files are.

    Attributes:
        ranks: The tensors that each tensor-parallel rank wrote; a single source where nothing is split.
        version: Version of Megatron's layout of a fused q, k and v, if the checkpoint states one; None means
            the model's own layout.
        what: What was opened, for messages.
    """

    ranks: tuple[Source, ...]
    version: float | None
    what: str


def open_checkpoint(
    place: str | os.PathLike[str] | Mapping[str, Any],
    base_dir: str = "",
    *,
    degree: int = 1,
    tag: str | None = None,
) -> Slices:
    """Open a checkpoint; headers are read and checked, values are not.

    Args:
        place: Path of a folder or file, or a description.
        base_dir: Folder in which relative names are looked up and in which files must lie; if empty, the
            folder of `place`.
        degree: Number of ranks that a list of files is split over, where a description does not state it.
        tag: Tag of a folder with tags; None takes the one that `latest` names.

    Raises:
        WeightError: Names the file and what is wrong with it.
    """
    if isinstance(place, Mapping):
        return _described(place, Path(base_dir or "."), "the checkpoint description", degree)
    path = Path(os.path.expanduser(os.fspath(place)))
    if base_dir and not path.is_absolute() and not path.exists():
        path = Path(os.path.expanduser(base_dir)) / path
    if not os.path.exists(path):
        raise WeightError(f"{path}: there is no such checkpoint")
    if path.is_dir():
        return _folder(path, tag)
    if path.suffix == ".json":
        table = _json(path)
        if "weight_map" in table:
            return Slices((_indexed(path, table),), None, str(path))
        return _described(table, Path(base_dir) if base_dir else path.parent, str(path), degree)
    source, version = _file(path)
    return Slices((source,), version, str(path))


def weights_file(folder: Path) -> Path | None:
    """Return the file through which transformers opens a folder's weights: an index, or the weights."""
    places = (folder / f"{name}{end}" for name in _WEIGHTS for end in ("", ".index.json"))
    return next((place for place in places if place.is_file()), None)


def _folder(path: Path, tag: str | None) -> Slices:
    """Open a folder in transformers' layout, or one with tags."""
    if tag is None and not (path / "latest").is_file():
        if (file := weights_file(path)) is not None:
            source = _indexed(file, _json(file)) if file.suffix == ".json" else _file(file)[0]
            return Slices((source,), None, str(path))
        if not _rank_files(path):
            raise WeightError(
                f"{path} has no model.safetensors, pytorch_model.bin, index of either, or `latest`; give the "
                "file itself, or a JSON description"
            )
    if tag is None and (path / "latest").is_file():
        tag = _text(path / "latest").strip()
    where = path if tag is None else _within(path, tag, str(path / "latest"))
    files = _rank_files(where)
    if not files:
        raise WeightError(f"{where} has no mp_rank_XX_model_states.pt; give another tag")
    missing = sorted(set(range(len(files))) - files.keys())
    if missing:
        raise WeightError(
            f"{where} lacks mp_rank_{missing[0]:02d}_model_states.pt, but has {len(files)} others"
        )
    opened = [_file(files[rank]) for rank in range(len(files))]
    return Slices(tuple(source for source, _ in opened), opened[0][1], str(where))


def _rank_files(path: Path) -> dict[int, Path]:
    if not path.is_dir():
        return {}
    files: dict[int, Path] = {}
    for file in path.iterdir():
        match = _RANK.fullmatch(file.name)
        if match and files.setdefault(int(match[1]), file) is not file:
            raise WeightError(
                f"{file} and {files[int(match[1])].name} are both of rank {int(match[1])}; drop one"
            )
    return files


def _described(table: Mapping[str, Any], base: Path, what: str, degree: int) -> Slices:
    """Open the files of a JSON description in DeepSpeed's format."""
    unknown, missing = table.keys() - _KEYS, {"type", "checkpoints"} - table.keys()
    if missing or unknown:
        problem = (
            f"lacks {', '.join(sorted(missing))}" if missing else f"has {sorted(map(str, unknown))[0]!r}"
        )
        raise WeightError(f"{what} {problem}; its keys are {', '.join(sorted(_KEYS))}")
    kind = table["type"]
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise WeightError(f"{what}: type={kind!r} must be one of Megatron, bloom, ds_model")
    version = table.get("version", 0)
    megatron = kind.lower() == "megatron"
    if isinstance(version, bool) or not isinstance(version, int | float):
        raise WeightError(f"{what}: version={version!r} must be a number")
    version = float(version) if megatron else None
    if (given := table.get("base_dir")) is not None:
        base = Path(_string(given, f"{what}: base_dir"))
    split = table.get("parallelization", "tp" if megatron else "pp")
    if split not in ("tp", "pp"):
        raise WeightError(f"{what}: parallelization={split!r} must be 'tp' (slices) or 'pp' (whole tensors)")
    files = table["checkpoints"]
    if isinstance(files, Mapping):
        return _two_lists(files, base, what, version)
    paths = _paths(files, base, what)
    size = table.get("mp_size", table.get("tp_size"))
    if size is None:
        size = len(paths) if split == "tp" else degree
    if type(size) is not int or size < 1:
        raise WeightError(f"{what}: mp_size={size!r} must be a positive integer")
    if size == 1 or (split == "pp" and degree == 1):
        return Slices((joined([_file(path)[0] for path in paths]),), version, what)
    if len(paths) != size:
        raise WeightError(f"{what}: mp_size={size}, but {len(paths)} files; give one file for each rank")
    opened = [_file(path) for path in paths]
    stated = opened[0][1] if megatron else None
    return Slices(tuple(source for source, _ in opened), version if stated is None else stated, what)


def _two_lists(files: Mapping[Any, Any], base: Path, what: str, version: float | None) -> Slices:
    """Open `{"non_tp": [...], "tp": [...]}`: whole tensors, and one file or list of files per rank."""
    if not files or not files.keys() <= {"non_tp", "tp"}:
        raise WeightError(f"{what}: checkpoints must be a list of files, or have the keys non_tp and tp")
    whole = [_file(path)[0] for path in _paths(files.get("non_tp", []), base, what, empty=True)]
    ranks = []
    for entry in _list(files.get("tp", []), f"{what}: tp"):
        paths = _paths(entry if isinstance(entry, list) else [entry], base, what)
        ranks.append(joined([*whole, *(_file(path)[0] for path in paths)]))
    return Slices(tuple(ranks) or (joined(whole),), version, what)


def _paths(given: Any, base: Path, what: str, *, empty: bool = False) -> list[Path]:
    names = _list([given] if isinstance(given, str) else given, f"{what}: checkpoints")
    if not names and not empty:
        raise WeightError(f"{what} names no files")
    return [_within(base, _string(name, f"{what}: checkpoints"), what) for name in names]


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise WeightError(f"{what} is {value!r}; it must be a list of file names")
    return list(value)


def _string(value: Any, what: str) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value or "\0" in value:
        raise WeightError(f"{what}: {value!r} is not a file name")
    return value


def _within(base: Path, name: str, what: str) -> Path:
    """Return the path of a file in a folder; refuse names that lead out of it before any file access."""
    root = os.path.abspath(os.path.expanduser(base))
    path = os.path.normpath(os.path.join(root, name))
    if os.path.commonpath([root, path]) != root:
        raise WeightError(
            f"{what} names {name}, which is outside of {root}; set base_dir to the folder that contains it"
        )
    return Path(path)


def _indexed(path: Path, table: Mapping[str, Any]) -> Source:
    """Open the files of an index, and check that each has the tensors that the index lists for it."""
    places = table.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise WeightError(f"{path} has no weight_map of tensors to files")
    names = {_string(file, str(path)) for file in places.values()}
    opened = {name: _file(_within(path.parent, name, str(path)))[0] for name in sorted(names)}
    for name, file in places.items():
        if name not in opened[file]:
            raise WeightError(f"{path.parent / file} lacks {name}, which {path.name} says is in it")
    return joined(list(opened.values()))


def _file(path: Path) -> tuple[Source, float | None]:
    """Open a file of weights; also returns the Megatron version that it states, if any."""
    if not path.is_file():
        raise WeightError(f"{path}: there is no such file")
    if is_gguf(path):
        raise WeightError(
            f"{path} is a GGUF file, which only a new engine can load; pass it to init_inference as the "
            "model, or as `checkpoint` together with a model"
        )
    if path.suffix == ".safetensors":
        return SafeSource([SafeFile(path)]), None
    return _torch_file(path)


def _torch_file(path: Path) -> tuple[Source, float | None]:
    try:
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            held = torch.load(path, map_location="cpu", weights_only=True)  # written before torch 1.6
    except OSError as error:
        what = "is cut short or damaged" if error.errno == errno.EINVAL else "cannot be read"
        raise WeightError(f"{path} {what}: {error.strerror or error}") from error
    except UnpicklingError as error:
        # Torch's own message begins with how to allow the code to run, which would be bad advice.
        match = _FOREIGN.search(str(error))
        what = f"holds more than tensors ({match[1]})" if match else "is damaged, or holds more than tensors"
        raise WeightError(
            f"{path} {what}: unpickling would run its code, none of which was run; save a plain state "
            "dict, or safetensors"
        ) from error
    except _TORCH_ERRORS as error:
        raise WeightError(f"{path} is cut short or damaged: {one_line(error)}") from error
    if not isinstance(held, Mapping):
        raise WeightError(f"{path} holds a {type(held).__name__}, not a state dict")
    version = held.get("checkpoint_version")
    for key in _WRAPPERS:
        if isinstance(held.get(key), Mapping):
            held = held[key]
            break
    tensors: dict[str, Tensor] = {}
    for name, tensor in _flat(held, ""):
        if tensors.setdefault(name, tensor) is not tensor:
            raise WeightError(f"{path} has two tensors called {name}, one of them in a nested table")
    if not tensors:
        raise WeightError(f"{path} holds no tensors")
    return TorchSource(path, tensors), float(version) if isinstance(version, int | float) else None


def _flat(table: Mapping[Any, Any], head: str) -> Iterable[tuple[str, Tensor]]:
    for key, value in table.items():
        if isinstance(value, Tensor):
            yield f"{head}{key}", value.detach()
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{head}{key}.")


class TorchSource(Source):
    """A state dict, memory-mapped where its file format allows it."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors.

        Raises:
            WeightError: A tensor is not dense.
        """
        for name, tensor in tensors.items():
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                raise WeightError(
                    f"{path}: {name} is sparse, quantized or on meta; save it as a dense tensor"
                )
        self._path, self._tensors = path, dict(tensors)

    def names(self) -> Iterable[str]:
        """Every key."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """The tensor, contiguous."""
        return self._tensors[name].contiguous()

    def views(self, name: str) -> Sequence[Tensor]:
        """The tensor as it was saved."""
        return (self._tensors[name],)

    def place(self, name: str) -> str:
        """The file and the key."""
        return f"{self._path}: {name}"

    def __contains__(self, name: str) -> bool:
        """Whether there is such a key."""
        return name in self._tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(table, dict):
        raise WeightError(f"{path} holds a {type(table).__name__}, not a table")
    return table


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise WeightError(f"{path} is larger than {_LARGEST_JSON >> 20} MiB, the limit for a description")
        return path.read_text()
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise WeightError(f"{path} is not UTF-8 text") from error

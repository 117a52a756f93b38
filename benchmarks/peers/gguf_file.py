"""Writes a checkpoint as a BF16 GGUF file with llama.cpp's names and row order, and experts in one tensor.

Source: llama.cpp's documentation of GGUF, and the tensor names in the `gguf` package.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["write_gguf"]

Matrix = np.ndarray[Any, np.dtype[np.uint16]]
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write `path` from a checkpoint folder with one safetensors file in bfloat16."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[architecture])
    _write_numbers(writer, config)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(architecture, layers)
    experts: dict[str, list[Matrix]] = {}
    for name, tensor in _tensors(checkpoint / "model.safetensors"):
        if found := re.fullmatch(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(w[123])\.weight", name):
            experts.setdefault(f"blk.{found[1]}.{_EXPERTS[found[3]]}.weight", []).append(tensor)
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"{name}: llama.cpp has no tensor for it")
        _add(writer, new, _laid_out(name, tensor, config))
    for name, parts in experts.items():
        if len(parts) != config["num_local_experts"]:
            raise ValueError(f"{name}: {len(parts)} experts, the config says {config['num_local_experts']}")
        _add(writer, name, np.stack(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _write_numbers(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    writer.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    writer.add_feed_forward_length(config.get("intermediate_size") or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(config.get("head_dim") or hidden // heads)
        writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")  # inputs and outputs are token ids


def _tensors(path: Path) -> Iterator[tuple[str, Matrix]]:
    """Yield the name and bits of each tensor, ordered by the numbers in the names."""
    data = np.memmap(path, np.uint8, "r")
    size = struct.unpack("<Q", data[:8].tobytes())[0]
    header = json.loads(data[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}; the checkpoint must be in BF16")
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def _laid_out(name: str, tensor: Matrix, config: dict[str, Any]) -> Matrix:
    """Lay out a tensor for llama.cpp: GPT-2's matrices transposed, rotary pairs of q and k adjacent."""
    if config["model_type"] == "gpt2":
        turned = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
        return np.ascontiguousarray(tensor.T) if turned else tensor
    found = re.search(r"\.([qk])_proj\.weight$", name)
    if not found:
        return tensor
    heads = config["num_attention_heads"] if found[1] == "q" else config["num_key_value_heads"]
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: Matrix) -> None:
    """Add a tensor: vectors and routers in F32, as llama.cpp expects, matrices in BF16."""
    if tensor.ndim == 1 or "ffn_gate_inp" in name:
        writer.add_tensor(name, (tensor.astype(np.uint32) << 16).view(np.float32))
    else:
        writer.add_tensor(
            name, np.ascontiguousarray(tensor).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
        )

"""Moonshine tiny, a real speech model, out of the packages that `scripts/install moonshine` fetches.

The weights come in ONNX, quantized to eight bits; here they are put into transformers' own class in float32.
"""

from __future__ import annotations

import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.real.onnx import Graph, read_graph

__all__ = ["HERE", "model", "sound", "text"]

HERE = Path(__file__).resolve().parents[2] / ".venv/moonshine"
_WEIGHTS = HERE / "package/dist/model/tiny/quantized"
_ASSETS = HERE / "sound/moonshine_onnx/assets"

_RENAMED = {"dense": "o_proj", "up_proj": "fc1", "down_proj": "fc2"}


def model() -> Any:
    """The model in float32, every parameter filled, in eval mode."""
    made = transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(pad_token_id=2))
    tensors = {}
    for file, prefix in (("encoder_model", "model.encoder."), ("decoder_model_merged", "")):
        graph = read_graph(_WEIGHTS / f"{file}.onnx")
        tensors |= {prefix + name: tensor for name, tensor in _named(graph)}
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"]
    made.load_state_dict(tensors)  # strict: nothing missing, nothing left over
    return made.eval()


def sound() -> Tensor:
    """A spoken sentence, `(1, samples)` float32 at 16 kHz."""
    with wave.open(str(_ASSETS / "beckett.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
        samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16)
    return samples.float()[None] / 32768


def text(tokens: Tensor) -> str:
    """What tokens say."""
    from tokenizers import Tokenizer

    decoded: str = Tokenizer.from_file(str(_ASSETS / "tokenizer.json")).decode(tokens.tolist())
    return decoded


def _named(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Parameters by the names that the class gives them."""
    for node in graph.nodes:
        for name in node.inputs:
            if node.kind == "MatMulInteger" and name in graph.tensors and name.endswith("_quantized"):
                path = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
                yield f"{_renamed(path)}.weight", _weight(graph, name).mT.contiguous()
            elif node.name.startswith("/groupnorm/") and graph.tensors.get(name, torch.empty(0)).numel() > 1:
                yield f"groupnorm.{'weight' if node.kind == 'Mul' else 'bias'}", graph.tensors[name].flatten()
    for name, tensor in graph.tensors.items():
        plain = name.replace("_merged_0", "")
        if re.fullmatch(r"conv\d\.weight_quantized", plain):
            scale, zero = (graph.tensors[name.replace("quantized", part)] for part in ("scale", "zero_point"))
            yield plain.removesuffix("_quantized"), tensor.float() * scale + zero
        elif plain.endswith("embed_tokens.weight_quantized"):
            yield plain.removesuffix("_quantized"), _weight(graph, name)
        elif plain.endswith((".weight", ".bias")):
            yield _renamed(plain), tensor


def _weight(graph: Graph, name: str) -> Tensor:
    scale, zero = (graph.tensors[name.replace("quantized", part)] for part in ("scale", "zero_point"))
    return (graph.tensors[name].float() - zero.float()) * scale


def _renamed(path: str) -> str:
    return ".".join(_RENAMED.get(part, part) for part in path.split("."))

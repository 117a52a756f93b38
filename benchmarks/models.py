"""The models that are measured: of known size, with random weights unless a package provides them."""

from __future__ import annotations

import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LLAMA_1B", "LLAMA_TINY", "MODELS", "Facts", "Model", "facts", "make", "make_llama"]

LLAMA_1B: dict[str, Any] = {  # 1.10 billion parameters: TinyLlama's shape
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
LLAMA_TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
_MOE: dict[str, Any] = {  # 0.52 billion parameters, 0.18 billion of them active for a token
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
_MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
}
_BERT_TINY: dict[str, Any] = {**_MINILM, "hidden_size": 96, "intermediate_size": 128, "vocab_size": 1000}


@dataclass(frozen=True)
class Model:
    """One model of the benchmarks.

    Attributes:
        title: The name shown in tables.
        family: transformers' `model_type`.
        shape: Config values that differ from the family's defaults; empty if a package provides the weights.
        decodes: Whether it is a decoder; otherwise an encoder.
        new_tokens: Tokens generated in one measurement of decoding.
        rounds: Sufficient number of rounds; long measurements vary little and need few.
    """

    title: str
    family: str
    shape: dict[str, Any]
    decodes: bool = True
    new_tokens: int = 32
    rounds: int = 5


MODELS = {
    "smollm2": Model("SmolLM2-135M", "llama", {}),
    "llama-1b": Model("llama 1.1B", "llama", LLAMA_1B, new_tokens=16, rounds=3),
    "gpt2": Model("GPT-2 124M", "gpt2", {"vocab_size": 50257}),
    "moe": Model("Mixtral 0.5B", "mixtral", _MOE),
    "minilm": Model("MiniLM-L6", "bert", _MINILM, decodes=False),
    "tiny-llama": Model("tiny llama", "llama", LLAMA_TINY, new_tokens=4, rounds=1),
    "tiny-bert": Model("tiny bert", "bert", _BERT_TINY, decodes=False, rounds=1),
}


@dataclass(frozen=True)
class Facts:
    """The numbers of a checkpoint from which its memory traffic and operations are computed.

    Attributes:
        vocabulary: Vocabulary size.
        parameters: Number of all parameters.
        matrix: Parameters of matrices applied to every token, without the vocabulary projection.
        experts: Parameters of all experts' matrices together.
        experts_used: Share of the experts that one token is routed to.
        head: Parameters of the vocabulary projection.
        embedding: Parameters of tables that are only looked up.
        cache: Values that one token adds to the cache.
        attention: Multiplications for one pair of a query token and a key token, over all layers.
    """

    vocabulary: int
    parameters: int
    matrix: int
    experts: int
    experts_used: float
    head: int
    embedding: int
    cache: int
    attention: int

    def decode_share(self, batch: int) -> float:
        """Return the share of the weights (without embedding tables) that a step of `batch` tokens reads.

        An expert is read if any token is routed to it; routing is assumed to be uniform.
        """
        touched = 1 - (1 - self.experts_used) ** batch
        return (self.matrix + self.head + touched * self.experts) / (self.matrix + self.head + self.experts)

    def flops(self, batch: int, tokens: int, *, causal: bool) -> float:
        """Count a forward of `batch` sequences of `tokens`, with the last token's vocabulary projection."""
        weights = self.matrix + self.experts_used * self.experts
        pairs = tokens * (tokens + 1) / 2 if causal else tokens * tokens
        return 2.0 * batch * (weights * tokens + self.head + self.attention * pairs)


def make(name: str, folder: Path) -> None:
    """Write a model of `MODELS` as a checkpoint folder in bfloat16.

    Raises:
        SlipstreamError: Its weights come from a package that is not installed.
    """
    model = MODELS[name]
    if model.shape:
        _make_random(model, folder)
    else:
        _make_smollm2(folder)


def facts(folder: Path) -> Facts:
    """Count the parameters of a checkpoint with one safetensors file."""
    config = json.loads((folder / "config.json").read_text())
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    parameters = matrix = experts = head = embedding = table = 0
    for name, entry in header.items():
        count = 1
        for extent in entry["shape"]:
            count *= extent
        parameters += count
        if len(entry["shape"]) < 2:
            continue
        if "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
            embedding += count
            table = max(table, count)
        elif name.endswith("lm_head.weight"):
            head = count
        elif ".experts." in name:
            experts += count
        else:
            matrix += count
    heads = config.get("num_attention_heads") or config["n_head"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    hidden = config.get("hidden_size") or config["n_embd"]
    width = config.get("head_dim") or hidden // heads
    decodes = config["model_type"] != "bert"
    if decodes and not head:  # tied: the embedding table is also the vocabulary projection
        head, embedding = table, embedding - table
    used = config.get("num_experts_per_tok", 0) / config.get("num_local_experts", 1)
    return Facts(
        config["vocab_size"],
        parameters,
        matrix,
        experts,
        used,
        head,
        embedding,
        cache=2 * layers * width * (config.get("num_key_value_heads") or heads) if decodes else 0,
        attention=2 * layers * width * heads,
    )


def make_llama(shape: dict[str, Any], folder: Path, dtype: Any) -> None:
    """Write a Llama with normally distributed weights as a checkpoint folder."""
    _make_random(Model("", "llama", shape), folder, dtype)


def _make_random(model: Model, folder: Path, dtype: Any = None) -> None:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    dtype = dtype or torch.bfloat16
    untied = {} if model.family == "gpt2" else {"tie_word_embeddings": False}
    config = AutoConfig.for_model(model.family, **model.shape, **untied, dtype=dtype)
    kind = AutoModelForCausalLM if model.decodes else AutoModel
    with torch.device("meta"):
        built = kind.from_config(config)
    built.to(dtype).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in built.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        else:
            torch.nn.init.ones_(parameter)
    built.tie_weights()
    built.save_pretrained(folder)


def _make_smollm2(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.weights.gguf import cached_checkpoint, demo_model

    source = cached_checkpoint(demo_model())
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))

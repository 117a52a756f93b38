"""The quality that each weight format costs, compared with the same model in float32.

SmolLM2-135M-Instruct reads 2,000 tokens of Moby Dick in one pass: perplexity, and the divergence of its
predictions. Its weights come from a file with groups of 32 4-bit integers; the cost of `int4` for a model
that was never quantized shows in MiniLM, which embeds sentences of the same text: the cosine of its
embeddings.

Shapes: S tokens, V vocabulary, C hidden.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import slipstream
from benchmarks.assets import encoder_folder, moby_dick
from benchmarks.request import Request
from slipstream.engine.open import open_model, resolve_place

__all__ = ["measure"]

FORMATS: dict[str, str | dict[str, Any]] = {
    "float32": "auto",
    "bfloat16": "auto",
    "bf13": "bf13",
    "int8": "int8",
    "int8, inputs too": {"activation": {"enabled": True}},
    "int8, inputs too, asymmetric": {"activation": {"q_type": "asymmetric"}},
    "fp8": "fp8",
    "fp6": "fp6",
    "fp6-e3m2": "fp6-e3m2",
    "int4": "int4",
    "int4, inputs too": {"weight": {"format": "int4"}, "activation": {"enabled": True}},
    "int4, inputs too, asymmetric": {"weight": {"format": "int4"}, "activation": {"q_type": "asymmetric"}},
    "int4, groups of 64": {"weight": {"num_bits": 4, "q_groups": -64}},
    "int4, symmetric": {"weight": {"num_bits": 4, "q_type": "symmetric"}},
    "int8, embedding too": {"weight": {"format": "int8"}, "embedding": "int8"},
    "int4, head and embedding too": {"weight": {"format": "int4"}, "embedding": "int4"},
}
"""`quant` by the name of a row; a negative `q_groups` stands for the size of a group."""

_CHAPTER, _TOKENS, _SENTENCES = 54, 2000, 200


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results, with a row for each format."""
    yield "quality", {"rows": _rows(request.quick), "text": f"Moby Dick, chapter {_CHAPTER}"}


def _rows(quick: bool) -> list[dict[str, Any]]:
    folder = resolve_place("demo")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = moby_dick(_CHAPTER)
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, : 200 if quick else _TOKENS]
    sentences = [part.strip() for part in text.replace("\n", " ").split(".") if len(part) > 40]
    sentences = sentences[: 10 if quick else _SENTENCES]
    exact, _ = _log_probabilities(folder, ids, "float32")
    embedded = _embed(sentences, "float32")
    rows = []
    for name in FORMATS:
        found, size = _log_probabilities(folder, ids, name)
        cosine = F.cosine_similarity(_embed(sentences, name), embedded, dim=-1)
        divergence = (exact.exp() * (exact - found)).sum(-1)
        rows.append(
            {
                "format": name,
                "bytes": size,
                "perplexity": _perplexity(found, ids),
                "perplexity_change_percent": 100 * (_perplexity(found, ids) / _perplexity(exact, ids) - 1),
                "kl_divergence": float(divergence.mean()),
                "same_best_token_percent": 100 * float((found.argmax(-1) == exact.argmax(-1)).float().mean()),
                "encoder_cosine": float(cosine.mean()),
            }
        )
        del found, divergence
        gc.collect()
    return rows


def _settings(name: str, width: int) -> dict[str, Any]:
    """Return the arguments of `init_inference` for a row; `width` is the model's hidden size."""
    quant = FORMATS[name]
    if isinstance(quant, dict) and quant.get("weight", {}).get("q_groups", 1) < 0:
        quant = {"weight": {**quant["weight"], "q_groups": width // -quant["weight"]["q_groups"]}}
    return {"quant": quant, "dtype": torch.float32 if name == "float32" else torch.bfloat16}


def _log_probabilities(folder: str, ids: Tensor, name: str) -> tuple[Tensor, int]:
    """Return the log probabilities of every next token `(S - 1, V)`, and the bytes of all weights."""
    model = open_model(folder, torch.float32)
    width = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    engine = slipstream.init_inference(model, replace_with_kernel_inject=True, **_settings(name, width))
    logits: Tensor = engine(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1), _bytes(engine)


def _bytes(engine: slipstream.InferenceEngine) -> int:
    """Return the bytes of all weights, counting shared ones once."""
    report = engine.report()
    packed = sum(part.bytes for part in report.outside)
    layers = tuple(f"{layer.name}." for layer in report.layers)
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for path, tensor in engine.module.named_parameters()
        if not (tensor.is_meta or path.startswith(layers))
    }
    return sum(layer.bytes for layer in report.layers) + packed + sum(held.values())


def _perplexity(log_probabilities: Tensor, ids: Tensor) -> float:
    return float(F.nll_loss(log_probabilities, ids[0, 1:]).exp())


def _embed(sentences: list[str], name: str) -> Tensor:
    """Embed sentences by the encoder, `(sentences, C)`: the mean over the tokens of each."""
    folder = encoder_folder()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    settings = _settings(name, int(model.config.hidden_size))
    engine = slipstream.init_inference(model, replace_with_kernel_inject=True, **settings)
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")
    hidden: Tensor = engine(**inputs).last_hidden_state.float()
    mask = inputs["attention_mask"][..., None]
    return (hidden * mask).sum(1) / mask.sum(1)

"""What a rank holds of a model, counted from the memory of its tensors, beside its share of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.weights.packed import is_packed, packed_matrices
from slipstream.ops.linear import Weight
from slipstream.spec import Role
from tests.families.sweep import VARIANTS, peaked_model
from tests.parallel.pool import GROUPS

ROUTERS = {"gate", "router"}
"""Names within layers of what chooses experts."""

SMALL = 1024
"""Numbers of a matrix below which a layer that runs its own code keeps it whole."""

KEYS = re.compile(r"\b(k|v|key|value|k_proj|v_proj|qkv|qkv_proj|query_key_value|c_attn)(\.linear)?$")
LATENT = re.compile(r"\b(kv_a\w*|q_a\w*)$")


def shares(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a rank holds, that one process holds, and of these what is on every rank."""
    model = peaked_model(VARIANTS[index][1])
    given = {"dtype": torch.float32, "tensor_parallel": {"tp_group": GROUPS[size]}, **settings}
    return counted(slipstream.init_inference(copy.deepcopy(model), **given), model, size, settings)


def with_wide_heads(kind: str) -> nn.Module:
    """Three layers of four heads, which make up most of them."""
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=96, d_model=64, d_kv=64, d_ff=24, num_layers=3, num_heads=4, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config).eval()
    sizes = {"hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 64}
    config = transformers.LlamaConfig(
        vocab_size=96, num_attention_heads=4, num_key_value_heads=2 if kind == "grouped" else 4, **sizes
    )
    return transformers.LlamaForCausalLM(config).eval()


def wide_heads(kind: str, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A model whose heads are not dealt evenly in any of its layers, beside one process."""
    model = with_wide_heads(kind)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    row = shares_of(model, size, settings)
    engine, reference = row.pop("engine"), model
    if settings.get("quant"):
        reference = slipstream.init_inference(copy.deepcopy(model), dtype=torch.float32, **settings)
    ids = torch.arange(3, 12).view(1, -1)
    more = {"decoder_input_ids": ids} if kind == "t5" else {}
    with torch.no_grad():
        row["error"] = float((engine(ids, **more).logits - reference(ids, **more).logits).abs().max())
    row["tokens"] = [
        model.generate(ids, max_new_tokens=8, do_sample=False).tolist() for model in (engine, reference)
    ]
    found = engine.state_dict()
    if not settings.get("quant"):
        row["off"] = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    return row


def shares_of(model: Any, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """As `counted`, with the engine."""
    given = {"dtype": torch.float32, "tensor_parallel": {"tp_group": GROUPS[size]}, **settings}
    engine = slipstream.init_inference(copy.deepcopy(model), **given)
    return {"engine": engine, **counted(engine, copy.deepcopy(model), size, settings)}


def share(
    engine: slipstream.InferenceEngine, model: Any, size: int, settings: dict[str, Any]
) -> float | None:
    """The largest of all ranks' bytes as a multiple of their share.

    None of packed weights.
    """
    if settings.get("quant") or settings.get("dtype") in (torch.int8, "int8"):
        return None
    row = counted(engine, model, size, settings)
    everywhere = row["everywhere"]
    ratios: list[Any] = [None] * size
    own = (row["own"] - everywhere) / max((row["whole"] - everywhere) / size, 1.0)
    dist.all_gather_object(ratios, own, GROUPS[size])
    return float(max(ratios))


def counted(
    engine: slipstream.InferenceEngine, model: Any, size: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """The same of an engine that stands; `model` is a copy of what it was made of."""
    own = memory(_tensors(engine.module))
    layers = [row.name for row in engine.report().layers]
    everywhere = memory(_on_every_rank(model, layers)) + _several_times(engine, model, size)
    if not settings.get("quant"):
        return {"own": own, "whole": memory(model.parameters()), "everywhere": everywhere}
    alone = slipstream.init_inference(model, dtype=torch.float32, **settings).module
    # The multipliers of rows, which come last, are whole where a matrix is cut by its inputs.
    scales = [matrix.planes[-1] for matrix in _matrices(alone) if matrix.format != "plain"]
    return {"own": own, "whole": memory(_tensors(alone)), "everywhere": everywhere + memory(scales)}


def _several_times(engine: Any, model: Any, size: int) -> int:
    """Bytes above its share of what more than one rank has: kv heads where they are fewer, latents."""
    found = 0.0
    for block in (injected_state(part).block for part in engine.module.modules() if is_injected(part)):
        share, weight = block.share, block.weights.matrices.get(Role.QKV)
        if share is not None and weight is not None and share.whole.kv_heads < size:
            row = weight.nbytes / weight.shape[-2]
            found += 2 * (len(share.kv_heads) - share.whole.kv_heads / size) * share.spec.head_dim * row
    for row in engine.report().split:
        module = model.get_submodule(row.name)
        matrix = module._parameters.get("weight")
        if row.reason == "it is not a linear":  # of a hybrid's mixer
            own = (p for p in module._parameters.values() if p is not None and p.dim() > 1)
            found += memory(own) * (size - 1) / size
        elif row.how == "whole on every rank":
            own = (p for p in module._parameters.values() if p is not None and p.dim() > 1)
            found += memory(p for p in own if matrix is None or p.numel() < SMALL) * (size - 1) / size
        elif LATENT.search(row.name):
            found += matrix.nbytes * (size - 1) / size
        elif "several ranks" in row.how:
            held = engine.module.get_submodule(row.name)._parameters["weight"]
            found += held.nbytes - matrix.nbytes / size
    return int(found * size / (size - 1)) if size > 1 else 0


def memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which tensors lie, whatever part of it they show."""
    places = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(places.values())


def _matrices(module: nn.Module) -> Iterator[Weight]:
    """The packed ones, and those of blocks."""
    for part in module.modules():
        if is_packed(part):
            yield from (weight for weight, _ in packed_matrices(part).values())
        if is_injected(part):
            yield from injected_state(part).block.weights.matrices.values()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """All that a model is computed from: parameters, packed planes, and the blocks'."""
    for parameter in module.parameters():
        if not parameter.is_meta and parameter.stride() != (0,) * parameter.dim():
            yield parameter
    for matrix in _matrices(module):
        yield from matrix.planes
        yield from () if matrix.bias is None else (matrix.bias,)
    for part in filter(is_injected, module.modules()):
        for vector in injected_state(part).block.weights.vectors.values():
            yield from (t for t in (vector.weight, vector.bias) if t is not None)


def _on_every_rank(model: Any, layers: list[str]) -> Iterator[Tensor]:
    """Norms, biases and routers of layers, and what stands around them but for the rows of tokens."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # a model of sound
        table = None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tokens = {id(table.weight)} if isinstance(table, nn.Embedding) else set()
    tokens |= {id(head.weight)} if isinstance(head, nn.Linear) else set()
    for name, parameter in model.named_parameters():
        within = next((layer for layer in layers if name.startswith(layer + ".")), None)
        if within is None:
            if id(parameter) not in tokens:
                yield parameter
        elif parameter.dim() < 2 or set(name.removeprefix(within).split(".")) & ROUTERS:
            yield parameter

"""What ranks do in the tests of saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import slipstream
from slipstream.engine.save import save_packed
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import make
from tests.parallel.jobs import group, split

FUSED = {"replace_with_kernel_inject": True}


def tiny() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=101, num_key_value_heads=2, pad_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def tokens(engine: Any) -> torch.Tensor:
    made: torch.Tensor = engine.generate(torch.arange(3, 12)[None], max_new_tokens=8, do_sample=False)
    return made


def save(place: str, size: int) -> None:
    folder = Path(place)
    described = str(folder / "described")
    engine = split(tiny(), size, **FUSED, save_mp_checkpoint_path=described)
    engine.save_checkpoint(folder / "checkpoint")
    if dist.get_rank() == 0:
        packed = slipstream.init_inference(tiny(), dtype=torch.float32, quant="int8", **FUSED)
        save_packed(packed.module, packed.inference_config, folder / "packed")
    dist.barrier(group(size))


def load(place: str, size: int) -> dict[str, bool]:
    folder = Path(place)
    due = tokens(tiny())
    parallel: dict[str, Any] = {"tensor_parallel": {"tp_group": group(size)}} if size > 1 else {}
    given: dict[str, Any] = {"dtype": torch.float32, **FUSED}
    packed = slipstream.init_inference(folder / "packed", **given)
    with torch.device("meta"):
        hollow = tiny()
    description = str(folder / "described" / "ds_inference_config.json")
    found = {
        "checkpoint": tokens(slipstream.init_inference(folder / "checkpoint", **given, **parallel)),
        "described": tokens(slipstream.init_inference(tiny(), checkpoint=description, **given, **parallel)),
        "hollow": tokens(
            slipstream.init_inference(hollow, checkpoint=str(folder / "checkpoint"), **given, **parallel)
        ),
    }
    same = {name: torch.equal(made, due) for name, made in found.items()}
    streamed = slipstream.init_inference(folder / "packed", **given, **parallel)
    return same | {"packed": torch.equal(tokens(streamed), tokens(packed))}


def adapter_of(model: nn.Module, chosen: Callable[[str], bool], seed: int = 0) -> dict[str, torch.Tensor]:
    """A LoRA adapter of some of a model's linears, by peft's names."""
    generator, rank = torch.Generator().manual_seed(seed), 3
    made: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or not chosen(path):
            continue
        turned = type(module).__name__ == "Conv1D"
        outputs, inputs = reversed(weight.shape) if turned else weight.shape
        kind = "lora_embedding_" if isinstance(module, nn.Embedding) else "lora_"
        end = "" if isinstance(module, nn.Embedding) else ".weight"
        if isinstance(module, nn.Embedding):
            outputs, inputs = inputs, outputs
        made[f"base_model.model.{path}.{kind}A{end}"] = torch.randn(rank, inputs, generator=generator) * 0.1
        made[f"base_model.model.{path}.{kind}B{end}"] = torch.randn(outputs, rank, generator=generator) * 0.1
    return made


def load_adapter(engine: Any, adapter: dict[str, torch.Tensor], name: str = "one") -> None:
    turned = any("c_attn" in path for path in adapter)
    engine.load_adapter(
        adapter, name, {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "fan_in_fan_out": turned}
    )


def adapted(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Two adapters on ranks, one after the other and together, beside one process."""
    original = peaked_model(VARIANTS[index][1])
    original.set_attn_implementation("eager")
    linears = {path for path, module in original.named_modules() if is_linear(module)}
    engine = split(copy.deepcopy(original), size, **settings)
    alone = slipstream.init_inference(copy.deepcopy(original), dtype=torch.float32, **settings)
    ids = torch.arange(3, 14)[None] % 60 + 3
    errors, same, answers = [], [], []
    for name, seed in (("one", 1), ("two", 2)):
        for each in (engine, alone):
            load_adapter(each, adapter_of(original, linears.__contains__, seed), name)
    for names in ("one", "two", ["one", "two"], None):
        for each in (engine, alone):
            each.set_adapter(names)
        with torch.no_grad():
            due = alone(ids).logits
            answers.append(due)
            errors.append(float((engine(ids).logits - due).abs().max()) / max(float(due.abs().max()), 1.0))
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        same.append(torch.equal(engine.generate(ids, **options), alone.generate(ids, **options)))
        if names == "two":
            with torch.no_grad():
                mine, due = (each(ids, output_attentions=True) for each in (engine, alone))
            errors.append(
                float((mine.logits - due.logits).abs().max()) / max(float(due.logits.abs().max()), 1.0)
            )
            errors.append(float((mine.attentions[-1] - due.attentions[-1]).abs().max()))
    moved = min(float((answer - answers[-1]).abs().max()) for answer in answers[:-1])
    return {"error": max(errors), "same": all(same), "moved": moved}


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def other_names() -> None:
    """Ranks that put different adapters to work."""
    engine = split(tiny(), 2, **FUSED)
    load_adapter(engine, adapter_of(tiny(), lambda path: "q_proj" in path))
    engine.set_adapter("one" if dist.get_rank() else None)


def refused(what: str, place: str) -> None:
    if what == "flat experts":
        split(make("dbrx"), 2, **FUSED, quant="int8", save_mp_checkpoint_path=f"{place}/packed")
    engine = split(tiny(), 2, **FUSED)
    if what == "table":
        load_adapter(engine, adapter_of(tiny(), lambda path: path.endswith("embed_tokens")))
    load_adapter(engine, adapter_of(tiny(), lambda path: "q_proj" in path))
    engine.merge_adapter("one")


def save_planes(place: str, size: int, quant: str, dtype: torch.dtype, settings: dict[str, Any]) -> list[int]:
    """Save packed weights; tokens of the engine that did."""
    described = str(Path(place) / f"{quant}")
    given = {"quant": quant, "dtype": dtype, **settings}
    engine = split(tiny(), size, **given, save_mp_checkpoint_path=described)
    made: list[int] = tokens(engine)[0].tolist()
    return made


def planes(place: str, size: int, quant: str, dtype: torch.dtype, settings: dict[str, Any]) -> dict[str, Any]:
    """Load them; the tokens, and those of one process that packs the original."""
    parallel: dict[str, Any] = {"tensor_parallel": {"tp_group": group(size)}} if size > 1 else {}
    given: dict[str, Any] = {"dtype": dtype, **settings}
    loaded = slipstream.init_inference(Path(place) / quant, **given, **parallel)
    alone = slipstream.init_inference(tiny(), quant=quant, **given)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        error = float((loaded(ids).logits - alone(ids).logits).abs().max())
    own = loaded.state_dict()
    same = [name for name, t in alone.state_dict().items() if not torch.equal(t, own[name])]
    return {
        "tokens": tokens(loaded)[0].tolist(),
        "due": tokens(alone)[0].tolist(),
        "off": same,
        "error": error,
    }


def offloaded(place: str, size: int, settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Layers that are streamed on ranks, beside one process without."""
    zero = {"stage": 3, "offload_param": {"device": device, "nvme_path": place if device == "nvme" else None}}
    given: dict[str, Any] = {"dtype": torch.float32, **settings, **FUSED}
    source: Any = tiny()
    if device == "cpu":
        folder = Path(place) / "model"
        if dist.get_rank() == 0:
            source.save_pretrained(folder)
        dist.barrier(group(size))
        source = folder
    saved = str(Path(place) / "saved")
    engine = split(source, size, **given, zero=zero, save_mp_checkpoint_path=saved)
    alone = slipstream.init_inference(tiny(), **given)
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        error = float((engine(ids).logits - alone(ids).logits).abs().max())
    state, due = engine.state_dict(), alone.state_dict()
    return {
        "error": error,
        "same": torch.equal(tokens(engine), tokens(alone)),
        "state": max(float((state[name] - tensor).abs().max()) for name, tensor in due.items()),
        "text": str(engine.report()),
        "saved": _loads_as(Path(saved), due) if settings else (Path(saved) / "model.safetensors").exists(),
    }


def _loads_as(folder: Path, due: dict[str, torch.Tensor]) -> bool:
    found = slipstream.init_inference(folder, dtype=torch.float32, **FUSED).state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in due.items())

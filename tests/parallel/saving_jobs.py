"""What ranks do in the tests of saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import slipstream
from slipstream.engine.save import save_packed
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


def refused(place: str, what: str) -> None:
    if what == "zero":
        split(tiny(), 2, **FUSED, zero={"offload_param": {"device": "nvme", "nvme_path": place}})
    split(tiny(), 2, **FUSED).load_adapter({}, "one", {})


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

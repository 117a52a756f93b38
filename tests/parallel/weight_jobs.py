"""What ranks do with weights in tests: stream them from files, write them anew, save and adapt them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from slipstream.devices.cpu import CpuDevice
from slipstream.errors import SlipstreamError
from slipstream.weights.heap import give_back
from tests.engine.test_ties import HEAD, TABLE, both, tied
from tests.families.sweep import NEW_TOKENS, VARIANTS, label, peaked_model
from tests.parallel.jobs import answer_of, group, inputs_of, parameter_bytes, split


def streamed(index: int, size: int, settings: dict[str, Any], place: str) -> dict[str, Any]:
    """A model without values that ranks fill from a folder, beside ranks that were handed the model."""
    original = peaked_model(VARIANTS[index][1])
    folder = Path(place) / f"{index}"
    if dist.get_rank() == 0:
        original.save_pretrained(folder, max_shard_size="100KB")  # type: ignore[operator]
    dist.barrier(group(size))
    with torch.device("meta"):
        hollow = type(original)(copy.deepcopy(original.config)).eval()
    reference: Any = split(copy.deepcopy(original), size, **settings)
    engine: Any = split(hollow, size, checkpoint=str(folder), **settings)
    rows = [(row.name, row.how) for row in engine.report().split]
    return compared(reference, engine, original) | {"rows": rows}


def damaged(size: int, what: str, settings: dict[str, Any], place: str) -> dict[str, Any]:
    """An empty model that ranks fill from copies of their own, of which the last one is not as it was."""
    index = next(i for i, variant in enumerate(VARIANTS) if label(variant) == "llama")
    original, folder = peaked_model(VARIANTS[index][1]), Path(place) / f"{dist.get_rank()}" / "copy"
    folder.mkdir(parents=True)
    original.config.save_pretrained(folder)
    file, state = folder / "model.safetensors", original.state_dict()
    save_file(state, file)
    if dist.get_rank() == size - 1:
        name = "model.layers.1.mlp.down_proj.weight"
        if what == "cut short":
            file.write_bytes(file.read_bytes()[:-100])
        else:
            rest = {key: tensor for key, tensor in state.items() if key != name}
            other = state[name] * (torch.nan if what == "NaN" else 2.0)
            save_file(rest if what == "lacking" else {**rest, name: other}, file)
    with torch.device("meta"):
        hollow = type(original)(copy.deepcopy(original.config)).eval()
    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        try:
            split(hollow, size, checkpoint="copy", **settings)
        except SlipstreamError as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said, "empty": all(parameter.is_meta for parameter in hollow.parameters())}


def refreshed(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """An engine of other values that is given a model's, beside ranks that were handed the model."""
    _, tiny = VARIANTS[index]
    original, other = peaked_model(tiny), peaked_model(tiny, seed=5)
    reference: Any = split(copy.deepcopy(original), size, **settings)
    engine: Any = split(other, size, **settings)
    engine.refresh_weights(original.state_dict())
    own, got = reference.state_dict(), engine.state_dict()
    same = own.keys() == got.keys() and all(torch.equal(own[name], got[name]) for name in own)
    return compared(reference, engine, original) | {"state": same}


def reloaded(index: int, size: int, settings: dict[str, Any], place: str) -> dict[str, Any]:
    """The same from a folder, which other ranks saved."""
    _, tiny = VARIANTS[index]
    original, other = peaked_model(tiny), peaked_model(tiny, seed=5)
    reference: Any = split(copy.deepcopy(original), size, **settings)
    folder = Path(place) / f"saved{index}"
    split(copy.deepcopy(original), size).save_checkpoint(folder)
    engine: Any = split(other, size, **settings)
    engine.load_checkpoint(folder)
    return compared(reference, engine, original)


def reloaded_ties(size: int, settings: dict[str, Any], differ: bool, place: str) -> dict[str, Any]:
    """A tied model that is given a checkpoint with the head beside the table, of its values or others."""
    folder = Path(place) / "both"
    if dist.get_rank() == 0:
        both(folder, differ=differ)
    dist.barrier(group(size))
    engine: Any = split(tied(seed=5), size, **settings)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    said = ""
    try:
        engine.load_checkpoint(folder)
    except SlipstreamError as error:
        said = f"{type(error).__name__}: {error}"
    reference: Any = split(tied(), size, **settings)
    wanted, got = before if said else reference.state_dict(), engine.state_dict()
    if differ and not said:
        given = load_file(folder / "model.safetensors")
        errors = [(got[name] - given[name]).abs().max() / given[name].abs().max() for name in (HEAD, TABLE)]
        return {"said": said, "state": float(max(errors)) < 0.1}
    return {"said": said, "state": all(torch.equal(wanted[name], got[name]) for name in wanted)}


def refused(size: int, what: str, settings: dict[str, Any], place: str) -> dict[str, Any]:
    """New weights of which the last rank's cannot be written."""
    index = next(i for i, variant in enumerate(VARIANTS) if label(variant) == "llama")
    _, tiny = VARIANTS[index]
    engine: Any = split(peaked_model(tiny), size, **settings)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    state = dict(peaked_model(tiny, seed=5).state_dict())
    name = next(name for name in state if "down_proj" in name)
    odd = dist.get_rank() == size - 1
    if odd and what == "values":
        state[name] = state[name] + 1
    elif odd and what == "name":
        del state[name]
    elif odd and what == "nan":
        state[name] = state[name] * float("nan")
    elif odd and what == "shape":
        state[name] = state[name][:-1]
    try:
        if what == "file":
            peaked_model(tiny, seed=5).save_pretrained(Path(place) / f"{dist.get_rank()}")  # type: ignore[operator]
            engine.load_checkpoint(Path(place) / ("nowhere" if odd else f"{dist.get_rank()}"))
        else:
            engine.refresh_weights(state)
    except SlipstreamError as error:
        kept = engine.state_dict()
        same = all(torch.equal(kept[name], tensor) for name, tensor in before.items())
        return {"kind": type(error).__name__, "message": str(error), "as it was": same}
    return {"kind": "nothing", "message": "", "as it was": False}


def compared(reference: Any, engine: Any, original: Any) -> dict[str, Any]:
    """The largest difference of two engines' answers, and whether they choose the same tokens."""
    errors = []
    with torch.no_grad():
        for given, _ in inputs_of(original):
            answers = []
            for one in (reference, engine):
                torch.manual_seed(1)  # some shuffle their patches
                answers.append(answer_of(one(**given)))
            errors.append(float((answers[0] - answers[1]).abs().max()))
    same = True
    if hasattr(original, "generate") and original.can_generate():
        given = {n: t for n, t in inputs_of(original)[0][0].items() if not n.startswith("decoder_")}
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        same = torch.equal(reference.generate(**given, **options), engine.generate(**given, **options))
    return {"error": max(errors), "same": same}


def grown(size: int, settings: dict[str, Any], place: str) -> dict[str, float]:
    """MB of a rank's layers, of one whole layer, and by which memory grew while they were read.

    The files have a matrix per expert, the model stacks them.
    """
    folder, device = Path(place) / "experts", CpuDevice()
    config = transformers.MixtralConfig(
        vocab_size=500, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_local_experts=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    if dist.get_rank() == 0:
        transformers.MixtralForCausalLM(config).save_pretrained(folder)
    dist.barrier(group(size))
    with torch.device("meta"):
        hollow = transformers.MixtralForCausalLM(config).eval()
    layer = sum(p.numel() * 4 for p in hollow.model.layers[0].parameters())
    give_back()
    device.reset_peak()
    before = device.memory().used
    engine = split(hollow, size, checkpoint=str(folder), **settings)
    peak = device.memory().peak - before
    own = parameter_bytes(engine)
    return {"own": own / 1e6, "layer": layer / 1e6, "peak": peak / 1e6}

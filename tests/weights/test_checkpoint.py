"""Every form of checkpoint gives the same outputs, and a bad one is one error that names file and key."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import slipstream
from slipstream.compat import OnDevice
from slipstream.errors import WeightError
from slipstream.model.fused.state import is_injected, is_untouched
from tests.helpers.models import KINDS, make, prompt

SHARDS: dict[str, list[tuple[str, int]]] = {
    "llama": [
        ("q_proj", 0),
        ("k_proj", 0),
        ("v_proj", 0),
        ("o_proj", 1),
        ("gate", 0),
        ("up", 0),
        ("down", 1),
    ],
    "bloom": [
        ("query_key_value", 0),
        ("self_attention.dense.weight", 1),
        ("dense_h_to_4h", 0),
        ("dense_4h_to_h.weight", 1),
        ("word_embeddings.weight", 0),
    ],
    "gpt2": [("c_attn", -1), ("attn.c_proj.weight", 0), ("c_fc", -1), ("mlp.c_proj.weight", 0)],
}
"""Which tensors are split over ranks, and along which axis."""
FUSED = ("query_key_value", "c_attn")


def hollow(model: Any) -> Any:
    with OnDevice(torch.bfloat16, device="meta"):
        return type(model)(copy.deepcopy(model.config)).eval()


def state_of(model: Any) -> dict[str, Tensor]:
    ties = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {n: t.clone() for n, t in model.state_dict().items() if n not in ties}


def thirds(tensor: Tensor, heads: int, *, together: bool, version: float, axis: int) -> Tensor:
    """A fused q, k and v of the model in Megatron's order; `axis` has the rows."""
    rows = tensor.movedim(axis, 0)
    shape = (heads, 3, -1) if together else (3, heads, rows.shape[0] // heads // 3)
    whole = rows.reshape(*shape, *rows.shape[1:])
    whole = whole if together else whole.movedim(0, 1)  # (heads, 3, d)
    order = whole.movedim(1, 0) if version == 0 else whole.movedim(1, 2) if version == 1.0 else whole
    return order.flatten(0, 2).movedim(0, axis).contiguous()


def slices(kind: str, model: Any, ranks: int, *, version: float | None = None) -> list[dict[str, Tensor]]:
    """What each rank would have written: of a fused q, k and v, its own heads."""
    out: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for name, tensor in state_of(model).items():
        axis = next((axis for part, axis in SHARDS[kind] if part in name), None)
        axis = 0 if axis == -1 and tensor.dim() == 1 else axis
        if axis is None:
            shares = [tensor] * ranks
        elif any(part in name for part in FUSED):
            together = kind == "bloom"
            heads, rows = model.config.num_attention_heads, tensor.movedim(axis, 0)
            rest = rows.shape[1:]
            if together:
                per_rank = rows.reshape(heads, -1, *rest).chunk(ranks)
                shares = [share.flatten(0, 1).movedim(0, axis) for share in per_rank]
            else:
                per_rank = rows.reshape(3, heads, -1, *rest).chunk(ranks, dim=1)
                shares = [share.flatten(0, 2).movedim(0, axis) for share in per_rank]
            if version is not None:
                own = {"together": together, "version": version, "axis": axis}
                shares = [thirds(share, heads // ranks, **own) for share in shares]
        else:
            shares = list(tensor.chunk(ranks, dim=axis))
        for rank, share in enumerate(shares):
            out[rank][name] = share.clone()
    return out


def describe(folder: Path, model: Any, **entries: Any) -> Path:
    state = state_of(model)
    names = sorted(state)
    torch.save({n: state[n] for n in names[::2]}, folder / "a.bin")
    save_file({n: state[n] for n in names[1::2]}, folder / "b.safetensors")
    table = {"type": "ds_model", "version": 1.0, "checkpoints": ["a.bin", "b.safetensors"], **entries}
    (folder / "ds.json").write_text(json.dumps(table))
    return folder / "ds.json"


def bins(folder: Path, model: Any) -> Path:
    state = state_of(model)
    halves = {f"pytorch_model-{i}.bin": sorted(state)[i::2] for i in range(2)}
    for file, names in halves.items():
        torch.save({n: state[n] for n in names}, folder / file)
    places = {name: file for file, names in halves.items() for name in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def tagged(folder: Path, model: Any) -> Path:
    (folder / "step7").mkdir()
    for rank, part in enumerate(slices("llama", model, 2)):
        torch.save(
            {"module": part, "ds_version": "0.7"}, folder / f"step7/mp_rank_{rank:02d}_model_states.pt"
        )
    (folder / "latest").write_text("step7\n")
    return folder


def saved(name: str, wrap: Callable[[dict[str, Tensor]], Any] = lambda s: s, **options: Any) -> Any:
    def write(folder: Path, model: Any) -> Path:
        torch.save(wrap(state_of(model)), folder / name, **options)
        return folder / name

    return write


def folder_of(**options: Any) -> Any:
    def write(folder: Path, model: Any) -> Path:
        model.save_pretrained(folder, **options)
        return folder

    return write


def two_lists(folder: Path, model: Any) -> dict[str, Any]:
    ranks = slices("llama", model, 2)
    whole = {n: t for n, t in ranks[0].items() if "embed" in n or "norm" in n or "lm_head" in n}
    save_file(whole, folder / "non_tp.safetensors")
    for rank, part in enumerate(ranks):
        torch.save({n: t for n, t in part.items() if n not in whole}, folder / f"tp_{rank}.pt")
    files = {"non_tp": ["non_tp.safetensors"], "tp": [["tp_0.pt"], "tp_1.pt"]}
    return {"type": "ds_model", "version": 1.0, "checkpoints": files, "base_dir": str(folder)}


FORMS: dict[str, Callable[[Path, Any], Any]] = {
    "a safetensors folder": folder_of(),
    "a sharded safetensors folder": folder_of(max_shard_size="20KB"),
    "a bin": saved("pytorch_model.bin"),
    "a folder with a bin": lambda folder, model: saved("pytorch_model.bin")(folder, model).parent,
    "a folder of sharded bins": bins,
    "a file of torch before 1.6": saved("old.pt", _use_new_zipfile_serialization=False),
    "a state dict under module": saved("a.pt", lambda state: {"module": state, "step": 3}),
    "a state dict in nested tables": saved(
        "b.pt",
        lambda s: {
            "model": {
                "model": {n[6:]: t for n, t in s.items() if n.startswith("model.")},
                "lm_head": {"weight": s["lm_head.weight"]},
            }
        },
    ),
    "names with a wrapper's prefix": saved("c.pt", lambda s: {f"module.{n}": t for n, t in s.items()}),
    "a description": describe,
    "a description of non_tp and tp": two_lists,
    "a folder with tags and two ranks": tagged,
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("llama")


@pytest.fixture(scope="module")
def expected(llama: Any) -> Tensor:
    return logits(slipstream.init_inference(copy.deepcopy(llama), dtype=torch.float32))


def logits(engine: Any) -> Tensor:
    return engine(input_ids=prompt()).logits


@pytest.mark.parametrize("inject", [True, False], ids=["injected", "plain"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_outputs(
    form: str, inject: bool, tmp_path: Path, llama: Any, expected: Tensor
) -> None:
    place = FORMS[form](tmp_path, llama)
    live = form == "names with a wrapper's prefix"  # once a model with other values
    target = make("llama", seed=5) if live else hollow(llama)
    engine = slipstream.init_inference(
        target, dtype=torch.float32, checkpoint=place, replace_with_kernel_inject=inject
    )
    torch.testing.assert_close(logits(engine), expected, rtol=1e-4, atol=1e-5)  # float32, kernels apart
    assert engine.module is target
    # Nothing was moved once a layer was fused, which would have it run its original code.
    assert all(is_untouched(module) for module in engine.module.modules() if is_injected(module))
    own = llama.state_dict()
    for name, tensor in engine.state_dict().items():
        assert torch.equal(tensor, own[name]), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixtral"])
@pytest.mark.parametrize("quant", ["int4", None], ids=["int4", "plain"])
def test_a_streamed_model_is_bit_for_bit_the_model_in_memory(
    kind: str, quant: str | None, tmp_path: Path
) -> None:
    model = make(kind)
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}
    settings |= {} if quant is None else {"quant": quant}
    model.save_pretrained(tmp_path)
    target = hollow(model)
    whole = slipstream.init_inference(model, **settings)
    streamed = slipstream.init_inference(target, checkpoint=str(tmp_path), **settings)
    assert streamed.report().level == "block"
    own, got = whole.state_dict(), streamed.state_dict()
    assert own.keys() == got.keys() and all(torch.equal(own[name], got[name]) for name in own)
    # The order of MKL's sums depends on where tensors lie.
    torch.testing.assert_close(logits(streamed), logits(whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["bloom", "gpt2"])
def test_slices_of_megatron_are_joined_in_the_models_order(
    kind: str, version: float | None, tmp_path: Path
) -> None:
    model = make(kind)
    for rank, part in enumerate(slices(kind, model, 2, version=version)):
        torch.save({"model": part, "iteration": 1}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    place: Any = str(tmp_path)
    if version is not None:
        files = sorted(path.name for path in tmp_path.iterdir())
        place = {"type": "Megatron", "version": version, "checkpoints": files, "mp_size": 2}
    engine = slipstream.init_inference(
        hollow(model), dtype=torch.float32, checkpoint=place, base_dir=str(tmp_path)
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], tensor), name


def test_a_list_is_slices_where_training_mp_size_says_so(
    tmp_path: Path, llama: Any, expected: Tensor
) -> None:
    names = []
    for rank, part in enumerate(slices("llama", llama, 2)):
        save_file(part, tmp_path / f"{rank}.safetensors")
        names.append(f"{rank}.safetensors")
    place = {"checkpoint_dir": None}
    (tmp_path / "d.json").write_text(json.dumps({"type": "ds_model", "version": 1.0, "checkpoints": names}))
    place = {"checkpoint_dir": str(tmp_path / "d.json")}
    engine = slipstream.init_inference(
        hollow(llama), dtype=torch.float32, checkpoint_config=place, training_mp_size=2
    )
    torch.testing.assert_close(logits(engine), expected, rtol=1e-4, atol=1e-5)


class Intruder:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("intruder.txt"),))


def spoil(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, dict[str, Any]], Any]:
    def write(folder: Path, state: dict[str, Any]) -> Any:
        change(state)
        torch.save(state, folder / "w.bin")
        return folder / "w.bin"

    return write


def cut(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "w.bin")
    (folder / "w.bin").write_bytes((folder / "w.bin").read_bytes()[:9000])
    return folder / "w.bin"


def cut_safetensors(folder: Path, state: dict[str, Any]) -> Path:
    save_file(state, folder / "w.safetensors")
    (folder / "w.safetensors").write_bytes((folder / "w.safetensors").read_bytes()[:-9])
    return folder / "w.safetensors"


def elsewhere(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "w.bin")
    (folder / "inner").mkdir()
    table = {"type": "ds_model", "version": 0, "checkpoints": ["../w.bin"]}
    (folder / "inner/w.json").write_text(json.dumps(table))
    return folder / "inner/w.json"


def index_elsewhere(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "w.bin")
    (folder / "inner").mkdir()
    table = {"weight_map": dict.fromkeys(state, str(folder / "w.bin"))}
    (folder / "inner/pytorch_model.bin.index.json").write_text(json.dumps(table))
    return folder / "inner"


def bare(folder: Path, state: dict[str, Any]) -> Path:
    (folder / "w.bin").write_bytes(pickle.dumps(Intruder(), protocol=2))
    return folder / "w.bin"


NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
BAD: dict[str, tuple[Callable[[Path, dict[str, Any]], Any], str]] = {
    "a file cut short": (cut, r"w\.bin is cut short or damaged"),
    "a safetensors file cut short": (cut_safetensors, r"w\.safetensors is cut short"),
    "a missing key": (spoil(lambda s: s.pop(NORM)), f"w.bin does not fit the model: it lacks {NORM}"),
    "a key too many": (spoil(lambda s: s.update(extra=s[NORM])), "also has extra"),
    "another shape": (
        spoil(lambda s: s.update({UP: s[UP][:40]})),
        r"w\.bin: model.layers.1.mlp.up_proj.weight "
        r"has the shape \(40, 32\)",
    ),
    "a NaN": (spoil(lambda s: s[UP].view(-1)[7].fill_(torch.nan)), r"w\.bin: .*up_proj.weight holds NaN"),
    "integers": (spoil(lambda s: s.update({UP: s[UP].to(torch.int8)})), "is torch.int8, and the model's"),
    "code in a pickle": (
        spoil(lambda s: s.update(code=Intruder())),
        r"w\.bin holds more than tensors \(\S+\): unpickling would run its code, none of which was run",
    ),
    "a bare pickle": (bare, r"w\.bin holds more than tensors \(\S+\):"),
    "no tensors": (spoil(lambda s: s.clear()), "holds no tensors"),
    "a path outside of the folder": (elsewhere, r"names \.\./w\.bin, which is outside of"),
    "an index that leads elsewhere": (index_elsewhere, "which is outside of"),
    "a place that is not there": (lambda folder, state: folder / "nowhere", "there is no such checkpoint"),
    "an empty folder": (lambda folder, state: folder, "has no model.safetensors"),
    "a description of another type": (
        lambda folder, state: {"type": "gguf", "version": 0, "checkpoints": ["x"]},
        "must be one of Megatron",
    ),
    "a description without files": (
        lambda folder, state: {"type": "bloom", "version": 0},
        "lacks checkpoints",
    ),
}


@pytest.mark.parametrize("live", [True, False], ids=["live", "meta"])
@pytest.mark.parametrize("problem", BAD)
def test_a_bad_checkpoint_is_refused_and_the_model_is_as_it_was(
    problem: str, live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write, words = BAD[problem]
    place = write(tmp_path, state_of(llama))
    target = make("llama", seed=9) if live else hollow(llama)
    before = {name: (p, p.is_meta or p.clone()) for name, p in target.named_parameters()}
    with pytest.raises(WeightError, match=words) as refusal:
        slipstream.init_inference(
            target, dtype=torch.float32, checkpoint=place, replace_with_kernel_inject=True
        )
    assert "\n" not in str(refusal.value) and "weights_only" not in str(refusal.value)
    for name, parameter in target.named_parameters():
        own, values = before[name]
        assert parameter is own and parameter.is_meta is (not live)
        assert not live or torch.equal(parameter, values)
    assert not (tmp_path / "intruder.txt").exists()


def test_a_layer_that_disagrees_leaves_a_meta_model_on_meta(
    tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagree(*arguments: Any, **options: Any) -> float:
        raise slipstream.InjectionError("the second layer is another one")

    torch.save(state_of(llama), tmp_path / "w.bin")
    target = hollow(llama)
    monkeypatch.setattr("slipstream.model.fuse.compare", disagree)
    with pytest.raises(slipstream.InjectionError):
        slipstream.init_inference(
            target, dtype=torch.float32, checkpoint=tmp_path / "w.bin", replace_with_kernel_inject=True
        )
    assert all(p.is_meta for p in target.parameters())
    assert all(buffer.is_meta for buffer in target.buffers())


def test_buffers_that_nobody_saves_are_computed_again(tmp_path: Path, llama: Any) -> None:
    torch.save(state_of(llama), tmp_path / "w.bin")
    target = hollow(llama)
    assert all(buffer.is_meta for buffer in target.buffers())
    engine = slipstream.init_inference(target, dtype=torch.bfloat16, checkpoint=tmp_path / "w.bin")
    own = dict(llama.named_buffers())
    assert own and all(torch.equal(buffer, own[name]) for name, buffer in engine.module.named_buffers())


def test_the_file_may_go_once_the_engine_stands(tmp_path: Path, llama: Any, expected: Tensor) -> None:
    (tmp_path / "w").mkdir()
    llama.save_pretrained(tmp_path / "w")
    engine = slipstream.init_inference(
        hollow(llama), dtype=torch.float32, checkpoint=str(tmp_path / "w"), replace_with_kernel_inject=True
    )
    file = tmp_path / "w/model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)  # a mapped page would show this
    shutil.rmtree(tmp_path / "w")
    torch.testing.assert_close(logits(engine), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["place", "checkpoint"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("differ", [False, True])
def test_a_tensor_in_two_files_has_one_value(
    differ: bool, kind: str, by: str, tmp_path: Path, llama: Any, expected: Tensor
) -> None:
    """An index names the files, and both are read whole; transformers would take the one that comes last."""
    llama.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = list(state)
    shards = {"a": names[: len(names) // 2], "b": names[len(names) // 2 :]}
    stem = "model" if kind == "safetensors" else "pytorch_model"
    table = {name: f"{stem}-{shard}.{kind}" for shard, own in shards.items() for name in own}
    extra = {names[0]: state[names[0]] * 2 if differ else state[names[0]]}
    for shard, own in shards.items():
        tensors = {name: state[name].clone() for name in own} | (extra if shard == "b" else {})
        if kind == "safetensors":
            save_file(tensors, tmp_path / f"{stem}-{shard}.{kind}", {"format": "pt"})
        else:
            torch.save(tensors, tmp_path / f"{stem}-{shard}.{kind}")
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}

    def made() -> Any:
        if by == "place":
            return slipstream.init_inference(tmp_path, **settings)
        return slipstream.init_inference(copy.deepcopy(llama), checkpoint=str(tmp_path), **settings)

    if differ:
        with pytest.raises(WeightError, match=f"{names[0]}.*with different values"):
            made()
    else:
        torch.testing.assert_close(logits(made()), expected, rtol=1e-4, atol=1e-4)


def test_of_two_generations_in_a_folder_the_one_is_read_that_transformers_reads(
    tmp_path: Path, llama: Any, expected: Tensor
) -> None:
    older = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.mul_(0.5)
    older.save_pretrained(tmp_path, max_shard_size="20KB")  # transformers leaves the index behind
    torch.save(older.state_dict(), tmp_path / "pytorch_model.bin")
    save_file(state_of(llama), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors.index.json").is_file()
    same = type(llama).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(same(input_ids=prompt()).logits, llama(input_ids=prompt()).logits)
    for opened in (
        slipstream.init_inference(str(tmp_path), dtype=torch.float32),
        slipstream.init_inference(hollow(llama), dtype=torch.float32, checkpoint=str(tmp_path)),
    ):
        torch.testing.assert_close(opened(input_ids=prompt()).logits, expected, rtol=1e-4, atol=1e-4)


def test_two_files_of_one_rank_are_refused(tmp_path: Path, llama: Any) -> None:
    for name in ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt", "mp_rank_1_model_states.pt"):
        torch.save({"module": state_of(llama)}, tmp_path / name)
    with pytest.raises(WeightError, match="are both of rank 1"):
        slipstream.init_inference(copy.deepcopy(llama), checkpoint=str(tmp_path), dtype=torch.float32)


def test_two_tensors_of_one_name_in_a_file_are_refused(tmp_path: Path, llama: Any) -> None:
    state = state_of(llama)
    head, _, leaf = UP.rpartition(".")
    torch.save(state | {head: {leaf: state[UP] * 2}}, tmp_path / "w.bin")
    with pytest.raises(WeightError, match=f"two tensors called {UP}"):
        slipstream.init_inference(
            copy.deepcopy(llama), checkpoint=str(tmp_path / "w.bin"), dtype=torch.float32
        )

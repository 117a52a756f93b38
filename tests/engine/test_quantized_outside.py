"""A quantized vocabulary projection and embedding: at every level, tied and untied, saved and loaded."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.formats import FORMATS
from slipstream.model.weights.packed import is_packed, weight_of
from tests.engine.test_quantized import close_to_packed
from tests.helpers.models import inject, left_padded, make, prompt, roads

NAMES = [name for name in FORMATS if name != "plain"]
LEVELS = pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def only(head: str = "none", embedding: str = "none") -> dict[str, Any]:
    """Settings that quantize nothing but these two."""
    return {"quant": {"weight": {"enabled": False}, "head": head, "embedding": embedding}}


def llama(*, tied: bool, **options: Any) -> Any:
    return make("llama", tie_word_embeddings=tied, hidden_size=64, **options)


def exact(original: Any, head: Tensor | None, embedding: Tensor | None) -> Any:
    """The original with other values in the two."""
    model = copy.deepcopy(original)
    own = model.get_input_embeddings().weight.detach()
    model.get_output_embeddings().weight = nn.Parameter(
        own.clone() if model.config.tie_word_embeddings else model.get_output_embeddings().weight.detach()
    )
    if head is not None:
        model.get_output_embeddings().weight.data = head
    if embedding is not None:
        model.get_input_embeddings().weight.data = embedding
    return model


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=ids).logits
    return out


@TIED
@LEVELS
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_head_projects_by_the_unpacked_matrix(name: str, injected: bool, tied: bool) -> None:
    original = llama(tied=tied)
    engine = inject(original, replace_with_kernel_inject=injected, **only(head=name))
    own = original.lm_head.weight.detach()
    dense = FORMATS[name].weight(own, None).dense()
    model = exact(original, dense, None)
    torch.testing.assert_close(logits(engine, prompt()), logits(model, prompt()), atol=1e-4, rtol=1e-4)
    assert not torch.equal(dense, own)
    assert torch.equal(engine.module.state_dict()["lm_head.weight"], dense)
    assert torch.equal(
        engine.module.model.embed_tokens.weight, own if tied else original.model.embed_tokens.weight
    )
    ids, mask = left_padded()
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with roads(engine) as taken:
        found = engine.generate(**asked)
    assert taken.taken == ("engine" if injected else "compatible")
    assert torch.equal(found, model.generate(**asked))


@LEVELS
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_embedding_looks_up_unpacked_rows(name: str, injected: bool) -> None:
    original = llama(tied=False)
    engine = inject(original, replace_with_kernel_inject=injected, **only(embedding=name))
    dense = FORMATS[name].weight(original.model.embed_tokens.weight.detach(), None).dense()
    model = exact(original, None, dense)
    torch.testing.assert_close(logits(engine, prompt()), logits(model, prompt()), atol=1e-4, rtol=1e-4)
    embed = engine.module.model.embed_tokens
    ids = torch.tensor([[3, 99, 0], [5, 3, 3]])
    assert torch.equal(embed(ids), dense[ids])
    assert torch.equal(embed.weight, dense) and isinstance(embed, nn.Embedding)
    for bad in (100, -1):
        with pytest.raises(IndexError):
            embed(torch.tensor([bad]))
    asked = {"input_ids": prompt(), "max_new_tokens": 6, "do_sample": False}
    with roads(engine) as taken:
        found = engine.generate(**asked)
    assert taken.taken == ("engine" if injected else "compatible")
    assert torch.equal(found, model.generate(**asked))
    assert engine.module.device == torch.device("cpu") and engine.module.dtype == torch.float32


@LEVELS
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(0.5),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: weight.__setitem__(0, 0.0),
        lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
        lambda weight: torch.nn.init.zeros_(weight),
        lambda weight: torch.mul(weight, 2, out=weight),
        lambda weight: torch._foreach_mul_([weight], 2.0),
    ],
    ids=["in place", "its data", "a row", "new data", "an initializer", "as an output", "in a list"],
)
def test_rows_that_were_unpacked_to_be_read_refuse_writes(write: Any, injected: bool) -> None:
    engine = inject(make("llama"), quant={"embedding": "int8"}, replace_with_kernel_inject=injected)
    weight = engine.module.get_input_embeddings().weight
    assert isinstance(weight, torch.nn.Parameter)
    before = weight.clone()
    with torch.no_grad(), pytest.raises(slipstream.UnsupportedError, match="changes nothing"):
        write(weight)
    assert torch.equal(engine.module.get_input_embeddings().weight, before)


@LEVELS
def test_a_tied_pair_shares_one_set_of_planes_and_frees_the_tensor(injected: bool) -> None:
    original = llama(tied=True)
    engine = inject(original, replace_with_kernel_inject=injected, quant={"embedding": "int4"})
    head, embed = engine.module.lm_head, engine.module.model.embed_tokens
    assert [a is b for a, b in zip(weight_of(head).planes, weight_of(embed).planes, strict=True)] == [
        True
    ] * 4
    table, projection = engine.report().outside
    assert (table.role, table.format, projection.role, projection.format) == (
        "embedding", "int4", "head", "int4",
    )  # fmt: skip
    assert table.bytes == weight_of(embed).nbytes and projection.bytes == 0
    held = sum(p.untyped_storage().nbytes() for p in engine.module.parameters() if not p.is_meta)
    assert held < original.lm_head.weight.nbytes


def test_formats_that_differ_make_two_sets_of_planes() -> None:
    engine = inject(llama(tied=True), quant={"embedding": "int8", "head": "int4"})
    assert weight_of(engine.module.lm_head).format == "int4"
    assert weight_of(engine.module.model.embed_tokens).format == "int8"


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "gemma2", "bert", "gptj"])
@LEVELS
def test_other_families_with_both_packed(kind: str, injected: bool) -> None:
    """Gemma scales rows in a class of its own, GPT-J's head has a bias, BERT's stands in a transform."""
    original = make(kind)
    engine = inject(original, replace_with_kernel_inject=injected, **only("int8", "int8"))
    head, table = original.get_output_embeddings(), original.get_input_embeddings()
    model = exact(
        original,
        FORMATS["int8"].weight(head.weight.detach(), None).dense(),
        FORMATS["int8"].weight(table.weight.detach(), None).dense(),
    )
    torch.testing.assert_close(logits(engine, prompt()), logits(model, prompt()), atol=1e-4, rtol=1e-4)
    assert {part.role for part in engine.report().outside} == {"head", "embedding"}
    assert is_packed(engine.module.get_input_embeddings())


@LEVELS
def test_a_packed_pair_can_be_cast_copied_and_saved(injected: bool, tmp_path: Any) -> None:
    engine = inject(llama(tied=True), replace_with_kernel_inject=injected, quant={"embedding": "int8"})
    expected = logits(engine, prompt())
    twin = copy.deepcopy(engine.module)
    assert torch.equal(logits(twin, prompt()), expected)
    assert twin.model.embed_tokens._parameters["weight"].untyped_storage().nbytes() == 4
    engine.save_checkpoint(tmp_path)
    again = type(engine.module).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, prompt()), expected, atol=1e-4, rtol=1e-4)
    half = engine.module.to(torch.bfloat16)
    found = logits(half, prompt())
    assert found.dtype == half.dtype == torch.bfloat16
    assert float((found.float() - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@LEVELS
def test_tying_beside_a_packed_table_keeps_the_answers(kind: str, injected: bool) -> None:
    model = make(kind, tie_word_embeddings=True)
    engine = inject(model, replace_with_kernel_inject=injected, quant={"head": "int4", "embedding": "int4"})
    expected = logits(engine, prompt())
    engine.module.tie_weights()
    torch.testing.assert_close(logits(engine, prompt()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@LEVELS
def test_packed_rows_are_not_resized_and_nothing_has_changed(injected: bool, tied: bool) -> None:
    engine = inject(llama(tied=tied), replace_with_kernel_inject=injected, quant={"embedding": "int4"})
    expected, rows = logits(engine, prompt()), engine.module.config.vocab_size
    for count in (rows + 9, rows - 9):
        with pytest.raises(slipstream.UnsupportedError, match=rf"with {rows} packed rows.* {count}; resize"):
            engine.module.resize_token_embeddings(count)
    assert torch.equal(logits(engine, prompt()), expected) and engine.module.config.vocab_size == rows
    engine.module.set_input_embeddings(
        nn.Embedding(rows, engine.module.config.hidden_size)
    )  # of which there may be any number
    engine.module.resize_token_embeddings(rows + 9)
    assert logits(engine, prompt()).shape[-1] == rows + 9


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_tied_model_with_a_packed_head_is_saved_as_it_answers(kind: str, tmp_path: Any) -> None:
    original = make(kind, tie_word_embeddings=True)
    engine = inject(original, quant={"weight": {"num_bits": 8}, "head": "int4"})
    expected = logits(engine, prompt())
    engine.save_checkpoint(tmp_path)
    again = type(original).from_pretrained(tmp_path)  # which ties only what is equal
    close_to_packed(expected, logits(again, prompt()))


def test_the_report_lists_what_is_packed_outside_of_the_layers() -> None:
    report = inject(llama(tied=False), quant={"embedding": "fp8"}).report()
    assert [(part.name, part.role, part.format) for part in report.outside] == [
        ("model.embed_tokens", "embedding", "fp8"),
        ("lm_head", "head", "int8"),
    ]
    assert "head lm_head: int8" in str(report) and report.outside[1].kernels["linear"]
    assert report.to_dict()["outside"][0]["bytes"] == 100 * 64 + 100 * 4
    assert "outside" not in inject(llama(tied=False)).report().to_dict()


def test_a_model_that_names_no_embedding_is_told() -> None:
    engine = inject(nn.Sequential(nn.Linear(8, 8)), **only("int8", "int8"))
    assert any("no embedding is packed" in note for note in engine.report().notes)


class Scaled(nn.Embedding):
    """Does more with its matrix than look rows up."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / self.weight.norm()


def test_an_embedding_with_code_of_its_own_stays_plain() -> None:
    original = llama(tied=False)
    original.model.embed_tokens.__class__ = Scaled
    engine = inject(original, replace_with_kernel_inject=False, **only(embedding="int8"))
    assert any("stays plain: Scaled does more" in note for note in engine.report().notes)
    torch.testing.assert_close(logits(engine, prompt()), logits(original, prompt()))


def test_a_head_that_does_not_multiply_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.formats import choose

    honest = FORMATS["int8"]
    broken = replace(honest, unpack=lambda *stored: honest.unpack(*stored).roll(1, -1))
    monkeypatch.setitem(choose.FORMATS, "int8", broken)
    with pytest.raises(slipstream.InjectionError, match="lm_head is off by"):
        inject(llama(tied=False), replace_with_kernel_inject=False, **only(head="int8"))
    engine = inject(llama(tied=False), injection_check="fallback", **only(head="int8"))
    assert not engine.report().outside and any("lm_head is off" in note for note in engine.report().notes)

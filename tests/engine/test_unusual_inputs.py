"""Inputs that only a model's own code can judge reach it, and the engine road does not read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import slipstream
from slipstream.engine.generation.refusals import why_not_readable
from slipstream.engine.generation.request import read_request
from tests.helpers.models import VOCABULARY, close, inject, make, prompt, roads

IMAGE = -200
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def pictured(count: int = 3) -> Tensor:
    ids = prompt(count)
    ids[:, 3] = IMAGE
    return ids


# Ids outside of the embedding.


class Pictured(LlamaForCausalLM):
    """As LLaVA's first code: negative ids are the places of an image's states."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if input_ids is not None and bool((input_ids < 0).any()):
            states = self.model.embed_tokens(input_ids.clamp(min=0))
            inputs_embeds = torch.where((input_ids < 0)[..., None], torch.ones_like(states), states)
            input_ids = None
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)


class Hashing(nn.Embedding):
    """An embedding with fewer rows than there are ids."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input % self.num_embeddings)


class Base(transformers.LlamaModel):
    """A base model that reads negative ids as token 0."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(None if input_ids is None else input_ids.clamp(min=0), **kwargs)


def _by_class(model: Any) -> None:
    model.__class__ = Pictured


def _by_object(model: Any) -> None:
    model.forward = Pictured.forward.__get__(_classed(model), Pictured)


def _classed(model: Any) -> Any:
    inner = copy.copy(model)
    inner.__class__ = Pictured
    return inner


def _by_embedding(model: Any) -> None:
    model.model.embed_tokens.__class__ = Hashing


def _by_base(model: Any) -> None:
    model.model.__class__ = Base


def _by_hook(model: Any) -> None:
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: (args[0].clamp(min=0),))


CHANGES: tuple[Callable[[Any], None], ...] = (_by_class, _by_object, _by_embedding, _by_base, _by_hook)


@pytest.mark.parametrize("fuses", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("change", CHANGES)
def test_code_of_ones_own_may_take_any_ids(change: Callable[[Any], None], fuses: bool) -> None:
    original, model = make("llama"), make("llama")
    change(original)
    change(model)
    engine = slipstream.init_inference(
        model, dtype=torch.float32, replace_with_kernel_inject=fuses, injection_check="fallback"
    )
    ids = pictured()
    close(original(input_ids=ids).logits, engine(input_ids=ids).logits)
    close(original(ids).logits, engine(ids).logits)
    with roads(engine) as counts:
        assert torch.equal(original.generate(ids, **GREEDY), engine.generate(ids, **GREEDY))
    assert counts.taken != "engine"


def test_packed_rows_are_not_read_outside_of_the_matrix() -> None:
    model = make("llama")
    _by_class(model)
    model.model.embed_tokens.padding_idx = None
    engine = inject(model, quant="int8", injection_check="fallback")
    assert engine(input_ids=pictured()).logits.isfinite().all()
    for bad in (VOCABULARY, 2**40):
        with pytest.raises(IndexError):
            engine(input_ids=torch.tensor([[5, bad]]))


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
@pytest.mark.parametrize("part", ["lm_head", "layer", "forward hook"])
def test_code_that_reads_no_ids_changes_nothing(part: str, bad: int) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = make("llama")
    if part == "lm_head":
        model.lm_head.__class__ = Own
    elif part == "layer":
        model.model.layers[1].mlp.up_proj.__class__ = Own
    else:
        model.register_forward_hook(lambda module, args, output: None)
    engine = slipstream.init_inference(model, dtype=torch.float32)
    for call in (engine, engine.generate):
        with pytest.raises(slipstream.RequestError, match="input_ids hold"):
            call(input_ids=torch.tensor([[5, bad]]))
        with pytest.raises(slipstream.RequestError, match="attention_mask has shape"):
            call(input_ids=prompt(), attention_mask=torch.ones(3, 3))


def test_the_engine_road_reads_no_ids_and_masks_that_do_not_fit() -> None:
    """A family may describe custom code, whose model then has the road: it is left for such a prompt."""
    engine = inject(make("llama"))
    runner: Any = engine._built.runner
    ids = prompt()
    for prompted, mask, why in (
        (ids, torch.ones_like(ids), None),
        (pictured(), torch.ones_like(ids), "outside"),
        (ids + VOCABULARY, torch.ones_like(ids), "outside"),
        (ids, torch.ones(9, 9).long(), "another shape"),
        (ids, torch.ones(2, 0).long(), "another shape"),
        (ids[:, :0], None, "empty"),
    ):
        request = read_request(engine.module, {"input_ids": ids, "attention_mask": mask, **GREEDY})
        got = why_not_readable(runner, replace(request, prompt=prompted))
        assert (got is None) if why is None else (why in (got or ""))


# Masks.


class Tiny(nn.Module):
    """Has the cache that most models of their own code have: a tuple of keys and values for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any = None) -> Any:
        k = v = q = self.table(input_ids)
        if past_key_values is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(past_key_values[0], (k, v), strict=True))
        n, m = q.shape[1], k.shape[1]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n) & attention_mask[:, None].bool()
        weights = (q @ k.mT).masked_fill(~seen, -1e9).softmax(-1)
        return self.head(weights @ v), ((k, v),)


def test_a_mask_of_all_tokens_fits_a_cache_of_tuples() -> None:
    original = Tiny().eval()
    engine = slipstream.init_inference(copy.deepcopy(original), dtype=torch.float32)
    ids, mask = prompt(2), torch.ones(2, 9).long()
    mask[0, :3] = 0
    got = []
    for model in (original, engine):
        _, past = model(ids[:, :8], attention_mask=mask[:, :8])
        got.append(model(ids[:, 8:], attention_mask=mask, past_key_values=past)[0])
    close(*got)


class Squared(nn.Module):
    """Takes a mask of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attend = nn.Embedding(VOCABULARY, 32), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(input_ids)
        output: Tensor = self.attend(x, x, x, attn_mask=attention_mask)[0]
        return output


def test_a_mask_may_have_the_layout_that_the_models_own_code_reads() -> None:
    original = Squared().eval()
    engine = slipstream.init_inference(copy.deepcopy(original), dtype=torch.float32)
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)
    close(original(prompt(), mask), engine(prompt(), mask))
    close(original(prompt(), attention_mask=mask), engine(prompt(), attention_mask=mask))


@pytest.mark.parametrize("name", ["Musicgen", "MusicgenMelody"])
def test_a_mask_has_a_row_for_all_codebooks_of_a_sequence(name: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 0}
    config = getattr(transformers, f"{name}DecoderConfig")(
        **sizes, **special, ffn_dim=128, vocab_size=VOCABULARY, num_codebooks=4
    )
    torch.manual_seed(0)
    original = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids, mask = torch.randint(0, VOCABULARY, (8, 6)), torch.ones(2, 6).long()
    mask[0, :2] = 0
    for fuses in (False, True):
        engine = slipstream.init_inference(
            copy.deepcopy(original), dtype=torch.float32, replace_with_kernel_inject=fuses
        )
        want, got = (m(input_ids=ids, attention_mask=mask).logits for m in (original, engine))
        close(want, got, mask=mask.repeat_interleave(4, 0))
        with pytest.raises(slipstream.RequestError, match=r"\(3, 6\) .* must be \(2, 6\)"):
            engine(input_ids=ids, attention_mask=torch.ones(3, 6))

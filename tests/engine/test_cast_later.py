"""Parts that are cast, transposed or observed in another way after the engine was built."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

import slipstream
from tests.helpers.models import close, pair, prompt

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
IDS = torch.arange(5, 14)[None]


def _encoders(name: str = "Bert", kind: str = "Model") -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, pad_token_id=0)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 1.5 / p.shape[-1] ** 0.5)
    twin = copy.deepcopy(model)
    return model, slipstream.init_inference(twin, dtype=torch.float32, replace_with_kernel_inject=True)


@pytest.mark.parametrize(
    "place", ["pooler.dense", "embeddings.word_embeddings", "embeddings.position_embeddings"]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_square_matrix_that_is_transposed_counts(place: str, in_place: bool) -> None:
    original, engine = _encoders()
    with torch.no_grad():
        engine(input_ids=IDS)
        for model in (original, engine.module):
            weight = model.get_submodule(place).weight
            if in_place:
                weight.t_()
            else:
                weight.data = weight.data.t()
        expected, got = original(input_ids=IDS), engine(input_ids=IDS)
    close(expected.last_hidden_state, got.last_hidden_state)
    close(expected.pooler_output, got.pooler_output)


@pytest.mark.parametrize(
    ("name", "kind"), [("Bert", "Model"), ("Bert", "ForSequenceClassification"), ("Roberta", "Model")]
)
def test_an_encoder_whose_embedding_is_narrower(name: str, kind: str) -> None:
    original, engine = _encoders(name, kind)
    for model in (original, engine.module):
        model.get_input_embeddings().bfloat16()
    with torch.no_grad():
        expected, got = original(input_ids=IDS)[0], engine(input_ids=IDS)[0]
    assert got.dtype == expected.dtype
    close(expected, got)


def test_a_decoder_whose_embedding_is_narrower() -> None:
    models = pair("llama")
    for model in (models.original, models.engine.module):
        model.get_input_embeddings().bfloat16()
    with torch.no_grad():
        close(models.original(input_ids=prompt()).logits, models.engine(input_ids=prompt()).logits)
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True}
    expected = models.original.generate(input_ids=prompt(), **options)
    got = models.engine.generate(input_ids=prompt(), **options)
    close(torch.stack(expected.logits), torch.stack(got.logits))


class Louder(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 1.5 if function is torch.nn.functional.linear else made


def test_a_function_mode_sees_every_operation() -> None:
    original, engine = _encoders()
    with torch.no_grad():
        engine(input_ids=IDS)
        with Louder():
            close(original(input_ids=IDS)[0], engine(input_ids=IDS)[0])
    models = pair("gpt2")
    with torch.no_grad(), Louder():
        close(models.original(input_ids=prompt()).logits, models.engine(input_ids=prompt()).logits)
        expected: Tensor = models.original.generate(input_ids=prompt(), max_new_tokens=4)
        assert torch.equal(expected, models.engine.generate(input_ids=prompt(), max_new_tokens=4))


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        config = transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
        close(expected, engine(input_ids=IDS).logits)

"""Decoders with BERT's layers generate on the engine road, alone and behind an encoder of text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from tests.helpers.models import Pair, inject, roads, same_tokens

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": None,
    "pad_token_id": 1,
}
ALONE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertLMHeadModel", "BertConfig", {"hidden_act": "gelu_new"}),
    "bert, one type": ("BertLMHeadModel", "BertConfig", {"type_vocab_size": 1}),
    "roberta": ("RobertaForCausalLM", "RobertaConfig", {}),
    "xlm-roberta": ("XLMRobertaForCausalLM", "XLMRobertaConfig", {}),
    "camembert": ("CamembertForCausalLM", "CamembertConfig", {}),
    "data2vec": ("Data2VecTextForCausalLM", "Data2VecTextConfig", {}),
    "electra": ("ElectraForCausalLM", "ElectraConfig", {"embedding_size": 64}),
    "ernie": ("ErnieForCausalLM", "ErnieConfig", {}),
    "roberta with norms before": ("RobertaPreLayerNormForCausalLM", "RobertaPreLayerNormConfig", {}),
    "roberta without a first norm": ("XLMRobertaXLForCausalLM", "XLMRobertaXLConfig", {}),
    "bert without a head's linear": ("BertGenerationDecoder", "BertGenerationConfig", {}),
}
TOGETHER = {
    "bert": "BertConfig",
    "roberta": "RobertaConfig",
    "bert without a head's linear": "BertGenerationConfig",
}


def varied(model: nn.Module) -> Any:
    """Make the model's random weights large enough for different tokens."""
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embeddings" in path else 0.3)
    return model.eval()


@pytest.fixture(scope="module", params=ALONE)
def alone(request: pytest.FixtureRequest) -> Pair:
    import transformers

    model, config, options = ALONE[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES, **options, is_decoder=True)
    original = varied(getattr(transformers, model)(made))
    return Pair(original, inject(copy.deepcopy(original)))


@pytest.fixture(scope="module", params=TOGETHER)
def together(request: pytest.FixtureRequest) -> Pair:
    import transformers

    kind = getattr(transformers, TOGETHER[request.param])
    parts = [kind(**SIZES, is_decoder=decodes, add_cross_attention=decodes) for decodes in (False, True)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    torch.manual_seed(0)
    original = varied(transformers.EncoderDecoderModel(config=config))
    for owner in (original.config, original.generation_config):
        owner.decoder_start_token_id, owner.pad_token_id = 2, 1
    original.generation_config.eos_token_id = None
    return Pair(original, inject(copy.deepcopy(original)))


def prompt(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 110, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(*, left: bool) -> dict[str, Tensor]:
    """Return a prompt whose first row is shorter."""
    ids, mask = prompt(), torch.ones(2, 7, dtype=torch.int64)
    where = slice(3) if left else slice(4, 7)
    ids[0, where], mask[0, where] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(models: Pair, road: str = "engine", **options: Any) -> Tensor:
    options = {"max_new_tokens": 20, "input_ids": prompt(), **options}
    return same_tokens(models, road, **options)


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one row": {"input_ids": prompt(1)},
    "sampled": {"do_sample": True, "temperature": 8.0},
    "beams": {"num_beams": 3},
    "types of the first kind": {"token_type_ids": torch.zeros(2, 7, dtype=torch.int64)},
}


@pytest.mark.parametrize("call", (*CALLS, "padded"))
def test_decoders_alone(alone: Pair, call: str) -> None:
    options = padded(left=True) if call == "padded" else CALLS[call]
    if "token_type_ids" in options and not hasattr(
        alone.original.base_model.embeddings, "token_type_embeddings"
    ):
        pytest.skip("the model has no types")
    tokens = both(alone, **options)
    assert len(set(tokens[-1, 7:].tolist())) > 1


def test_steps_are_whole_calls_and_the_report_says_so(alone: Pair) -> None:
    runner = alone.engine._built.runner
    assert runner is not None and runner.whole is not None and not runner.takes_over
    assert not any("one at a time" in note or "loop" in note for note in alone.engine.report().notes)


def test_other_types_are_left_to_the_original_s_loop(alone: Pair) -> None:
    embeddings = alone.original.base_model.embeddings
    if (
        not hasattr(embeddings, "token_type_embeddings")
        or embeddings.token_type_embeddings.num_embeddings < 2
    ):
        pytest.skip("the model has no second type")
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    plain, typed = both(alone), both(alone, road="compatible", token_type_ids=types)
    assert not torch.equal(plain, typed)


def test_no_more_positions_than_the_table_has(alone: Pair) -> None:
    table = alone.original.base_model.embeddings.position_embeddings.num_embeddings
    assert both(alone, input_ids=prompt(1), max_new_tokens=table - 7).shape == (1, table)
    with pytest.raises((IndexError, RuntimeError)), roads(alone.engine) as counts:
        alone.engine.generate(prompt(1), max_new_tokens=table)
    assert counts.module > 0  # the original's loop, and its error


@pytest.mark.parametrize("call", (*CALLS, "padded", "started"))
def test_an_encoder_and_a_decoder(together: Pair, call: str) -> None:
    options = {
        "padded": padded(left=False),
        "started": {"decoder_input_ids": torch.tensor([[2, 17], [2, 40]])},
    }
    given = {**CALLS, **options}[call]
    if "token_type_ids" in given and not hasattr(
        together.original.encoder.embeddings, "token_type_embeddings"
    ):
        pytest.skip("the model has no types")
    tokens = both(together, repetition_penalty=4.0, **given)  # without it, one token would be repeated
    assert "num_beams" in given or len(set(tokens[-1, 2:].tolist())) > 1


def test_types_of_the_encoder(together: Pair) -> None:
    embeddings = together.original.encoder.embeddings
    if not hasattr(embeddings, "token_type_embeddings"):
        pytest.skip("the model has no types")
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2) % embeddings.token_type_embeddings.num_embeddings
    both(together, token_type_ids=types)


def test_a_decoder_behind_an_encoder_runs_whole_steps(together: Pair) -> None:
    runner = together.engine._built.runner
    assert runner is not None and runner.whole is not None and not runner.takes_over
    assert not any("one at a time" in note or "loop" in note for note in together.engine.report().notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_formats(dtype: torch.dtype, quant: str | None) -> None:
    import transformers

    torch.manual_seed(0)
    model = varied(transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)))
    engine = inject(model, dtype=dtype, **({} if quant is None else {"quant": quant}))
    with roads(engine) as counts:
        tokens = engine.generate(prompt(), max_new_tokens=6)
    assert counts.module == 0 and tokens.shape == (2, 13)

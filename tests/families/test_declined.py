"""Configurations that a family's block cannot reproduce are left to the original layer, with a reason."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream import InjectionError
from slipstream.families import FAMILIES, Family
from slipstream.families.family import Config
from slipstream.spec import BlockSpec, Rope
from tests.helpers.models import close, inject, left_padded, make

_PHI = {"hidden_size": 8, "num_attention_heads": 4, "intermediate_size": 16, "num_hidden_layers": 2}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decoder_made_bidirectional_by_its_config_keeps_its_layers(attention: str) -> None:
    original = make("llama", is_causal=False, attn_implementation=attention)
    engine = inject(original)
    ids, mask = left_padded()
    with torch.no_grad():
        for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
            close(original(**given).logits, engine(**given).logits, mask=mask)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(original.generate(ids, **options), engine.generate(ids, **options))
    reasons = {layer.reason for layer in engine.report().layers}
    assert reasons == {"llama does not support this layer: is_causal is False"}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Phi", {**_PHI, "partial_rotary_factor": 0.5}),
        ("GPTNeoX", {**_PHI, "rotary_pct": 0.25}),
    ],
    ids=["one dim", "no dim"],
)
def test_heads_without_a_pair_of_rotated_dims_keep_their_layers(model: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{model}Config")(vocab_size=100, **options)
    original = getattr(transformers, f"{model}ForCausalLM")(config).eval()
    engine = inject(original)
    ids, mask = left_padded()
    with torch.no_grad():
        close(original(ids, attention_mask=mask).logits, engine(ids, attention_mask=mask).logits, mask=mask)
    assert engine.report().level != "block"
    assert "is not an even number from 2 to 2 (a head)" in engine.report().layers[0].reason


def test_a_width_of_no_whole_heads_keeps_its_layers() -> None:
    config = transformers.CTRLConfig(vocab_size=100, n_embd=30, n_head=8, n_layer=2, dff=16, n_positions=32)
    original = transformers.CTRLLMHeadModel(config).eval()
    engine = inject(original)
    ids, _ = left_padded(length=8)
    with torch.no_grad():
        close(original(ids).logits, engine(ids).logits)
    assert "n_embd 30 is not a multiple of n_head 8" in engine.report().layers[0].reason


def _too_many_rotated(config: Config, index: int) -> BlockSpec:
    spec = FAMILIES["llama"].spec(config, index)
    return replace(spec, rope=Rope(spec.head_dim, table="half"))


@pytest.fixture
def misfit() -> tuple[Any, dict[type, Family]]:
    """Return a model, and a policy whose block for it cannot run at all."""
    model = make("llama")
    return model, {type(model.model.layers[0]): replace(FAMILIES["llama"], spec=_too_many_rotated)}


def test_block_that_cannot_run_is_an_injection_error(misfit: tuple[Any, dict[type, Family]]) -> None:
    model, policy = misfit
    with pytest.raises(InjectionError, match=r"model\.layers\.0: the fused block fails .*RuntimeError"):
        slipstream.init_inference(copy.deepcopy(model), dtype=torch.float32, injection_policy=policy)


def test_block_that_cannot_run_falls_back_where_that_is_wanted(
    misfit: tuple[Any, dict[type, Family]],
) -> None:
    model, policy = misfit
    engine = slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, injection_policy=policy, injection_check="fallback"
    )
    ids, _ = left_padded()
    with torch.no_grad():
        close(model(ids).logits, engine(ids).logits)
    assert engine.report().level != "block"


@pytest.mark.parametrize("prepare", [slipstream.inspect, lambda model: None], ids=["inspected", "built"])
def test_checks_leave_a_dynamic_rotary_module_as_it_was(prepare: Any) -> None:
    angles = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    original = make("llama", rope_parameters=angles, max_position_embeddings=4)
    twin = copy.deepcopy(original)
    prepare(twin)
    ids, _ = left_padded(length=6)  # longer than the config's maximum, shorter than the checks' inputs
    with torch.no_grad():
        expected = original(ids).logits
        close(expected, twin(ids).logits)
        close(expected, inject(make("llama", rope_parameters=angles, max_position_embeddings=4))(ids).logits)


def test_layers_that_are_handed_what_no_block_reads_keep_their_code_and_say_so() -> None:
    torch.manual_seed(0)
    config = transformers.MvpConfig(
        vocab_size=100, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=36, max_position_embeddings=64,
        use_prompt=True, prompt_length=5, prompt_mid_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    original = transformers.MvpForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 2 / parameter.shape[-1] ** 0.5)
    engine = inject(original)
    ids = torch.randint(3, 100, (3, 9), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"num_beams": 3}):
        expected = original.generate(ids, max_new_tokens=8, do_sample=False, **options)
        assert torch.equal(expected, engine.generate(ids, max_new_tokens=8, do_sample=False, **options))
    # In every call, each decoder layer receives prompts as keys and values from outside.
    reasons = {layer.reason for layer in engine.report().layers if "decoder" in layer.name}
    assert reasons == {"the model calls it only in ways that a block does not support"}


def test_a_layer_that_cannot_run_in_a_dtype_itself_is_refused_in_words() -> None:
    class Stubborn(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.eye(x.shape[-1])

    original = make("llama")
    original.model.layers[0].self_attn.q_norm_of_its_own = Stubborn()
    forward = type(original.model.layers[0]).forward

    def stubborn(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states @ torch.eye(hidden_states.shape[-1]), *args, **kwargs)

    for layer in original.model.layers:
        layer.forward = stubborn.__get__(layer)
    with pytest.raises(InjectionError, match="the original layer cannot run in bfloat16"):
        inject(original, dtype=torch.bfloat16)

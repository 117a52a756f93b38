"""Gradients through an engine's module are the original's, or refused in words; nobody gets wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.model.fused.state import injected_state, is_injected

WIDTH = 32
_SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **_SIZES))


def _bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(vocab_size=64, **_SIZES))


def _gpt2() -> nn.Module:
    sizes = {
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))


def _vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**_SIZES, image_size=16, patch_size=8))


def _t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(vocab_size=64, num_local_experts=4, num_key_value_heads=2, **_SIZES)
    return transformers.MixtralForCausalLM(config)


MODELS = (_llama, _bert, _gpt2, _vit, _t5, _mixtral)


def made(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build().eval()
    return model


def packed(model: nn.Module) -> slipstream.InferenceEngine:
    quant = {"weight": {"enabled": True, "num_bits": 8}}
    return slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True, quant=quant)


def states(build: Any) -> dict[str, Tensor]:
    """What a model reads instead of tokens, which have no gradient."""
    generator = torch.Generator().manual_seed(1)
    if build is _vit:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    given = {"inputs_embeds": torch.randn(2, 5, WIDTH, generator=generator)}
    return given | ({"decoder_input_ids": torch.tensor([[0, 5, 7]] * 2)} if build is _t5 else {})


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    out = model(**given)
    answer = out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state
    weights = torch.randn(answer.shape, generator=torch.Generator().manual_seed(2))
    return (answer.float() * weights).mean()  # type: ignore[no-any-return]


def of_inputs(model: nn.Module, build: Any) -> Iterator[Tensor]:
    given = states(build)
    leaves = [t.requires_grad_() for t in given.values() if t.is_floating_point()]
    loss(model, given).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        yield leaf.grad


@pytest.mark.parametrize("build", MODELS)
def test_inputs_have_the_gradients_of_the_original(build: Any) -> None:
    model = made(build)
    original = copy.deepcopy(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine.report().level == "block"
    for got, expected in zip(of_inputs(engine.module, build), of_inputs(original, build), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("build", MODELS)
def test_parameters_that_are_asked_have_the_gradients_of_the_original(build: Any) -> None:
    model = made(build)
    original = copy.deepcopy(model)
    engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    engine.module.requires_grad_(True)
    for one in (engine.module, original):
        loss(one, states(build)).backward()
    theirs = dict(original.named_parameters())
    for name, parameter in engine.module.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-7, msg=name)


# T5's head is packed and the table that it shares is not, which no state dict of T5 can say.
@pytest.mark.parametrize("build", [build for build in MODELS if build is not _t5])
def test_packed_weights_give_inputs_the_gradients_of_what_they_stand_for(build: Any) -> None:
    model = made(build)
    unpacked = copy.deepcopy(model)
    engine = packed(model)
    unpacked.load_state_dict(engine.module.state_dict())
    for got, expected in zip(of_inputs(engine.module, build), of_inputs(unpacked, build), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("build", [_llama, _bert])
def test_packed_parameters_refuse_to_be_trained(build: Any) -> None:
    engine = packed(made(build))
    engine.module.requires_grad_(True)
    with pytest.raises(slipstream.UnsupportedError, match=r"requires a gradient, .*refresh_weights"):
        loss(engine.module, states(build))
    with torch.no_grad():
        loss(engine.module, states(build))


def test_packed_linears_of_an_unknown_layer_pass_gradients_on() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = made(Model)
    unpacked = copy.deepcopy(model)
    engine = packed(model)
    unpacked.load_state_dict(engine.module.state_dict())
    grads = []
    for one in (engine.module, unpacked):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        one(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_a_plain_call_with_autograd_on_runs_the_blocks_and_records_nothing() -> None:
    engine = slipstream.init_inference(made(_llama), dtype=torch.float32, replace_with_kernel_inject=True)
    ids = torch.randint(0, 64, (2, 5))
    logits = engine.module(ids).logits
    assert not logits.requires_grad
    layers = [module for module in engine.module.modules() if is_injected(module)]
    assert [injected_state(layer).declined for layer in layers] == [0, 0]
    torch.testing.assert_close(logits, engine(ids).logits, rtol=1e-5, atol=1e-5)

"""`injection_policy`: held against the model first; then its layers run the ops, or a family of the user."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import slipstream
from slipstream.families import FAMILIES, Family
from slipstream.model.fused.state import is_injected
from slipstream.model.parts.parts import is_swapped
from slipstream.spec import BlockSpec, Norm, Role
from slipstream.weights.recipe import Stack, Take
from tests.helpers.models import inject, make

WIDTH = 32
OUTPUTS = ("self_attn.out_proj", "linear2")


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def engine_of(model: nn.Module, policy: dict[type, Any], **options: Any) -> slipstream.InferenceEngine:
    return slipstream.init_inference(model, dtype=torch.float32, injection_policy=policy, **options)


def hidden() -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("outputs", [OUTPUTS, "linear2", ("out_proj", ".linear2")])
def test_the_layers_of_torchs_own_encoder_run_the_ops(outputs: Any) -> None:
    model = encoder()
    original = copy.deepcopy(model)
    engine = engine_of(model, {nn.TransformerEncoderLayer: outputs})
    report = engine.report()
    assert (report.level, [row.level for row in report.layers]) == ("module", ["module", "module"])
    assert dict(report.layers[0].kernels) == {"linear": "reference", "norm": "reference"}
    layer = model.layers[0]
    assert all(
        map(is_swapped, (layer.linear1, layer.linear2, layer.norm1, layer.norm2, layer.self_attn.out_proj))
    )
    assert list(engine.state_dict()) == list(original.state_dict())
    torch.testing.assert_close(engine(hidden()), original(hidden()))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal"])
def test_both_paths_of_torchs_encoder_answer_as_before(fast: bool, norm_first: bool, masks: str) -> None:
    model = encoder(norm_first=norm_first)
    original = copy.deepcopy(model)
    engine = engine_of(model, {nn.TransformerEncoderLayer: OUTPUTS})
    arguments: dict[str, Any] = {}
    if masks == "padding":
        arguments["src_key_padding_mask"] = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    elif masks == "causal":
        arguments = {"mask": nn.Transformer.generate_square_subsequent_mask(6), "is_causal": True}
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            expected, got = original(hidden(), **arguments), engine(hidden(), **arguments)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    rows = ~arguments.get("src_key_padding_mask", torch.zeros(2, 6, dtype=torch.bool))
    torch.testing.assert_close(got[rows], expected[rows], rtol=1e-5, atol=1e-5)


def test_the_ops_are_what_runs() -> None:
    model = encoder()
    engine = engine_of(model, {nn.TransformerEncoderLayer: OUTPUTS})
    before = engine(hidden())
    for module in model.modules():
        if is_swapped(module):
            run = module.__dict__["_slipstream_part"]
            module.__dict__["_slipstream_part"] = lambda m, x, run=run: 2 * run(m, x)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert not torch.allclose(engine(hidden()), before)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_transformers_layer_goes_to_the_level_that_the_policy_says() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    original = copy.deepcopy(model)
    block = type(model.encoder.block[0])
    engine = engine_of(model, {block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")})
    assert [row.level for row in engine.report().layers] == ["module"] * 4
    ids = torch.randint(1, 64, (2, 7))
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    torch.testing.assert_close(engine(**inputs).logits, original(**inputs).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(engine.generate(ids, **options), original.generate(ids, **options))


def test_a_policy_goes_before_a_family_of_ours() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    original = copy.deepcopy(model)
    engine = engine_of(model, {type(model.model.layers[0]): ("self_attn.o_proj", "mlp.down_proj")})
    assert [row.level for row in engine.report().layers] == ["module", "module"]
    assert not any(is_injected(module) for module in model.modules())
    ids = torch.randint(0, 64, (2, 7))
    torch.testing.assert_close(engine(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({nn.LSTM: "linear2"}, ["LSTM", "TransformerEncoderLayer (2)"]),
        ({nn.TransformerEncoderLayer: "linear3"}, ["'linear3'", "'linear2'"]),
        ({nn.TransformerEncoderLayer: ("linear2", "attn.out")}, ["'attn.out'", "'self_attn.out_proj'"]),
        ({nn.TransformerEncoderLayer: "near2"}, ["'near2'", "'linear2'"]),
        ({nn.TransformerEncoderLayer: "norm1"}, ["'norm1'"]),
        ({nn.Dropout: "linear"}, ["Dropout", "no linears"]),
    ],
)
def test_a_policy_that_matches_nothing_is_refused_before_any_work(
    policy: dict[type, Any], words: list[str]
) -> None:
    model = encoder()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(slipstream.ConfigError) as caught:
        engine_of(model, policy)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert [type(module) for module in model.modules()] == classes


class Own(nn.Module):
    """A layer that nobody knows: pre-norm attention and a gated feed-forward, causal."""

    def __init__(self, slip: float = 0.0) -> None:
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)
        self.slip = slip

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        h = self.ln_a(x)
        q, k, v = (part(h).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2)) + self.slip * x
        h = self.ln_b(x)
        x = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x if scale is None else scale * x


class OwnModel(nn.Module):
    def __init__(self, slip: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Own(slip) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def own_spec(config: Any, index: int) -> BlockSpec:
    heads = 4 if config is None else config["heads"]
    return BlockSpec(
        WIDTH, heads, heads, WIDTH // heads, 48, Norm("layer", 1e-5), scale=(WIDTH // heads) ** -0.5
    )


OWN = Family(
    name="own",
    layers=("Own",),
    spec=own_spec,
    recipes={
        Role.ATTN_NORM: Take("ln_a"),
        Role.QKV: Stack(("q", "k", "v")),
        Role.ATTN_OUT: Take("o"),
        Role.MLP_NORM: Take("ln_b"),
        Role.MLP_IN: Stack(("gate", "up")),
        Role.MLP_OUT: Take("down"),
    },
    tiny=(),
)


@pytest.mark.parametrize("options", [{}, {"args": {"heads": 4}}])
def test_a_family_of_the_users_fuses_a_model_without_a_config(options: dict[str, Any]) -> None:
    model = OwnModel().eval()
    original = copy.deepcopy(model)
    engine = engine_of(model, {Own: OWN}, **options)
    row = engine.report().layers[0]
    assert (engine.report().level, row.level, row.family) == ("block", "block", "own")
    assert row.max_error is not None
    assert row.max_error < 1e-4
    torch.testing.assert_close(engine(hidden()), original(hidden()), rtol=1e-4, atol=1e-4)
    got = model.blocks[0](hidden(), scale=2.0)  # what the block does not know runs the original code
    torch.testing.assert_close(got, original.blocks[0](hidden(), scale=2.0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("slip", "options"), [(0.1, {}), (0.0, {"args": {"heads": 8}})])
def test_a_family_of_the_users_is_checked_like_ours(slip: float, options: dict[str, Any]) -> None:
    with pytest.raises(slipstream.InjectionError, match=r"blocks\.0"):
        engine_of(OwnModel(slip), {Own: OWN}, **options)
    model = OwnModel(slip)
    original = copy.deepcopy(model).eval()
    engine = engine_of(model, {Own: OWN}, injection_check="fallback", **options)
    assert engine.report().level == "module"
    torch.testing.assert_close(engine(hidden()), original(hidden()))


def test_a_model_without_a_config_has_none_to_override() -> None:
    with pytest.raises(slipstream.UnsupportedError, match="this model has none"):
        engine_of(OwnModel(), {Own: ("o", "down")}, args={"heads": 4})


def test_a_policy_may_name_some_layers_and_leave_the_others() -> None:
    model = OwnModel()
    model.blocks.append(nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True))
    original = copy.deepcopy(model).eval()
    engine = engine_of(model, {Own: OWN})
    assert [row.level for row in engine.report().layers] == ["block", "block", "none"]
    assert engine.report().layers[2].reason == "replace_with_kernel_inject is False"
    torch.testing.assert_close(engine(hidden()), original(hidden()), rtol=1e-4, atol=1e-4)


def test_a_policy_value_that_is_no_family_is_refused() -> None:
    class Looks:
        spec = None

    with pytest.raises(slipstream.ConfigError, match="Looks"):
        engine_of(OwnModel(), {Own: Looks()})


def test_a_family_that_cannot_read_the_config_is_named() -> None:
    model = make("llama")
    said = "LlamaDecoderLayer to the family bert, but it cannot read LlamaConfig: .*is_decoder"
    with pytest.raises(slipstream.InjectionError, match=said):
        engine_of(model, {LlamaDecoderLayer: FAMILIES["bert"]})
    assert not any(map(is_injected, model.modules()))


def test_a_known_name_over_a_config_of_another_kind_is_a_layer_as_it_was() -> None:
    model = make("llama")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = transformers.CLIPConfig()  # two others, and no numbers of its own
    engine = inject(model)
    assert "llama does not support this layer: it cannot read CLIPConfig" in engine.report().layers[0].reason

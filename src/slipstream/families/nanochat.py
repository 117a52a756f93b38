"""NanoChat: norms without weights; queries and keys rotated by negative angles, and normalised afterwards."""

from __future__ import annotations

from slipstream.families.common import LLAMA_RECIPES, llama_frame, llama_like, rope, tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, FrameSpec, Norm, QKNorm, Role
from slipstream.weights.recipe import Take, Unit


def _spec(config: Config, index: int) -> BlockSpec:
    return llama_like(
        config,
        index,
        gated=False,
        qk_norm=QKNorm(Norm("rms", config.rms_norm_eps), after_rope=True),
        rope=rope(config, backwards=True),
    )


def _frame(config: Config) -> FrameSpec:
    return llama_frame(config, embed_norm="model.norm", logit_softcap=config.final_logit_softcapping)


FAMILY = Family(
    name="nanochat",
    layers=("NanoChatDecoderLayer",),
    spec=_spec,
    recipes={
        Role.ATTN_NORM: Unit(),
        Role.QKV: LLAMA_RECIPES[Role.QKV],
        Role.Q_NORM: Unit(),
        Role.K_NORM: Unit(),
        Role.ATTN_OUT: Take("self_attn.o_proj"),
        Role.MLP_NORM: Unit(),
        Role.MLP_IN: Take("mlp.fc1"),
        Role.MLP_OUT: Take("mlp.fc2"),
    },
    frame=_frame,
    tiny=(
        tiny("NanoChatForCausalLM", "NanoChatConfig"),
        tiny(
            "NanoChatForCausalLM",
            "NanoChatConfig",
            label="biases, no cap",
            attention_bias=True,
            final_logit_softcapping=None,
            head_dim=24,
        ),
    ),
)

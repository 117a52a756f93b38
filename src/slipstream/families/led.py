"""LED: BART whose encoder attends within windows, and to global tokens, which attend to all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.families.bart import BART_RECIPES, BART_TINY, bart_decoder, bart_encoder
from slipstream.families.family import Config, Family, OwnMixer, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm

_WINDOWED = "windowed attention"
_READS = ("is_index_masked", "is_index_global_attn", "is_global_attn")


def _encoder(config: Config, index: int) -> BlockSpec:
    return replace(bart_encoder(config, "post"), mixer=_WINDOWED)


def _decoder(config: Config, index: int) -> BlockSpec:
    return bart_decoder(config, "post")


def _attend(attention: Any, x: Any, given: Mapping[str, Any]) -> Any:
    passed = {name: given.get(name) for name in ("attention_mask", *_READS)}
    return attention(hidden_states=x, **passed)[0]


def _frame(config: Config) -> FrameSpec:
    return FrameSpec(
        layers="led.decoder.layers",
        embed="led.decoder.embed_tokens",
        pos_embed="led.decoder.embed_positions",
        embed_norm="led.decoder.layernorm_embedding",
        head="lm_head",
        norm=Norm("layer", 1e-5),
        logit_bias="final_logits_bias",
    )


def _tiny(label: str = "", **options: Any) -> Tiny:
    # As in its checkpoints, the feed-forward is four times the width, because each rank holds the attention
    # with global tokens as a whole.
    wide = {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256}
    sizes = {"attention_window": 4, "max_encoder_position_embeddings": 256, **wide}
    own = {**BART_TINY, **sizes, "max_decoder_position_embeddings": 256, **options}
    return Tiny("LEDForConditionalGeneration", "LEDConfig", own, label)


FAMILY = Family(
    name="led",
    layers=("LEDEncoderLayer", "LEDDecoderLayer"),
    spec=_encoder,
    specs={"LEDDecoderLayer": _decoder},
    recipes=BART_RECIPES,
    frame=_frame,
    mixers={_WINDOWED: OwnMixer("self_attn", _attend, frozenset(_READS))},
    tiny=(_tiny(), _tiny("windows of two widths", attention_window=[4, 8])),
)

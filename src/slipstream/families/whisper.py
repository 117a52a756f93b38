"""Whisper: BART's layers with norms before the branches, and keys without a bias; it hears a spectrogram."""

from __future__ import annotations

from typing import Any

from slipstream.families.bart import BART_RECIPES, BART_TINY, bart_decoder, bart_encoder
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec


def _encoder(config: Config, index: int) -> BlockSpec:
    return bart_encoder(config, "pre")


def _decoder(config: Config, index: int) -> BlockSpec:
    return bart_decoder(config, "pre")


_OWN: dict[str, Any] = {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
}
_FIELDS = {name: value for name, value in BART_TINY.items() if name != "max_position_embeddings"}

FAMILY = Family(
    name="whisper",
    layers=("WhisperEncoderLayer", "WhisperDecoderLayer"),
    spec=_encoder,
    specs={"WhisperDecoderLayer": _decoder},
    recipes=BART_RECIPES,
    tiny=(Tiny("WhisperForConditionalGeneration", "WhisperConfig", {**_FIELDS, **_OWN}),),
)

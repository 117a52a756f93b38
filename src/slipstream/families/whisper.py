"""Whisper: BART's layers with norms before the branches, and keys without a bias; its input is a spectrogram.

Its encoder is the audio encoder of many language models.
"""

from __future__ import annotations

from typing import Any

from slipstream.families.bart import BART_RECIPES, BART_TINY, bart_decoder, bart_encoder
from slipstream.families.family import Config, Family, Tiny
from slipstream.spec import BlockSpec, FrameSpec, Norm


def _encoder(config: Config, index: int) -> BlockSpec:
    return bart_encoder(config, "pre")


def _decoder(config: Config, index: int) -> BlockSpec:
    return bart_decoder(config, "pre")


def _frame(config: Config) -> FrameSpec | None:
    if not config.is_encoder_decoder:
        return None
    # With `scale_embedding` the decoder has a scale, but does not multiply by it.
    return FrameSpec(
        layers="model.decoder.layers",
        embed="model.decoder.embed_tokens",
        pos_embed="model.decoder.embed_positions",
        head="proj_out",
        norm=Norm("layer", 1e-5),
        final_norm="model.decoder.layer_norm",
        attends_padding=True,
    )


_OWN: dict[str, Any] = {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "begin_suppress_tokens": None,
}
_FIELDS = {name: value for name, value in BART_TINY.items() if name != "max_position_embeddings"}

_EAR: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "num_mel_bins": 8,
    "max_source_positions": 20,
}
_NAMED = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_HEARD = {"num_mel_bins": 8, "max_source_positions": 20}


def _speech_family(name: str, layer: str, tiny: Tiny) -> Family:
    return Family(name=name, layers=(layer,), spec=_encoder, recipes=BART_RECIPES, tiny=(tiny,))


FAMILIES = (
    Family(
        name="whisper",
        layers=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        spec=_encoder,
        specs={"WhisperDecoderLayer": _decoder},
        recipes=BART_RECIPES,
        frame=_frame,
        tiny=(
            Tiny("WhisperForConditionalGeneration", "WhisperConfig", {**_FIELDS, **_OWN}),
            Tiny(
                "WhisperForConditionalGeneration",
                "WhisperConfig",
                {**_FIELDS, **_OWN, "scale_embedding": True},
                label="a scale",
            ),
        ),
    ),
    Family(
        name="speech_to_text",
        layers=("Speech2TextEncoderLayer", "Speech2TextDecoderLayer"),
        spec=_encoder,
        specs={"Speech2TextDecoderLayer": _decoder},
        recipes=BART_RECIPES,
        tiny=(
            Tiny(
                "Speech2TextForConditionalGeneration",
                "Speech2TextConfig",
                {**_FIELDS, "input_feat_per_channel": 8, "conv_channels": 32, "max_target_positions": 64},
            ),
        ),
    ),
    _speech_family(
        "qwen2_audio_encoder",
        "Qwen2AudioEncoderLayer",
        Tiny("Qwen2AudioEncoder", "Qwen2AudioEncoderConfig", _EAR),
    ),
    _speech_family(
        "voxtral_encoder",
        "VoxtralEncoderLayer",
        Tiny("VoxtralEncoder", "VoxtralEncoderConfig", _NAMED | _HEARD),
    ),
    _speech_family(
        "moss_transcribe_diarize_audio",
        "MossTranscribeDiarizeAudioLayer",
        Tiny("MossTranscribeDiarizeAudioModel", "MossTranscribeDiarizeAudioConfig", _EAR),
    ),
    _speech_family(
        "audioflamingo3_encoder",
        "AudioFlamingo3EncoderLayer",
        Tiny("AudioFlamingo3Encoder", "AudioFlamingo3EncoderConfig", _NAMED | _HEARD),
    ),
)

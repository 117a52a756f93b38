"""wav2vec 2.0 and the audio encoders that share its layer, with norms after or before the branches."""

from __future__ import annotations

from typing import Any

from slipstream.families.common import bert_like, bert_tiny
from slipstream.families.family import Config, Family
from slipstream.spec import BlockSpec, Role
from slipstream.weights.recipe import Stack, Take

_RECIPES = {
    Role.QKV: Stack(tuple(f"attention.{part}_proj" for part in "qkv")),
    Role.ATTN_OUT: Take("attention.out_proj"),
    Role.ATTN_NORM: Take("layer_norm"),
    Role.MLP_IN: Take("feed_forward.intermediate_dense"),
    Role.MLP_OUT: Take("feed_forward.output_dense"),
    Role.MLP_NORM: Take("final_layer_norm"),
}
_TINY: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
}


def _pre_norm(config: Config, index: int) -> BlockSpec:
    return bert_like(config, index, place="pre")


def _refuse(config: Config) -> str | None:
    return (
        "adapter_attn_dim adds adapters to its layers"
        if getattr(config, "adapter_attn_dim", None) is not None
        else None
    )


def _families(name: str, prefix: str, *, stable: bool = True, **options: Any) -> tuple[Family, ...]:
    """Return the family of a model class, and that of its variant with norms before each branch, if any."""

    def made(name: str, layer: str, spec: Any, **more: Any) -> Family:
        tiny = bert_tiny(f"{prefix}Model", f"{prefix}Config", **_TINY, **options, **more)
        return Family(name=name, layers=(layer,), spec=spec, recipes=_RECIPES, refuse=_refuse, tiny=(tiny,))

    plain = made(name, f"{prefix}EncoderLayer", bert_like)
    if not stable:
        return (plain,)
    layer = f"{prefix}EncoderLayerStableLayerNorm"
    return plain, made(f"{name}-stable", layer, _pre_norm, do_stable_layer_norm=True)


FAMILIES = (
    *_families("wav2vec2", "Wav2Vec2"),
    *_families("hubert", "Hubert"),
    *_families("unispeech", "UniSpeech"),
    *_families("unispeech-sat", "UniSpeechSat"),
    *_families("data2vec-audio", "Data2VecAudio", stable=False),
)

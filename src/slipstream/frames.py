"""What surrounds the layers of a causal language model, or of a text encoder, by the model's own names."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.branches import Norm

__all__ = ["EncoderSpec", "FrameSpec", "FrameStreams", "LayerInputs"]


@dataclass(frozen=True)
class LayerInputs:
    """What a model computes from its tokens for each layer's third branch (`BlockSpec.inputs`).

    For layer i they are `(norm(project(x) * project_scale) + embed[id] * embed_scale) * scale`, of which the
    layer gets the i-th piece; x is the token's embedding, the input of the first layer.

    Attributes:
        embed: Path of the second embedding, `(V, layers * width)`.
        project: Path of the linear `(layers * width, C)`.
        norm: Path of the norm, of each piece.
        width: Width of a piece.
        embed_scale: See above; rounded to the embedding's dtype.
        project_scale: See above.
        scale: See above.
        rows: Tokens with this id or a higher one look up row 0 of the second embedding; None for none.
    """

    embed: str
    project: str
    norm: str
    width: int
    embed_scale: float
    project_scale: float
    scale: float
    rows: int | None = None


@dataclass(frozen=True)
class FrameStreams:
    """How a model makes streams of a token's embedding, and one state of the streams of its last layer.

    The first stream is the embedding. The others are projections of it, scaled to its root mean square. At
    the end, projections of the others, scaled to the root mean square of the first, are averaged with it.

    Attributes:
        enter: Paths of the linears `(C, C)` of all streams but the first.
        leave: Paths of those that project them back.
    """

    enter: tuple[str, ...]
    leave: tuple[str, ...]


@dataclass(frozen=True)
class FrameSpec:
    """What surrounds the layers of a causal language model, by the model's own names.

    Names are paths from the model that was passed in (`LlamaForCausalLM`); an absent part is None. The packed
    batch goes through `embed * embed_scale`, `project_in`,
    `+ type_embed[0] + pos_embed[position + pos_offset]`, `embed_norm`, the layers, `final_norm`,
    `project_out`, `out_activation`, `out_norm`, `head * logit_scale + logit_bias`, `logit_softcap`.

    Attributes:
        layers: The module list of the layers.
        embed: The token embedding.
        head: The vocabulary projection.
        norm: Kind of `final_norm` and `embed_norm`.
        final_norm: The norm after the last layer.
        embed_norm: The norm before the first layer.
        pos_embed: The learned (or tabulated) position embedding: a module, or a buffer.
        pos_offset: Added to a position before the lookup.
        pos_padding: Tokens with this id look up the row of that index, whatever their position (M2M100).
        pos_given: The model numbers tokens in another way unless it is given positions, as `generate` does.
        type_embed: The embedding by token type; all tokens have type 0.
        pos_after_norm: Position embeddings are added after `embed_norm`, not before it.
        attends_padding: The decoder cross-attends to all encoder states and ignores the mask (Whisper).
        project_in: Linear from the embedding's width to the hidden one.
        project_out: Linear from the hidden width to the head's.
        out_activation: A name in `slipstream.ops.activation`, applied to the output of `project_out`.
        out_norm: The norm after it.
        rotary: The rotary module.
        rotaries: Rotary modules of single types of layers, as pairs of `Rope.layer_type` and path.
        embed_scale: Multiplies the token embedding; rounded to the embedding's dtype where
            `embed_scale_rounded`.
        embed_scale_rounded: The original rounds `embed_scale` to the embedding's dtype before multiplying.
        logit_scale: Multiplies the logits.
        logit_bias: A buffer `(1, V)` that is added to the logits.
        logit_softcap: Logits become `softcap * tanh(logits / softcap)`.
        inputs: What is computed from tokens for the layers' third branch, if they have one.
        streams: How a token gets several streams of states, and one state again, if the layers have such.
        embedders: Modules of a larger model that embed `vocab_size` tokens from `vocab_offset` on, by paths
            from that model; no token before the first of these is theirs. The causal model has none.
        placeholder_fields: Fields in the config of a larger model that have ids of tokens which mark places
            for images or sound, and which that model embeds as `stand_in` where nothing takes their place.
        placeholders: These ids, once the larger model is known.
        stand_in: See `placeholder_fields`.
        restart: Length beyond which the original drops its cache and recomputes it during a generation
            (Phi-3's long rope).
    """

    layers: str
    embed: str
    head: str
    norm: Norm
    final_norm: str | None = None
    embed_norm: str | None = None
    pos_embed: str | None = None
    pos_offset: int = 0
    pos_padding: int | None = None
    pos_given: bool = False
    type_embed: str | None = None
    pos_after_norm: bool = False
    attends_padding: bool = False
    project_in: str | None = None
    project_out: str | None = None
    out_activation: str | None = None
    out_norm: str | None = None
    rotary: str | None = None
    rotaries: tuple[tuple[str, str], ...] = ()
    embed_scale: float = 1.0
    embed_scale_rounded: bool = False
    logit_scale: float = 1.0
    logit_bias: str | None = None
    logit_softcap: float | None = None
    inputs: LayerInputs | None = None
    streams: FrameStreams | None = None
    embedders: tuple[str, ...] = ()
    placeholder_fields: tuple[str, ...] = ()
    placeholders: tuple[int, ...] = ()
    stand_in: int = 0
    restart: int | None = None

    @property
    def root(self) -> str:
        """Path of the module that runs the layers."""
        return self.layers.rpartition(".")[0]


@dataclass(frozen=True)
class EncoderSpec:
    """What surrounds an encoder's layers, by names relative to the model that has them (`BertModel`).

    Tokens go through `words[id] + types[type] + positions[position]`, `norm`, `project_in`, the layers; a
    pooler applies a linear and tanh to the first token of each row.

    Attributes:
        layers: The module list of the layers.
        words: The token embedding.
        positions: The position embedding.
        norm: The layer norm before the first layer.
        types: The token type embedding (type 0 where the call gives none), or None.
        padding: Padding token id; other tokens are then numbered from `padding + 1`, and padding tokens have
            position `padding`. None where positions count from 0 whatever the tokens are.
        project_in: Linear from the embedding's width to the hidden one, or None.
        pooler: A module with a linear `dense`; skipped if the model has none.
    """

    layers: str
    words: str
    positions: str
    norm: str
    types: str | None = None
    padding: int | None = None
    project_in: str | None = None
    pooler: str = "pooler"

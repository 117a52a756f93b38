"""`Family`: an architecture as data, which maps its tensors to roles and its config to a layer's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from slipstream.spec import BlockSpec, EncoderSpec, FrameSpec, Role
from slipstream.weights.recipe import Recipe

__all__ = [
    "Branches",
    "Config",
    "Family",
    "Heads",
    "OwnAttention",
    "OwnBias",
    "OwnCourse",
    "OwnMixer",
    "RecurrentParts",
    "Tiny",
]

Config = Any
"""A transformers `PretrainedConfig`: attributes only, never imported here."""


@dataclass(frozen=True)
class Tiny:
    """A small random model of the family, for its tests.

    Attributes:
        model: Name of its class in transformers.
        config: Name of its config's class.
        options: Keyword arguments of the config.
        label: Distinguishes variants of one family in the sweep.
    """

    model: str
    config: str
    options: Mapping[str, Any]
    label: str = ""


@dataclass(frozen=True)
class OwnBias:
    """A bias on attention scores, computed by a part of the layer that is not fused and runs its own code.

    Attributes:
        make: Called with the layer and the arguments of its call by name; returns the bias
            `(1 | B, H, S, L)`, or None.
        reads: Names of arguments that only this part reads.
    """

    make: Callable[[Any, Mapping[str, Any]], Any]
    reads: frozenset[str] = frozenset()


class Heads(Protocol):
    """What a block offers to a family's own attention function."""

    @property
    def entered(self) -> Tensor:
        """`(B, S, C)`: the layer's input as its projections read it."""
        ...

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows other than the layer's own, `(..., C)`, to queries, keys and values `(..., H, D)`."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from `(N, H, S, D)` to `(N, H, L, D)`; the result is `(N, S, H, D)`, `mask` is additive."""
        ...


@dataclass(frozen=True)
class OwnAttention:
    """A family's own attention, in which queries attend neither to all keys nor to all previous ones.

    Attributes:
        run: Called with the heads, the layer, the arguments of its call by name, and q, k and v
            `(B, S, H, D)`, rotated if the spec has a rope. Returns the attention's output, `(B, S, H, D)`,
            then any tensors that the layer returns besides its states.
        reads: Names of arguments that only this code reads.
        packed: States are `(S, C)`, of any number of sequences.
        enter: Called with the layer, the arguments of its call by name, and the rows `(B, S, C)` that would
            be projected; returns those to project in their place, `(N, L, C)`. Then `run` gets q, k and v
            `(N, L, H, D)`. None for no change.
    """

    run: Callable[..., tuple[Tensor, ...]]
    reads: frozenset[str]
    packed: bool = False
    enter: Callable[[Any, Mapping[str, Any], Tensor], Tensor] | None = None


@dataclass(frozen=True)
class RecurrentParts:
    """Paths, inside a mixer, of the tensors of its `Recurrence`.

    Attributes:
        projections: The linears of the block's input; their outputs, one after the other, are the projected
            row.
        convolution: The depthwise `nn.Conv1d`.
        last: The linear of the mixer's output.
        speed: Parameter with the logarithm of each head's rate of decay.
        shift: Parameter that is added to the decay's input.
        skip: Parameter that multiplies the values, which are added to the output.
        norm: Weight of the output's norm.
        scales: Buffer of what the projected row is multiplied by, one number for all of each input.
        mixed: The linear of a selective state space's values: the steps' inputs, keys and queries.
        steps: The linear of the steps' inputs.
        step_norm: Weight of the norm of the steps' inputs.
        key_norm: Weight of the norm of the keys.
        query_norm: Weight of the norm of the queries.
    """

    projections: tuple[str, ...]
    convolution: str
    last: str
    speed: str | None = None
    shift: str | None = None
    skip: str | None = None
    norm: str | None = None
    scales: str | None = None
    mixed: str | None = None
    steps: str | None = None
    step_norm: str | None = None
    key_norm: str | None = None
    query_norm: str | None = None


@dataclass(frozen=True)
class OwnMixer:
    """A part, such as a state space model, that replaces a branch; it is not fused and runs its own code.

    Attributes:
        part: The part's path in the layer; its parameters get no roles.
        call: Called with the part, its input `(B, S, C)` and the arguments of the layer's call by name;
            returns the part's output.
        reads: Names of arguments that only this part reads.
        recurrent: The part's tensors, where the spec has a `recurrence`.
        mask: The layer's name for the argument that marks padding, `(B, S)`.
    """

    part: str
    call: Callable[[Any, Any, Mapping[str, Any]], Any]
    reads: frozenset[str] = frozenset()
    recurrent: RecurrentParts | None = None
    mask: str = "attention_mask"


class Branches(Protocol):
    """What a block offers to a family's own course; rows are `(..., C)`."""

    @property
    def spec(self) -> BlockSpec:
        """The block's numbers."""
        ...

    def norm(self, role: Role, x: Tensor) -> Tensor:
        """Apply a norm of the block; return `x` if the block has none of this role."""
        ...

    def linear(self, role: Role, x: Tensor) -> Tensor:
        """Multiply by a matrix of the block, and add its bias."""
        ...

    def attend(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        mask_of: Callable[[Tensor], Tensor] | None = None,
        shared_as: Any = None,
        beyond: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run the attention branch on `(B, S, C)`, without the norms before and after it.

        Args:
            x: The normalised input.
            mask: Replaces the mask that the layer was called with.
            mask_of: Makes the mask from the values `(B, K, L, D)` attended to, including cached ones.
            shared_as: The name under which this layer's keys and values are shared, or under which it
                borrows another's; None for the type of the layer.
            beyond: Keys and values `(B, K, M, D)` of other rows, appended to the layer's own; the mask covers
                both.
        """
        ...

    def feed(self, x: Tensor) -> Tensor:
        """Run the feed-forward or the experts, without the norms before and after."""
        ...

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route rows `(N, C)`: return the chosen experts' weights in float32 and their ids, `(N, k)` each."""
        ...

    def mix(self, x: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        """Run the chosen experts, without shared ones, on rows `(N, C)`; expert id -1 adds nothing."""
        ...

    def halves(self) -> tuple[Branches, Branches]:
        """Return the branches of each half of a layer that has all branches twice, under the same roles.

        Each half has its own index in the cache: twice the layer's, and the next one.
        """
        ...

    def streams(self, x: Tensor, inputs: Tensor, *, shared_as: Any = None) -> Tensor:
        """Run a layer of several streams, stacked `(S, B, L, C)`, as `Streams` describes it.

        Args:
            x: The layer's input.
            inputs: Its own input, `(B, L, P)`.
            shared_as: As for `attend`.
        """
        ...

    def heed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from `(B, H, S, D)` to `(B, K, L, D)`; returns `(B, S, H * D)`; `mask` is as in torch."""
        ...


@dataclass(frozen=True)
class OwnCourse:
    """A layer's own order of branches, where it differs from the block's, and its additional parts.

    Attributes:
        run: Called with the branches, the layer, its input `(B, S, C)` (or several, stacked) and the
            arguments of its call by name; returns the layer's output, and any tensors that it returns
            besides.
        parts: Paths of modules and parameters that stay in the layer; a module's parameters get no roles.
        reads: Names of arguments that only this code reads.
        note: What in the layer runs its own code, for the report; empty if nothing substantial does.
        needs: Names of arguments without which the layer's original code runs.
    """

    run: Callable[[Branches, Any, Tensor, Mapping[str, Any]], Any]
    parts: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    note: str = ""
    needs: frozenset[str] = frozenset()


def _no_reason(config: Config) -> str | None:
    return None


@dataclass(frozen=True)
class Family:
    """One architecture's layers as data.

    Attributes:
        name: The architecture's name, as in transformers' `model_type`.
        layers: Names of the layer classes; a class matches by any name along its MRO. A name that is not
            unique is prefixed with its module's: "modeling_distilbert.TransformerBlock".
        spec: Returns the spec of layer `index` by the model's config.
        specs: Overrides `spec` for single classes of `layers`, where a config has separate numbers for them
            (an encoder's layers and a decoder's).
        recipes: How each role's tensor is made from the layer's tensors.
        tiny: Small models that the tests build, one for every variant that takes another path.
        frame: Returns the frame around a causal language model's layers. None if the family does not
            generate, or if the engine road cannot reproduce the model's output.
        encoder: Returns the parts around a text encoder's layers; None if the model's own forward has to run.
        refuse: Returns why a config is not supported, or None.
        ignored: Patterns of the layer's parameters that need no role.
        rope_table: Path of the layer's own `[sin | cos]` table by position, if the model passes no angles.
        rotary: Path of the layer's own rotary module, if the model passes no angles.
        bias: The bias that the layer itself adds to scores; its parameters are `ignored`.
        relative: Path of the layer's part whose `compute_bias` makes biases by relative position.
        attention: The attention of layers whose spec has `own_attention`.
        measure: Makes the spec from the layer itself and the config, where config and index do not suffice;
            `spec` is then not used.
        mixers: What replaces attention in layers whose spec names a mixer, by that name.
        feeders: What replaces the feed-forward in layers whose spec names a feeder, by that name.
        courses: The order of branches in layers whose spec names a course, by that name.
        unread: Names of arguments that layers receive but do not read.
    """

    name: str
    layers: tuple[str, ...]
    spec: Callable[[Config, int], BlockSpec]
    recipes: Mapping[Role, Recipe]
    tiny: tuple[Tiny, ...]
    frame: Callable[[Config], FrameSpec | None] | None = None
    encoder: Callable[[Config], EncoderSpec | None] | None = None
    refuse: Callable[[Config], str | None] = field(default=_no_reason)
    ignored: tuple[str, ...] = ()
    rope_table: str | None = None
    rotary: str | None = None
    bias: OwnBias | None = None
    specs: Mapping[str, Callable[[Config, int], BlockSpec]] = field(default_factory=dict)
    relative: str | None = None
    attention: OwnAttention | None = None
    measure: Callable[[Any, Config], BlockSpec] | None = None
    mixers: Mapping[str, OwnMixer] = field(default_factory=dict)
    feeders: Mapping[str, OwnMixer] = field(default_factory=dict)
    courses: Mapping[str, OwnCourse] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()

    def spec_of(self, layer: Any, config: Config, index: int) -> BlockSpec:
        """Return the spec of a layer, which is of one of the family's classes and has this index."""
        if self.measure is not None:
            return self.measure(layer, config)
        names = (known.__name__ for known in type(layer).__mro__)
        spec = next((self.specs[name] for name in names if name in self.specs), self.spec)
        return spec(config, index)

    def mixer_of(self, spec: BlockSpec) -> OwnMixer | None:
        """Return what replaces attention in a layer with this spec, or None."""
        return None if spec.mixer is None else self.mixers[spec.mixer]

    def feeder_of(self, spec: BlockSpec) -> OwnMixer | None:
        """Return what replaces the feed-forward in a layer with this spec, or None."""
        return None if spec.feeder is None else self.feeders[spec.feeder]

    def ignores(self, spec: BlockSpec) -> tuple[str, ...]:
        """Return patterns of the parameters that have no role in a layer with this spec."""
        own = self.own_parts(spec)
        return (*self.ignored, *own, *(f"{part}.*" for part in own))

    def course_of(self, spec: BlockSpec) -> OwnCourse | None:
        """Return the layer's own order of branches in a layer with this spec, or None for the block's."""
        return None if spec.course is None else self.courses[spec.course]

    def own_parts(self, spec: BlockSpec) -> tuple[str, ...]:
        """Return the paths of parts that are not fused and run their own code."""
        own, course = (self.mixer_of(spec), self.feeder_of(spec)), self.course_of(spec)
        parts = (one.part for one in own if one is not None)
        return (*parts, *(() if course is None else course.parts))

    def own_code(self, spec: BlockSpec) -> str:
        """Describe what runs its own code in a fused layer with this spec; empty for nothing."""
        course = self.course_of(spec)
        return spec.mixer or spec.feeder or ("" if course is None else course.note)

    def why_not(self, layer: Any, config: Config, index: int) -> str | None:
        """Return why a layer cannot be fused, by the family's rules or by a block's limits, or None."""
        reason = self.refuse(config)
        if reason is not None:
            return reason
        spec = self.spec_of(layer, config, index)
        if spec.causal and getattr(config, "is_causal", None) is False:
            # Without a mask, some of transformers' attention implementations are then causal, others not.
            return "is_causal is False"
        if spec.feeder is None and spec.branches in ("both", "feed_forward") and spec.ffn < 1:
            return f"its feed-forward has {spec.ffn} units"
        if spec.rope is not None and (spec.rope.dim not in range(2, spec.head_dim + 1, 2)):
            return (
                f"its rotary width {spec.rope.dim} is not an even number from 2 to {spec.head_dim} (a head)"
            )
        return None

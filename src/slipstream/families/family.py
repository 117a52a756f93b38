"""What a family is: data that says which of a model's tensors play which role, and what the numbers are."""

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
    "Tiny",
]

Config = Any
"""A transformers `PretrainedConfig`: attributes only, never imported here."""


@dataclass(frozen=True)
class Tiny:
    """A small random model of the family, for its tests.

    Attributes:
        model: Class name in transformers.
        config: Class name of its config.
        options: Keyword arguments of the config.
        label: Tells variants of one family apart in the sweep.
    """

    model: str
    config: str
    options: Mapping[str, Any]
    label: str = ""


@dataclass(frozen=True)
class OwnBias:
    """What a layer adds to its scores by a part of its own, which stays in the layer and runs its own code.

    Attributes:
        make: Of the layer and the arguments of its call by name: `(1 | B, H, S, L)`, or None.
        reads: Names of arguments that only this part reads.
    """

    make: Callable[[Any, Mapping[str, Any]], Any]
    reads: frozenset[str] = frozenset()


class Heads(Protocol):
    """What a family's own attention may ask of the block that it is the attention of."""

    @property
    def entered(self) -> Tensor:
        """`(B, S, C)`: the layer's input as its projections read it."""
        ...

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of other rows than the layer's own, `(..., C)` to `(..., H, D)` each."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of `(N, H, S, D)` over `(N, H, L, D)`, `(N, S, H, D)`; `mask` is added to the scores."""
        ...


@dataclass(frozen=True)
class OwnAttention:
    """Which keys a query meets, where that is neither all of them nor all that came before.

    Attributes:
        run: Of the heads, the layer, the arguments of its call by name, and q, k and v `(B, S, H, D)`,
            rotated where the spec has a rope. Returns what the queries heard, `(B, S, H, D)`, then whatever
            tensors the layer returns beside its states.
        reads: Names of arguments that only this code reads.
        packed: States are `(S, C)`, of any number of sequences.
    """

    run: Callable[..., tuple[Tensor, ...]]
    reads: frozenset[str]
    packed: bool = False


@dataclass(frozen=True)
class OwnMixer:
    """What stands in a branch's place, as a state space does: a part that stays and runs its own code.

    Attributes:
        part: Its path in the layer; its parameters are the layer's own affair.
        call: Of the part, its input `(B, S, C)` and the arguments of the layer's call by name: its answer.
        reads: Names of arguments that only this part reads.
    """

    part: str
    call: Callable[[Any, Any, Mapping[str, Any]], Any]
    reads: frozenset[str] = frozenset()


class Branches(Protocol):
    """What a family's own course may ask of the block; rows are `(..., C)`."""

    @property
    def spec(self) -> BlockSpec:
        """The block in numbers."""
        ...

    def norm(self, role: Role, x: Tensor) -> Tensor:
        """A norm of the block, or `x` where it has none of this role."""
        ...

    def linear(self, role: Role, x: Tensor) -> Tensor:
        """A matrix of the block, and its bias."""
        ...

    def attend(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        mask_of: Callable[[Tensor], Tensor] | None = None,
        keys: float = 1.0,
        shared_as: Any = None,
        beyond: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The attention between its norms, of `(B, S, C)`.

        Args:
            x: Normalised.
            mask: In place of the one that the layer was called with.
            mask_of: Makes it of the values `(B, K, L, D)` that are attended to, the cache's among them.
            keys: Multiplies keys.
            shared_as: The name of the layer's own, or of the borrowed, keys and values among those that are
                shared; None for the type of the layer.
            beyond: Keys and values `(B, K, M, D)` of other rows, which are seen behind the layer's own; the
                mask is of all of them.
        """
        ...

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward, or the experts, between its norms."""
        ...

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each of `(N, C)`, `(N, k)`, after their weights in float32."""
        ...

    def mix(self, x: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        """What experts say of `(N, C)`, by a choice, in which -1 adds nothing; without shared ones."""
        ...

    def halves(self) -> tuple[Branches, Branches]:
        """The branches of each half of a layer that has them twice, under the same roles.

        Each half has a place of its own in the cache: twice the layer's, and the one after it.
        """
        ...

    def heed(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of `(B, H, S, D)` over `(B, K, L, D)`: `(B, S, H * D)`; `mask` as torch takes it."""
        ...


@dataclass(frozen=True)
class OwnCourse:
    """How a layer's branches follow each other, where that is not the block's way, and what else it has.

    Attributes:
        run: Of the branches, the layer, its input `(B, S, C)` (or several of them, stacked) and the arguments
            of its call by name: what the layer answers, and whatever tensors it returns beside.
        parts: Paths of modules and parameters that stay the layer's own; a module's are its own affair.
        reads: Names of arguments that only this code reads.
        note: What of the layer runs its own code, for the report; empty for nothing to speak of.
        needs: Names of arguments without which the original's code runs.
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
        name: As transformers' `model_type` has it.
        layers: Names of the layer classes; a class matches by any name along its MRO. A name that others may
            use too is led by its module's: "modeling_distilbert.TransformerBlock".
        spec: Numbers of layer `index` by the model's config.
        specs: The same for single classes of `layers`, where a config has numbers for each (an encoder's
            layers and a decoder's).
        recipes: How each role's tensor is made of the layer's own.
        tiny: Small models that the tests build; every variant that takes another path has one.
        frame: What stands around the layers of a causal language model; None where there is nothing to
            generate, or where the engine road could not say what the model says.
        encoder: What stands around the layers of an encoder of text; None where its own forward is to run.
        refuse: Why a config cannot be served, or None.
        ignored: Patterns of parameters of the layer that carry nothing.
        rope_table: Path of the layer's own `[sin | cos]` table by position, where the model passes none.
        rotary: Path of the layer's own rotary module, where the model passes no angles.
        bias: What the layer itself adds to its scores; its parameters are `ignored`.
        relative: Path of the layer's part whose `compute_bias` makes biases by relative position.
        attention: How layers attend whose spec says `own_attention`.
        measure: Numbers of a layer that its config and index do not give, of the layer itself and the config;
            then `spec` is not asked.
        mixers: What stands in attention's place in layers whose spec names a mixer, by that name.
        feeders: What stands in the feed-forward's place in layers whose spec names a feeder, by that name.
        courses: How branches follow each other in layers whose spec names a course, by that name.
        unread: Names of arguments that layers are handed and do not read.
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
        """Numbers of layer `index`, which is of a class of the family."""
        if self.measure is not None:
            return self.measure(layer, config)
        names = (known.__name__ for known in type(layer).__mro__)
        spec = next((self.specs[name] for name in names if name in self.specs), self.spec)
        return spec(config, index)

    def mixer_of(self, spec: BlockSpec) -> OwnMixer | None:
        """What stands in attention's place in a layer of these numbers, or None."""
        return None if spec.mixer is None else self.mixers[spec.mixer]

    def feeder_of(self, spec: BlockSpec) -> OwnMixer | None:
        """What stands in the feed-forward's place in a layer of these numbers, or None."""
        return None if spec.feeder is None else self.feeders[spec.feeder]

    def ignores(self, spec: BlockSpec) -> tuple[str, ...]:
        """Patterns of parameters of a layer of these numbers that no role takes."""
        own = self.own_parts(spec)
        return (*self.ignored, *own, *(f"{part}.*" for part in own))

    def course_of(self, spec: BlockSpec) -> OwnCourse | None:
        """How the branches of a layer of these numbers follow each other, or None."""
        return None if spec.course is None else self.courses[spec.course]

    def own_parts(self, spec: BlockSpec) -> tuple[str, ...]:
        """Paths of what stays the layer's own and runs its own code."""
        own, course = (self.mixer_of(spec), self.feeder_of(spec)), self.course_of(spec)
        parts = (one.part for one in own if one is not None)
        return (*parts, *(() if course is None else course.parts))

    def own_code(self, spec: BlockSpec) -> str:
        """What of a fused layer of these numbers runs its own code, in words; empty for nothing."""
        course = self.course_of(spec)
        return spec.mixer or spec.feeder or ("" if course is None else course.note)

    def why_not(self, layer: Any, config: Config, index: int) -> str | None:
        """Why layer `index` cannot be served: the family's own reason, or what no block does; or None."""
        reason = self.refuse(config)
        if reason is not None:
            return reason
        spec = self.spec_of(layer, config, index)
        if spec.causal and getattr(config, "is_causal", None) is False:
            # Then no mask means causality to some of transformers' attentions, and none of it to others.
            return "is_causal is False"
        if spec.feeder is None and spec.branches in ("both", "feed_forward") and spec.ffn < 1:
            return "its feed-forward has no width"
        if spec.rope is not None and (spec.rope.dim not in range(2, spec.head_dim + 1, 2)):
            return f"{spec.rope.dim} of {spec.head_dim} dims of a head are rotated, which are not pairs"
        return None

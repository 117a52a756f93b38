"""The quantization sections, and the only code that decides whether and how weights are quantized.

In DeepSpeed every `enabled` here is True by default, without effect. In Slipstream quantization is active if
the caller set anything in the section and did not switch it off.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from slipstream.config.section import Section
from slipstream.config.values import BitWidth, Count, Flag

__all__ = [
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "OutsideFormat",
    "QKVQuantConfig",
    "QuantizationConfig",
    "WeightFormat",
    "WeightQuantConfig",
]

WeightFormat = Literal["int8", "int4", "fp8", "fp6", "fp6-e3m2", "bf13"]
OutsideFormat = Annotated[
    Literal["int8", "int4", "fp8", "fp6", "fp6-e3m2", "bf13", "none"],
    BeforeValidator(lambda value: "none" if value is False else value),
]
"""Format of a matrix outside the layers; False means "none"."""

_BITS: dict[str, int] = {"int8": 8, "int4": 4, "fp8": 8, "fp6": 6, "fp6-e3m2": 6}
"""Bits per value of the formats that `num_bits` can select."""

_FORMATS: dict[int, WeightFormat] = {8: "int8", 4: "int4", 6: "fp6"}

_NAMES = f"the name of a weight format: {', '.join(get_args(WeightFormat))}"


class BaseQuantConfig(Section):
    """What weights and activations have in common."""

    enabled: Flag = Field(default=True, description="whether to quantize these once `quant` is active")
    num_bits: BitWidth = Field(default=8, description="bits per value: 4, 6 or 8")
    q_type: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric", description="without or with a zero point (of int4 weights: a minimum)"
    )
    q_groups: Count = Field(default=1, description="groups per row, each with its own scale")


class WeightQuantConfig(BaseQuantConfig):
    """How weights are stored; a string such as "int4" is short for `format`."""

    short_form: ClassVar[str] = _NAMES

    format: WeightFormat | None = Field(
        default=None, description="weight format by name; None takes it from `num_bits`"
    )
    quantized_initialization: dict[str, Any] = Field(
        default_factory=dict, description="DeepSpeed's group-wise quantization at model construction"
    )
    post_init_quant: dict[str, Any] = Field(
        default_factory=dict, description="DeepSpeed's group-wise quantization by module name"
    )

    @classmethod
    def shorthand(cls, value: object) -> object:
        """Expand a string such as `quant={"weight": "int4"}`."""
        return {"format": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _bits_follow_format(cls, values: Any) -> Any:
        name = values.get("format") if isinstance(values, dict) else None
        bits = _BITS.get(name) if isinstance(name, str) else None
        return values if bits is None else {"num_bits": bits, **values}

    @model_validator(mode="after")
    def _bits_agree(self) -> WeightQuantConfig:
        if self.format is None:
            return self
        bits, asked = _BITS.get(self.format), "num_bits" in self.model_fields_set
        if asked and bits != self.num_bits:
            raise ValueError(
                f"format={self.format!r} contradicts num_bits={self.num_bits}: "
                f"it has {self.format.removeprefix('bf') if bits is None else bits} bits; leave num_bits out"
            )
        return self


class ActivationQuantConfig(BaseQuantConfig):
    """How inputs of int8, int4 and fp8 linears are quantized; a bool is short for `enabled`."""

    short_form: ClassVar[str] = "True or False"

    @classmethod
    def shorthand(cls, value: object) -> object:
        """Expand `quant={"activation": True}`."""
        return {"enabled": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _eight_bits(self) -> ActivationQuantConfig:
        if self.num_bits != 8:
            raise ValueError(f"num_bits={self.num_bits} must be 8: no matmul takes narrower activations")
        return self


class QKVQuantConfig(Section):
    """Whether the query, key and value projections are quantized."""

    enabled: Flag = Field(
        default=True, description="whether to quantize the projection of query, key and value"
    )


class QuantizationConfig(Section):
    """What is quantized and how; a string such as "int4" is short for `weight.format`."""

    short_form: ClassVar[str] = _NAMES

    enabled: Flag = Field(default=True, description="False switches all of `quant` off")
    activation: ActivationQuantConfig = Field(
        default=ActivationQuantConfig(), description="the inputs of quantized linears"
    )
    weight: WeightQuantConfig = Field(default=WeightQuantConfig(), description="the weights of linears")
    qkv: QKVQuantConfig = Field(default=QKVQuantConfig(), description="the projection of q, k and v")
    head: OutsideFormat = Field(
        default="int8",
        description='format of the vocabulary projection once `quant` is active, or "none"; bf13 with bf13 '
        "weights unless it is set",
    )
    embedding: OutsideFormat = Field(default="none", description='format of the token embedding, or "none"')

    @classmethod
    def shorthand(cls, value: object) -> object:
        """Expand a string such as `quant="int4"`."""
        return {"weight": {"format": value}} if isinstance(value, str) else value

    @property
    def weight_format(self) -> WeightFormat | None:
        """Name of the weights' format, or None if quantization was not requested or is switched off."""
        if not (self._asked_for and self.enabled and self.weight.enabled):
            return None
        return self.weight.format or _FORMATS[self.weight.num_bits]

    @property
    def head_format(self) -> WeightFormat | None:
        """Name of the vocabulary projection's format, or None if it stays plain.

        It is quantized whenever the weights are; with plain weights, only if `head` is set.
        """
        asked = "head" in self.model_fields_set
        if not (self.enabled and (asked or self.weight_format is not None)) or self.head == "none":
            return None
        return "bf13" if self.weight_format == "bf13" and not asked else self.head

    @property
    def embedding_format(self) -> WeightFormat | None:
        """Name of the token embedding's format, or None if it stays plain."""
        return self.embedding if self.enabled and self.embedding != "none" else None

    @property
    def activation_quantized(self) -> bool:
        """Whether activations are quantized, too, which requires a setting in `activation`."""
        asked_for = bool(self.activation.model_fields_set)
        return asked_for and self.activation.enabled and self.weight_format is not None

    @property
    def switched_off(self) -> bool:
        """Whether the caller explicitly switched weight quantization off."""
        return not (self.enabled and self.weight.enabled)

    @property
    def _asked_for(self) -> bool:
        return _asks(self.explicit())

    @model_validator(mode="after")
    def _activations_need_weights(self) -> QuantizationConfig:
        if self.enabled and not self.weight.enabled and self.activation.explicit().get("enabled"):
            raise ValueError(
                "activation.enabled=True contradicts weight.enabled=False: a matmul takes narrow activations "
                "only together with narrow weights; drop one of the two"
            )
        if self.activation_quantized and self.weight_format not in ("int8", "int4", "fp8"):
            raise ValueError(
                f"activation: 8-bit inputs do not go with {self.weight_format} weights: a matmul takes "
                'integers, or fp8, on both sides; use weight.format="int8", "int4" or "fp8", or leave '
                "activation out"
            )
        asked, plain = self.activation.explicit(), {"q_type": "symmetric", "q_groups": 1}
        odd = [name for name, only in plain.items() if asked.get(name, only) != only]
        if self.activation_quantized and self.weight_format == "fp8" and odd:
            raise ValueError(
                f"activation.{odd[0]}={asked[odd[0]]!r} does not go with fp8 weights: their matmuls take "
                f"one scale for each row, and no zero point; leave {odd[0]} out"
            )
        return self


def _asks(given: dict[str, Any]) -> bool:
    """Whether any field requests quantization; switching something off does not count."""
    return any(
        _asks(value)
        if name in ("activation", "weight", "qkv")
        else not (name == "enabled" and value is False)
        and not (name in ("head", "embedding") and value == "none")
        for name, value in given.items()
    )

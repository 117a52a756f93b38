"""The nested sections besides quantization and ZeRO: tensor parallelism, experts, checkpoint."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from slipstream.config.section import Section
from slipstream.config.values import Count, Experts, Flag, PathText

__all__ = ["CheckpointConfig", "MoEConfig", "TensorParallelConfig"]


class TensorParallelConfig(Section):
    """How each layer is split over ranks."""

    enabled: Flag = Field(default=True, description="whether layers may be split at all")
    tp_size: Count = Field(default=1, description="ranks that one layer is split over")
    tp_grain_size: Count = Field(default=64, description="smallest block of rows that a shard is cut into")
    mpu: Any = Field(
        default=None, description="an object that knows the model-parallel group, as Megatron has one"
    )
    tp_group: Any = Field(default=None, description="a torch.distributed process group to split over")
    step_timeout: Count = Field(
        default=35, description="seconds that a rank waits for the others within a step"
    )

    @model_validator(mode="after")
    def _enabled_agrees(self) -> TensorParallelConfig:
        if not self.enabled and self.tp_size > 1:
            raise ValueError(f"enabled=False contradicts tp_size={self.tp_size}; drop one of the two")
        return self


class MoEConfig(Section):
    """How the experts of a mixture of experts are spread; a bool is short for `enabled`."""

    enabled: Flag = Field(default=True, description="whether experts may be spread over ranks")
    ep_size: Count = Field(default=1, description="ranks that the experts are spread over")
    moe_experts: Experts = Field(
        default_factory=lambda: [1],
        alias="num_experts",
        description="number of experts, one or one per layer",
    )
    type: Literal["standard", "residual"] = Field(
        default="standard", description="plain experts, or DeepSpeed-MoE's"
    )
    ep_mp_group: Any = Field(
        default=None,
        alias="expert_mp_group",
        description="a process group that splits each expert's own weights",
    )
    ep_group: Any = Field(
        default=None, alias="expert_group", description="a process group to spread experts over"
    )

    @classmethod
    def shorthand(cls, value: object) -> object:
        """Read `moe=True` and `moe=False`."""
        return {"enabled": value} if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _enabled_agrees(self) -> MoEConfig:
        if not self.enabled and self.ep_size > 1:
            raise ValueError(f"enabled=False contradicts ep_size={self.ep_size}; drop one of the two")
        return self


class CheckpointConfig(Section):
    """Where weights come from and go to: another place for three fields of the top level."""

    checkpoint_dir: PathText = Field(default=None, description="another place for `checkpoint`")
    save_mp_checkpoint_path: PathText = Field(
        default=None, description="another place for `save_mp_checkpoint_path`"
    )
    base_dir: PathText = Field(default=None, description="another place for `base_dir`")

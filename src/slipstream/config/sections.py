"""The nested sections besides quantization and ZeRO: tensor parallelism, experts, checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from slipstream.config.section import Section
from slipstream.config.values import Count, Experts, Flag, PathText

__all__ = ["CheckpointConfig", "MoEConfig", "TensorParallelConfig"]


class TensorParallelConfig(Section):
    """Tensor parallelism: how each layer is split over ranks."""

    enabled: Flag = Field(default=True, description="whether layers may be split")
    tp_size: Count = Field(default=1, description="number of ranks that split each layer")
    tp_grain_size: Count = Field(default=64, description="multiple of rows at which parts end")
    mpu: Any = Field(default=None, description="an object with the model-parallel group, such as Megatron's")
    tp_group: Any = Field(default=None, description="torch.distributed process group to split over")
    step_timeout: Count = Field(default=35, description="seconds to wait for other ranks within a step")

    @model_validator(mode="after")
    def _enabled_agrees(self) -> TensorParallelConfig:
        if not self.enabled and self.tp_size > 1:
            raise ValueError(f"enabled=False contradicts tp_size={self.tp_size}; drop one of the two")
        return self


class MoEConfig(Section):
    """Expert parallelism: how experts are spread over ranks; a bool is short for `enabled`."""

    short_form: ClassVar[str] = "True or False"

    enabled: Flag = Field(default=True, description="whether experts may be spread over ranks")
    ep_size: Count = Field(default=1, description="number of ranks to spread experts over")
    moe_experts: Experts = Field(
        default_factory=lambda: [1],
        alias="num_experts",
        description="number of experts, one for all layers or one per layer",
    )
    type: Literal["standard", "residual"] = Field(
        default="standard", description="standard experts, or DeepSpeed-MoE's residual ones"
    )
    ep_mp_group: Any = Field(
        default=None,
        alias="expert_mp_group",
        description="process group that splits each expert's weights",
    )
    ep_group: Any = Field(
        default=None, alias="expert_group", description="process group to spread experts over"
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
    """Where weights are loaded from and saved to: the same as three top-level fields."""

    checkpoint_dir: PathText = Field(default=None, description="the same as `checkpoint`")
    save_mp_checkpoint_path: PathText = Field(
        default=None, description="the same as `save_mp_checkpoint_path`"
    )
    base_dir: PathText = Field(default=None, description="the same as `base_dir`")

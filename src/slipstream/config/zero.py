"""The ZeRO section: the part of `zero_optimization` that applies without training, which is offloading."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Strict, model_validator

from slipstream.config.section import Section
from slipstream.config.values import Amount, Count, Flag, PathText

__all__ = ["OffloadParamConfig", "ZeroConfig"]


class OffloadParamConfig(Section):
    """Where the weights of layers stay while they are not in use."""

    device: Literal["none", "cpu", "nvme"] = Field(default="none", description="where the weights stay")
    nvme_path: PathText = Field(default=None, description="folder on a fast disk, for device='nvme'")
    pin_memory: Flag = Field(default=False, description="page-locked host memory, for faster copies to a GPU")
    buffer_count: Count = Field(default=5, description="layers on the compute device at once")
    buffer_size: Amount = Field(default=100_000_000, description="parameters per buffer")
    max_in_cpu: Amount = Field(
        default=1_000_000_000, description="parameters kept in host memory with device='nvme'"
    )

    @classmethod
    def shorthand(cls, value: object) -> object:
        """Read None, which is DeepSpeed's default, as a section with nothing set."""
        return {} if value is None else value

    @model_validator(mode="after")
    def _path_agrees(self) -> OffloadParamConfig:
        if self.device == "nvme" and self.nvme_path is None:
            raise ValueError("device='nvme' needs nvme_path, a folder on the disk to keep the weights in")
        if self.device != "nvme" and self.nvme_path is not None:
            raise ValueError(
                f"nvme_path={self.nvme_path!r} contradicts device={self.device!r}; use device='nvme'"
            )
        return self


class ZeroConfig(Section):
    """Offloading: weights that do not fit on the compute device are streamed through it."""

    training_only: ClassVar[frozenset[str]] = frozenset(
        {
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "cpu_offload",
            "elastic_checkpoint",
            "gather_16bit_weights_on_model_save",
            "ignore_unused_parameters",
            "legacy_stage1",
            "load_from_fp32_weights",
            "offload_optimizer",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "sub_group_size",
            "zero_quantized_gradients",
        }
    )

    stage: Annotated[int, Strict(), Field(ge=0, le=3)] = Field(
        default=0, description="ZeRO stage; offloading belongs to stage 3"
    )
    offload_param: OffloadParamConfig = Field(
        default=OffloadParamConfig(), description="where offloaded weights stay"
    )
    prefetch_bucket_size: Amount = Field(
        default=50_000_000, alias="stage3_prefetch_bucket_size", description="parameters fetched ahead"
    )
    param_persistence_threshold: Amount = Field(
        default=100_000,
        alias="stage3_param_persistence_threshold",
        description="tensors below this size stay on the device",
    )
    model_persistence_threshold: Amount = Field(
        default=sys.maxsize,
        alias="stage3_model_persistence_threshold",
        description="total parameters that may stay on the device",
    )
    max_live_parameters: Amount = Field(
        default=1_000_000_000,
        alias="stage3_max_live_parameters",
        description="parameters on the device at once",
    )
    max_reuse_distance: Amount = Field(
        default=1_000_000_000,
        alias="stage3_max_reuse_distance",
        description="parameters reused within this distance are not released",
    )

    @model_validator(mode="after")
    def _stage_agrees(self) -> ZeroConfig:
        if self.offload_param.device != "none" and "stage" in self.model_fields_set and self.stage != 3:
            raise ValueError(
                f"stage={self.stage} contradicts offload_param.device={self.offload_param.device!r}: "
                "weights are offloaded in stage 3; use stage=3 or leave it out"
            )
        return self

"""Pipelines of several models (diffusers): an engine is built for every component, or for none."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from slipstream.config import InferenceConfig
from slipstream.engine.engine import InferenceEngine
from slipstream.errors import ConfigError, SlipstreamError, UnsupportedError
from slipstream.model.fused.watch import keep_padding
from slipstream.model.report import Report

__all__ = ["PipelineEngine", "is_pipeline", "shared_copy"]


def is_pipeline(model: Any) -> bool:
    """Whether an object is a pipeline: it has components, and is not a model itself."""
    return hasattr(model, "components") and not isinstance(model, nn.Module)


class PipelineEngine:
    """A pipeline with fused components: the same calls, the same outputs.

    Attributes that it does not have are looked up on the pipeline. The pipeline itself can still be used: its
    components are replaced by fused ones of the same classes, under the same names.

    Attributes:
        pipeline: The pipeline that was passed in.
        inference_config: The configuration of every component.
    """

    def __init__(self, pipeline: Any, config: InferenceConfig) -> None:
        """Build an engine for every component that is a `torch.nn.Module`.

        Each is built on a copy of its modules that shares the weights. The components are replaced only when
        all engines are built, so an error leaves the pipeline unchanged. Where weights are cast, the old ones
        stay in memory until then. A component that is None (a safety checker, say) stays None.

        Args:
            pipeline: Has `components`, a dictionary by name, and an attribute for each.
            config: The configuration for all components.

        Raises:
            ConfigError: No component is a model.
            UnsupportedError: A setting that is meant for one model, or components that are moved by hooks.
            SlipstreamError: Any other subclass, with the component's name; nothing was replaced.
        """
        _check(pipeline, config)
        engines: dict[str, InferenceEngine] = {}
        made: dict[int, InferenceEngine] = {}
        for name, component in pipeline.components.items():
            if not isinstance(component, nn.Module):
                continue
            try:
                engine = made.get(id(component)) or InferenceEngine(shared_copy(component), config)
            except SlipstreamError as error:
                raise type(error)(f"{name} of {type(pipeline).__name__}: {error}") from error
            engines[name] = made[id(component)] = engine
        for name, engine in engines.items():
            keep_padding(engine.module)
            setattr(pipeline, name, engine.module)
        self.pipeline, self.inference_config, self._engines = pipeline, config, engines

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline."""
        return self.pipeline(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the pipeline's attribute where the engine has none of that name."""
        if name.startswith("__") or "pipeline" not in self.__dict__:
            raise AttributeError(f"this engine of a pipeline has no attribute {name!r}")
        return getattr(self.pipeline, name)

    def report(self) -> dict[str, Report]:
        """Return the report of each component, by name."""
        return {name: engine.report() for name, engine in self._engines.items()}


def _check(pipeline: Any, config: InferenceConfig) -> None:
    name = type(pipeline).__name__
    models = {part: m for part, m in pipeline.components.items() if isinstance(m, nn.Module)}
    if not models:
        raise ConfigError(
            f"{name} has no component that is a torch.nn.Module, only "
            f"{', '.join(pipeline.components) or 'none at all'}; load its models first"
        )
    single = {
        "checkpoint": config.checkpoint,
        "config": config.config,
        "injection_policy": config.injection_policy,
        "enable_cuda_graph": config.enable_cuda_graph,
    }
    asked = next((field for field, value in single.items() if value), None)
    if asked is not None:
        raise UnsupportedError(
            f"{asked}={single[asked]!r} is for one model, and {name} has {len(models)}: {', '.join(models)}; "
            f"pass only that model, as in init_inference(pipe.{next(iter(models))}, ...)"
        )
    hooked = [part for part, model in models.items() if hasattr(model, "_hf_hook")]
    if hooked:
        raise UnsupportedError(
            f"{hooked[0]} of {name} is moved between devices by hooks (model or sequential offload), which "
            "fused parts do not follow; call pipe.remove_all_hooks() before init_inference"
        )


def shared_copy(model: nn.Module) -> nn.Module:
    """Copy a model's modules over the same memory; casting or moving the copy leaves the model unchanged."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)

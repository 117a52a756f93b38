"""Slipstream makes a pretrained PyTorch or Hugging Face transformer fast for inference with one call.

engine = slipstream.init_inference(model, dtype=torch.bfloat16, replace_with_kernel_inject=True)
out = engine(**tokens)
ids = engine.generate(input_ids, max_new_tokens=100)
"""

from __future__ import annotations

from slipstream.config import InferenceConfig, default_inference_config
from slipstream.engine.engine import InferenceEngine
from slipstream.engine.open import init_inference, inspect
from slipstream.errors import (
    ConfigError,
    DeviceError,
    InjectionError,
    RequestError,
    SlipstreamError,
    TokenLimitError,
    UnsupportedError,
    WeightError,
)
from slipstream.model.report import LayerReport, Report

__all__ = [
    "ConfigError",
    "DeviceError",
    "InferenceConfig",
    "InferenceEngine",
    "InjectionError",
    "LayerReport",
    "Report",
    "RequestError",
    "SlipstreamError",
    "TokenLimitError",
    "UnsupportedError",
    "WeightError",
    "__version__",
    "default_inference_config",
    "init_inference",
    "inspect",
]

__version__ = "0.1.0"

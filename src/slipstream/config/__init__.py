"""The configuration: its fields, their meaning, and the errors and warnings for mistakes.

`inference.py` is the top level; `sections.py`, `quant.py` and `zero.py` are the nested sections, `section.py`
their base; `values.py` has the kinds of value, `deprecated.py` the moved fields, `effects.py` what each field
does, `notices.py` the warnings, `resolve.py` the four ways to pass a configuration, `environment.py` the
environment variables, `document.py` the generated reference page.
"""

from slipstream.config.inference import InferenceConfig, default_inference_config
from slipstream.config.quant import (
    ActivationQuantConfig,
    BaseQuantConfig,
    QKVQuantConfig,
    QuantizationConfig,
    WeightFormat,
    WeightQuantConfig,
)
from slipstream.config.resolve import resolve
from slipstream.config.sections import CheckpointConfig, MoEConfig, TensorParallelConfig
from slipstream.config.zero import OffloadParamConfig, ZeroConfig

__all__ = [
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "CheckpointConfig",
    "InferenceConfig",
    "MoEConfig",
    "OffloadParamConfig",
    "QKVQuantConfig",
    "QuantizationConfig",
    "TensorParallelConfig",
    "WeightFormat",
    "WeightQuantConfig",
    "ZeroConfig",
    "default_inference_config",
    "resolve",
]

"""The configuration: what callers may write, what it means, and how every mistake in it is answered.

`inference.py` is the top level, `sections.py`, `quant.py` and `zero.py` the nested ones, `section.py` their
base, `values.py` the kinds of value, `deprecated.py` the moved fields, `effects.py` what each one does,
`notices.py` the warnings, `resolve.py` the four ways to give it, `environment.py` the environment variables,
`document.py` the page made of all this.
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

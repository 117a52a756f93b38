"""The public API is pinned, so that adding or removing a name is always deliberate."""

from __future__ import annotations

import inspect

import slipstream
from slipstream import errors

NAMES = [
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
ENGINE = {
    "forward", "generate", "report", "profile_model_time", "model_times", "layer_times", "save_checkpoint",
    "load_checkpoint", "destroy", "why_compatible", "state_dict", "load_state_dict",
    "refresh_weights", "load_adapter", "set_adapter", "merge_adapter", "unmerge_adapter",
    "disable_adapter", "delete_adapter", "active_adapters", "compile", "is_compiled",
}  # fmt: skip
TREE = {
    "SlipstreamError": (Exception,),
    "ConfigError": (errors.SlipstreamError, ValueError),
    "WeightError": (errors.SlipstreamError,),
    "InjectionError": (errors.SlipstreamError,),
    "UnsupportedError": (errors.SlipstreamError, NotImplementedError),
    "DeviceError": (errors.SlipstreamError, RuntimeError),
    "RequestError": (errors.SlipstreamError, ValueError),
    "TokenLimitError": (errors.SlipstreamError, RuntimeError),
}


def test_the_package_exports_exactly_these_names() -> None:
    assert sorted(slipstream.__all__) == NAMES
    assert all(hasattr(slipstream, name) for name in NAMES)


def test_the_engine_has_exactly_these_methods_of_its_own() -> None:
    ours = (c for c in slipstream.InferenceEngine.__mro__ if c.__module__.startswith("slipstream."))
    own = {name for c in ours for name in vars(c) if not name.startswith("_")}
    assert own == ENGINE


def test_the_error_tree_is_as_drawn() -> None:
    found = {name: getattr(errors, name) for name in errors.__all__}
    assert {name: value.__bases__ for name, value in found.items() if isinstance(value, type)} == TREE
    drawn = errors.__doc__ or ""
    for name, bases in TREE.items():
        beside = [base.__name__ for base in bases if base not in (Exception, errors.SlipstreamError)]
        assert name + (f" ({beside[0]})" if beside else "") in drawn


def test_signatures_are_the_promised_ones() -> None:
    assert list(inspect.signature(slipstream.init_inference).parameters) == ["model", "config", "kwargs"]
    assert list(inspect.signature(slipstream.inspect).parameters) == ["model"]
    assert list(inspect.signature(slipstream.InferenceEngine).parameters) == ["model", "config"]
    load = inspect.signature(slipstream.InferenceEngine.load_checkpoint).parameters
    assert [(p.name, p.default) for p in load.values()][2:] == [("tag", None), ("strict", True)]
    profile = inspect.signature(slipstream.InferenceEngine.profile_model_time).parameters
    assert profile["use_cuda_events"].default is True

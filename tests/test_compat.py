"""DeepSpeed's names in `slipstream.compat`: aliases of classes, and helpers that inference scripts use."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream import compat, config
from slipstream.config.notices import warn_once
from slipstream.errors import ConfigError, DeviceError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_classes_are_the_same_under_another_name() -> None:
    assert compat.DeepSpeedInferenceConfig is config.InferenceConfig
    assert compat.DeepSpeedTPConfig is config.TensorParallelConfig
    assert compat.DeepSpeedMoEConfig is config.MoEConfig
    assert compat.QuantizationConfig is config.QuantizationConfig
    assert compat.InferenceCheckpointConfig is config.CheckpointConfig
    assert compat.DeepSpeedZeroConfig is config.ZeroConfig
    assert compat.default_inference_config() == config.default_inference_config()


def test_the_surface_is_pinned() -> None:
    assert sorted(compat.__all__) == [
        "ActivationQuantConfig",
        "BaseQuantConfig",
        "DeepSpeedInferenceConfig",
        "DeepSpeedMoEConfig",
        "DeepSpeedTPConfig",
        "DeepSpeedZeroConfig",
        "DeepSpeedZeroOffloadParamConfig",
        "InferenceCheckpointConfig",
        "InferenceEngine",
        "OnDevice",
        "QKVQuantConfig",
        "QuantizationConfig",
        "WeightQuantConfig",
        "add_config_arguments",
        "default_inference_config",
        "init_distributed",
        "init_inference",
    ]
    with pytest.raises(AttributeError, match="initialize"):
        compat.initialize  # noqa: B018


def test_the_engine_is_the_library_s(monkeypatch: pytest.MonkeyPatch) -> None:
    import slipstream

    def build(model: Any, config: Any = None, **kwargs: Any) -> Any:
        return model, config, kwargs

    marker = object()
    monkeypatch.setattr(slipstream, "init_inference", build, raising=False)
    monkeypatch.setattr(slipstream, "InferenceEngine", marker, raising=False)
    assert compat.init_inference("model", {"dtype": "fp32"}, max_tokens=3) == (
        "model",
        {"dtype": "fp32"},
        {"max_tokens": 3},
    )
    assert compat.InferenceEngine is marker


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16),
        (torch.int8, torch.float16),
        (None, torch.float32),
    ],
)
def test_modules_are_built_on_the_device_in_the_dtype(given: Any, expected: torch.dtype) -> None:
    with compat.OnDevice(given, device="meta"):
        layer = nn.Linear(3, 5)
    assert layer.weight.is_meta
    assert layer.weight.dtype is expected
    after = nn.Linear(3, 5)
    assert (after.weight.device.type, after.weight.dtype) == ("cpu", torch.float32)


def test_the_default_device_is_meta() -> None:
    with compat.OnDevice(dtype=torch.float16):
        assert torch.empty(2).is_meta


def test_a_disabled_context_does_nothing() -> None:
    with compat.OnDevice(torch.bfloat16, device="meta", enabled=False):
        assert (torch.empty(2).device.type, torch.empty(2).dtype) == ("cpu", torch.float32)


def test_both_are_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), compat.OnDevice(torch.bfloat16):
        raise KeyError
    assert (torch.empty(2).device.type, torch.empty(2).dtype) == ("cpu", torch.float32)


def test_contexts_nest_and_are_entered_again() -> None:
    context = compat.OnDevice(torch.bfloat16)
    for _ in range(2):
        with context, compat.OnDevice(torch.float16, device="cpu"):
            assert (torch.empty(2).device.type, torch.empty(2).dtype) == ("cpu", torch.float16)
            with context:
                assert (torch.empty(2).is_meta, torch.empty(2).dtype) == (True, torch.bfloat16)
            assert torch.empty(2).dtype is torch.float16
    assert torch.empty(2).dtype is torch.float32


def test_a_dtype_that_inference_does_not_run_in_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype='fp8'"):
        compat.OnDevice("fp8")


def test_a_single_process_makes_a_group_of_its_own(no_gpu: None) -> None:
    compat.init_distributed(timeout=timedelta(seconds=5))
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("gloo", 0, 1)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1


def test_a_group_that_exists_is_left_alone(no_gpu: None) -> None:
    compat.init_distributed()
    group = dist.group.WORLD
    compat.init_distributed("gloo", world_size=7)
    assert dist.group.WORLD is group


def test_the_launcher_s_variables_are_used(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(compat, "begin", lambda backend, **kw: asked.update(kw, backend=backend))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    compat.init_distributed()
    assert asked == {"backend": "gloo", "init_method": "env://", "rank": 1, "world_size": 2, "timeout": None}
    compat.init_distributed(rank=0, world_size=3, distributed_port=29501)
    assert (asked["init_method"], asked["rank"], asked["world_size"]) == ("tcp://127.0.0.1:29501", 0, 3)


def test_a_port_that_is_not_used_warns(no_gpu: None) -> None:
    with pytest.warns(UserWarning, match="distributed_port=...*changes nothing"):
        compat.init_distributed(distributed_port=29500)
    assert dist.get_world_size() == 1


def test_a_group_that_is_not_wanted_is_not_made() -> None:
    compat.init_distributed(dist_init_required=False)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 1}, "give both"),
        ({"world_size": 2}, "give both"),
        ({"rank": 2, "world_size": 2}, "rank=2 must be below world_size=2"),
        ({"rank": 0, "world_size": 2}, "torchrun"),
    ],
)
def test_ranks_that_cannot_meet_are_refused(no_gpu: None, values: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compat.init_distributed(**values)
    assert not dist.is_initialized()


def test_nccl_without_a_gpu_is_refused_with_the_way_out(no_gpu: None) -> None:
    with pytest.raises(DeviceError, match="gloo"):
        compat.init_distributed("nccl")


@pytest.mark.parametrize("name", ["auto_mpi_discovery", "verbose", "config"])
def test_an_argument_that_means_nothing_here_warns(no_gpu: None, name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=...*changes nothing"):
        compat.init_distributed(**{name: None})
    with pytest.raises(TypeError, match="verbos"):
        compat.init_distributed(verbos=True)


def test_the_arguments_of_a_launcher_are_parsed() -> None:
    parser = compat.add_config_arguments(argparse.ArgumentParser())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "ds.json")
    assert (args.deepscale, args.deepscale_config) == (False, None)
    assert parser.parse_args([]).deepspeed is False
    assert parser.parse_args(["--deepscale", "--deepscale_config", "a"]).deepscale_config == "a"
    assert "deepspeed_config" in parser.format_help()
    assert "deepscale" not in parser.format_help()

"""Slipstream's API under DeepSpeed's names: `import slipstream.compat as deepspeed` runs inference scripts.

The configuration classes, `init_inference` and `InferenceEngine` are the library's own under another name.
The rest is what such scripts use beside the engine: models on the meta device, process groups, command-line
arguments.
"""

from __future__ import annotations

import argparse
import importlib
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from slipstream.config import (
    ActivationQuantConfig,
    BaseQuantConfig,
    QKVQuantConfig,
    QuantizationConfig,
    WeightQuantConfig,
    default_inference_config,
    environment,
)
from slipstream.config import CheckpointConfig as InferenceCheckpointConfig
from slipstream.config import InferenceConfig as DeepSpeedInferenceConfig
from slipstream.config import MoEConfig as DeepSpeedMoEConfig
from slipstream.config import OffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from slipstream.config import TensorParallelConfig as DeepSpeedTPConfig
from slipstream.config import ZeroConfig as DeepSpeedZeroConfig
from slipstream.config.notices import warn_once
from slipstream.config.values import to_dtype
from slipstream.errors import ConfigError, DeviceError
from slipstream.parallel.groups import begin

__all__ = [
    "ActivationQuantConfig",
    "BaseQuantConfig",
    "DeepSpeedInferenceConfig",
    "DeepSpeedMoEConfig",
    "DeepSpeedTPConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "InferenceCheckpointConfig",
    "InferenceEngine",  # noqa: F822  (given by __getattr__)
    "OnDevice",
    "QKVQuantConfig",
    "QuantizationConfig",
    "WeightQuantConfig",
    "add_config_arguments",
    "default_inference_config",
    "init_distributed",
    "init_inference",
]

_IGNORED = {
    "auto_mpi_discovery": "ranks come from torchrun's variables or from the arguments",
    "config": "it would configure communication logging, which Slipstream does not have",
    "verbose": "logging is set up with Python's logging module",
}


def __getattr__(name: str) -> Any:
    # Imported lazily: a script that only builds a configuration needs no engine.
    if name == "InferenceEngine":
        return getattr(importlib.import_module("slipstream"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init_inference(model: Any, config: Any = None, **kwargs: Any) -> Any:
    """Build an engine; see `slipstream.init_inference`."""
    return importlib.import_module("slipstream").init_inference(model, config, **kwargs)


class OnDevice:
    """Build modules on a device and in a dtype: `with OnDevice(torch.bfloat16, device="meta"): ...`.

    On the meta device parameters have a shape but no memory. The same holds for buffers that the model
    computes when it is built (a rotary module's frequencies): the code that fills the parameters must compute
    them again.

    The device applies to this thread only; the default dtype is global to the process, so another thread that
    creates tensors at the same time sees it too. Both are restored on exit, also after an exception. The
    context can be nested and re-entered.

    Args:
        dtype: Dtype, or its name, in which floating-point parameters are created; None leaves the default as
            it is. int8 models are built in float16: the engine quantizes them later.
        device: Device on which tensors are created.
        enabled: False makes all of this do nothing.

    Raises:
        ConfigError: The dtype is not one that inference runs in.
    """

    def __init__(
        self, dtype: torch.dtype | str | None, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype = None if dtype is None else _float_dtype(dtype)
        self.device = torch.device(device)
        self.enabled = enabled
        self._entered: list[ExitStack] = []

    def __enter__(self) -> OnDevice:
        stack = ExitStack()
        if self.enabled:
            stack.enter_context(self.device)
            if self.dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().close()


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
    **ignored: Any,
) -> None:
    """Create torch.distributed's default process group, unless there is one already.

    Ranks and the rendezvous address come from the arguments, else from torchrun's variables; without either,
    the group consists of this process alone.

    Args:
        dist_backend: A backend of torch.distributed; None takes nccl with a GPU and gloo without.
        timeout: Maximum time that an operation waits for the other ranks; None keeps torch's default.
        init_method: URL of the rendezvous.
        rank: This process's rank; negative takes the launcher's.
        world_size: Number of ranks; negative takes the launcher's.
        distributed_port: Rendezvous port on this machine, for ranks given by argument without `init_method`.
        dist_init_required: False does nothing; otherwise the group is created if there is none.
        **ignored: DeepSpeed's other arguments, which have no effect here; each one warns.

    Raises:
        ConfigError: rank and world_size do not fit together.
        DeviceError: The backend needs a GPU and there is none.
        TypeError: An argument that DeepSpeed does not have either.
    """
    for name in ignored:
        if name not in _IGNORED:
            raise TypeError(f"init_distributed() got an unexpected keyword argument {name!r}")
        warn_once(f"init_distributed({name}=...) changes nothing: {_IGNORED[name]}.")
    if dist_init_required is False or dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    backend = dist_backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        raise DeviceError(
            "dist_backend='nccl' needs a CUDA GPU, and torch finds none; use 'gloo' or leave it out"
        )
    if (rank < 0) != (world_size < 0):
        raise ConfigError(
            f"rank={rank} and world_size={world_size}: give both, or neither to take the launcher's"
        )
    given = rank >= 0
    rank, world_size = (rank, world_size) if given else (environment.rank(), environment.world_size())
    if rank >= world_size:
        raise ConfigError(f"rank={rank} must be below world_size={world_size}")
    _join(backend, rank, world_size, _meeting_point(init_method, distributed_port, given), timeout)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that DeepSpeed's launcher passes to a script, and return the parser.

    `--deepspeed` and `--deepspeed_config` are shown; the older spellings are accepted and hidden.
    """
    group = parser.add_argument_group("DeepSpeed", "accepted for scripts written for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="whether the script should use the engine")
    group.add_argument("--deepspeed_config", metavar="FILE", help="JSON file to give to init_inference")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", metavar="FILE", help=argparse.SUPPRESS)
    return parser


def _float_dtype(value: torch.dtype | str) -> torch.dtype:
    try:
        dtype = to_dtype(value)
    except ValueError as error:
        raise ConfigError(f"dtype={value!r} {error}") from None
    return torch.float16 if dtype is torch.int8 else dtype


def _meeting_point(init_method: str | None, port: int | None, ranks_given: bool) -> str | None:
    """Return the rendezvous URL, or None if this process is alone."""
    if port is not None:
        if ranks_given and init_method is None:
            return f"tcp://127.0.0.1:{port}"
        warn_once("init_distributed(distributed_port=...) changes nothing: another address is in use.")
    if init_method is not None:
        return init_method
    return "env://" if environment.launched() else None


def _join(backend: str, rank: int, world_size: int, url: str | None, timeout: timedelta | None) -> None:
    if url is not None:
        begin(backend, init_method=url, rank=rank, world_size=world_size, timeout=timeout)
    elif world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        begin(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        raise ConfigError(
            f"world_size={world_size} without a rendezvous address; start the processes with torchrun, "
            "or give init_method"
        )

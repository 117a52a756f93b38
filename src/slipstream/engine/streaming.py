"""Decides whether and how layers are streamed: from the configuration's `zero` section to a `Streamer`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import InferenceConfig
from slipstream.devices import CpuDevice, Device
from slipstream.errors import ConfigError, UnsupportedError
from slipstream.model.fuse import Verdict
from slipstream.model.layers import Found
from slipstream.model.streaming.offload import one_by_one
from slipstream.model.streaming.stream import Offload, Streamer
from slipstream.model.weights.filling import Filling
from slipstream.ops.bind import Bound

__all__ = ["check_streamed", "open_streamer", "stack_on_lease"]


def open_streamer(config: InferenceConfig, device: Device, filling: Filling | None) -> Streamer | None:
    """Return a streamer for the layers, or None if they stay on the device.

    Args:
        config: Has the `zero` section.
        device: The device that the engine runs on.
        filling: The source of the weights; None if the model has them.

    Raises:
        ConfigError: `nvme_path` is not a folder that can be written to.
        UnsupportedError: Captured graphs are enabled, too.
    """
    wish = config.zero.offload_param
    if wish.device == "none":
        return None
    if config.enable_cuda_graph:
        raise UnsupportedError(
            f"enable_cuda_graph=True contradicts zero.offload_param.device={wish.device!r}: a captured step "
            "cannot wait for streamed layers; drop one of them"
        )
    device = CpuDevice() if config.keep_module_on_host else device
    if wish.device == "cpu" and device.name == "cpu" and filling is None:
        warnings.warn(
            "zero.offload_param.device='cpu' changes nothing: the model is in the CPU's memory already. Give "
            "the model's folder or a checkpoint to stream from its files, or device='nvme'",
            UserWarning,
            stacklevel=5,
        )
        return None
    folder = None if wish.nvme_path is None else Path(wish.nvme_path).expanduser()
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"zero.offload_param.nvme_path={wish.nvme_path!r} is not a writable folder; create it, "
            "or name another"
        )
    given = "param_persistence_threshold" in config.zero.model_fields_set
    least = config.zero.param_persistence_threshold if given else 0
    offload = Offload(wish.device, folder, wish.buffer_count, wish.pin_memory, least)
    return Streamer(device, offload, _nowhere if filling is None else filling.source.locate)


def _nowhere(tensor: Any) -> None:
    return None


def check_streamed(
    layers: Sequence[Found], verdicts: Mapping[str, Verdict], streamer: Streamer | None
) -> None:
    """Refuse a model with layers that cannot be streamed, before it is changed.

    Raises:
        UnsupportedError: Naming the layer and the reason.
    """
    if streamer is None:
        return
    whole = [found.name for found in layers if verdicts[found.name].returns is None]
    if whole or not layers:
        reason = verdicts[whole[0]].reason if whole else "the model has no layers that repeat"
        raise UnsupportedError(
            f"zero.offload_param cannot stream {whole[0] if whole else 'this model'}: {reason}; only fused "
            "blocks are streamed (replace_with_kernel_inject=True)"
        )


def stack_on_lease(stack: Bound, device: Device, streamer: Streamer | None) -> Bound:
    """Return the stack to use: one that leases layers one by one if they are streamed to a GPU.

    The CPU's own stack takes leases itself.
    """
    return stack if streamer is None or device.name == "cpu" else one_by_one(stack)

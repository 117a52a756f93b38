"""Models without weights: built on the meta device, with the buffers that they compute themselves."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from slipstream.errors import WeightError
from slipstream.model.check import MODEL_ERRORS

__all__ = ["hollow", "lost_buffers"]

_default_dtype = threading.Lock()


@contextmanager
def hollow(dtype: torch.dtype) -> Iterator[None]:
    """Within, this thread's modules get parameters on the meta device, and buffers with values.

    Args:
        dtype: What floating parameters are created in; the default dtype is the process's, and restored.
    """
    here = threading.get_ident()

    def empty(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)

    with _default_dtype:
        before = torch.get_default_dtype()
        handle = register_module_parameter_registration_hook(empty)
        try:
            torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(before)
            handle.remove()


def lost_buffers(model: nn.Module, given: frozenset[str]) -> dict[str, torch.Tensor]:
    """Values of the buffers on the meta device that no checkpoint brings, computed again.

    Args:
        model: Built on the meta device; only read.
        given: Buffers that the checkpoint has.

    Raises:
        WeightError: Nobody can compute them: the model is not one of transformers'.
    """
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in given]
    if not lost:
        return {}
    config = getattr(model, "config", None)
    try:
        if config is None:
            raise TypeError("it has no config to build it from again")
        with hollow(torch.get_default_dtype()), torch.no_grad(), torch.device("cpu"):
            build: Any = type(model)
            twin = dict(build(copy.deepcopy(config)).named_buffers())
        return {name: twin[name] for name in lost}
    except MODEL_ERRORS as error:
        why = str(error).strip().partition("\n")[0]
        raise WeightError(
            f"the buffers {', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''} are on the meta device, no "
            f"checkpoint has them, and {type(model).__name__} cannot be built again to compute them ({why}); "
            "build the model with its buffers on a real device"
        ) from error

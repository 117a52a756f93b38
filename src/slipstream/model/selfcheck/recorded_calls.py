"""Records the arguments of modules in a model while it runs on random input.

Shapes: any.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.selfcheck.probe import runs_of
from slipstream.model.selfcheck.proof import RecordedInputs
from slipstream.model.selfcheck.untouched import left_as_it_was

__all__ = ["recorded_inputs"]

log = logging.getLogger(__name__)


class _EnoughError(Exception):
    """Cuts a forward short once every module was called."""


def recorded_inputs(
    model: nn.Module, layers: Sequence[Found], paths: Mapping[str, Sequence[str]]
) -> dict[str, RecordedInputs]:
    """Run a model, record the first call of some of its modules, and leave the model unchanged.

    Args:
        model: The model, in eval mode and with its values.
        layers: The layers that contain the modules.
        paths: Paths of the modules relative to their layer, by the layer's name.

    Returns:
        Positional arguments by full name. Modules that were not called, or with keywords, are missing; all
        are missing if the model cannot run on the inputs of `runs_of`.
    """
    recorded: dict[str, RecordedInputs] = {}
    for root in sorted({found.root for found in layers}):
        of_root = [found for found in layers if found.root == root]
        names = [f"{found.name}.{path}" for found in of_root for path in paths.get(found.name, ())]
        if names:
            recorded |= _record(model, model.get_submodule(root), of_root, names)
    return recorded


def _record(
    model: nn.Module, root: nn.Module, layers: Sequence[Found], names: Sequence[str]
) -> dict[str, RecordedInputs]:
    recorded: dict[str, RecordedInputs] = {}
    pending = set(names)

    def recorder_for(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in pending:
                pending.discard(name)
                if args and not kwargs and all(isinstance(x, Tensor) and x.dim() > 1 for x in args):
                    recorded[name] = copy.deepcopy(args)
                if not pending:
                    raise _EnoughError

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(recorder_for(name), with_kwargs=True)
        for name in names
    ]
    try:
        with torch.no_grad(), left_as_it_was(root):
            for inputs in runs_of(root, layers)[:1]:
                root(**inputs)
    except _EnoughError:
        pass
    except MODEL_ERRORS as error:
        log.info("%s cannot be run on random input: %s: %s", type(root).__name__, type(error).__name__, error)
    finally:
        for handle in handles:
            handle.remove()
    return recorded

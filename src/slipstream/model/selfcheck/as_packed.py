"""Makes a layer's original code compute with unpacked weights, so that the self-check stays as strict."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.errors import InjectionError
from slipstream.formats import Format
from slipstream.model.fused.original import restore_layer
from slipstream.model.fused.state import Injected

__all__ = ["unpack_into"]


def unpack_into(twin: nn.Module, state: Injected, name: str, packed: Format) -> None:
    """Give a layer's twin the unpacked weights, so that the check stays as strict as without a format.

    Raises:
        InjectionError: A weight is off by more than its format allows.
    """
    # A parameter that several modules share is unpacked for each of them.
    original = {path: p.detach() for path, p in twin.named_parameters(remove_duplicate=False)}
    restore_layer(twin, state)
    for path, parameter in twin.named_parameters(remove_duplicate=False):
        before, after = original[path].float(), parameter.detach().float()
        largest = float(before.abs().max()) if before.numel() else 0.0
        # No group's bound exceeds this; the last terms are for rounding to the engine's dtype, and for scales
        # of weights so small that they count as zero.
        bound = largest * (packed.error + packed.floor + torch.finfo(parameter.dtype).eps)
        bound += torch.finfo(torch.float32).tiny
        off = float((after - before).abs().max()) if before.numel() else 0.0
        if not off <= bound:
            raise InjectionError(
                f"{name}.{path} is off by {off:.3g} once packed as {packed.name}, where its largest weight "
                f"is {largest:.3g} (allowed {bound:.3g}); the format, or the family's recipe, is wrong"
            )

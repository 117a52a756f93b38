"""torch's `nn.MultiheadAttention` outside of fused layers, such as the pooling head of SigLIP.

Once no parameter requires a gradient, torch projects keys that are not adjacent, as `batch_first` leaves
them, by copying the weights for each token: the keys of 2 images of 196 patches and 768 channels in bfloat16
take 290 ms, and 2.5 ms where a parameter requires one. Keys are therefore laid out first.

Shapes: B batch, L keys, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from slipstream.model.fused.defer import is_plain_run
from slipstream.model.fused.state import is_injected
from slipstream.model.layers import Found
from slipstream.model.subclass import namesake

__all__ = ["lay_out_keys"]


def lay_out_keys(model: nn.Module, layers: Sequence[Found]) -> None:
    """Make a model's multi-head attentions, except in fused layers, lay out their keys on the CPU.

    Args:
        model: Any module.
        layers: The layers that were examined.
    """
    fused = {id(part) for found in layers if is_injected(found.layer) for part in found.layer.modules()}
    for module in model.modules():
        plain = type(module).forward is nn.MultiheadAttention.forward and "forward" not in vars(module)
        if plain and module.batch_first and id(module) not in fused:
            module.__class__ = _kind(type(module))  # type: ignore[arg-type]


@functools.cache
def _kind(original: type[nn.Module]) -> type[nn.Module]:
    known: Any = original.forward

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        # With the keys as queries torch has a kernel of its own for all of the attention.
        if original.forward is known and key is not query and _is_batch(key):
            turned = key.transpose(0, 1).contiguous().transpose(0, 1)
            key, value = turned, turned if value is key else value
        return original.forward(self, query, key, value, *args, **kwargs)

    return namesake(original, {"forward": forward})


def _is_batch(key: Any) -> bool:
    """Whether keys are `(B, L, C)`, of several sequences, and only their values matter."""
    return type(key) is Tensor and key.dim() == 3 and len(key) > 1 and is_plain_run(key)

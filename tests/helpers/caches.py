"""Compares caches of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.helpers.models import close

__all__ = ["same_cache"]


def same_cache(expected: Any, got: Any, mask: Tensor, *, atol: float = 1e-3) -> None:
    """Assert that caches agree in length and states, and in keys and values of all but padding.

    Args:
        expected: The original's.
        got: The engine's.
        mask: Which tokens are no padding, `(B, L)`; there may be more than the caches have.
        atol: Largest difference.
    """
    lengths = [
        [layer.get_seq_length() for layer in one.layers if _has_keys(layer)] for one in (expected, got)
    ]
    assert lengths[0] == lengths[1]
    for theirs, ours in zip(expected.layers, got.layers, strict=True):
        assert type(theirs) is type(ours) and _has_keys(theirs) == _has_keys(ours)
        for name in ("keys", "values") if _has_keys(theirs) else ():
            one, other = getattr(theirs, name), getattr(ours, name)
            assert one.shape == other.shape
            seen = mask[:, : lengths[0][0]][:, -one.shape[2] :].bool()
            close(one.transpose(1, 2)[seen], other.transpose(1, 2)[seen], atol=atol)
        for name in ("conv_states", "recurrent_states"):
            one, other = getattr(theirs, name, {}).get(0), getattr(ours, name, {}).get(0)
            if one is not None and other is not None and name == "conv_states":
                one, other = one[:, :, 1:], other[:, :, 1:]  # the first has left the convolution's reach
            close(one, other, atol=atol)


def _has_keys(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), Tensor)

"""Runs convolutions of many channels over small images as products of the image's windows with the weight.

The library behind torch reorders a weight into its own layout in every call. For an image of 8 x 8 that takes
longer than the product: 29 million weights of Stable Diffusion's innermost blocks take 63 ms for 32 ms of
products. A channels-last weight is the matrix of a linear without any copy, and the windows of so small an
image are cheap to copy: 0.4 to 0.94 of the time on a Zen 4, in bfloat16 and float32.

Shapes: B batch, C channels, O output channels, H height, W width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.model.subclass import become, namesake
from slipstream.model.values import is_plain

__all__ = ["multiply_windows", "wide_convolutions"]

_STATE = "_slipstream_windows"
_LEAST_CHANNELS, _MOST_PIXELS = 1024, 512
"""Products are faster at 128 pixels with 1280 to 1536 channels, at 512 pixels with 1920 and 2560 channels,
and never at 1024 pixels. Measured with 64 to 2048 pixels and 512 to 2560 channels, windows of 3 x 3; `_pays`
uses a linear bound between these."""


def wide_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Names of plain 3 x 3 convolutions (no stride, dilation or groups) that have enough channels."""
    return tuple(name for name, module in model.named_modules() if _is_wide(module))


def _is_wide(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and "forward" not in vars(module)
        and module.in_channels > _LEAST_CHANNELS
        and module.kernel_size == (3, 3)
        and (module.stride, module.padding, module.dilation) == ((1, 1),) * 3
        and (module.groups, module.padding_mode) == (1, "zeros")
    )


def multiply_windows(model: nn.Module, names: tuple[str, ...]) -> None:
    """Make convolutions multiply windows where an image is small, in place; each class becomes a subclass."""
    become(model, names, _STATE, _windows_class)


@functools.cache
def _windows_class(original: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor) -> Any:
        weight = self.get_parameter("weight")
        if not is_plain(self, x) or not _pays(x, weight):
            return original.forward(self, x)
        batch, _, height, width = x.shape
        matrix = weight.permute(0, 2, 3, 1).flatten(1)  # a view: the channels lie last
        out = F.linear(_windows(x), matrix, self.bias)  # type: ignore[arg-type]
        return out.view(batch, height, width, -1).permute(0, 3, 1, 2)

    functools.update_wrapper(forward, original.forward)
    return namesake(original, {"forward": forward})


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is faster than the convolution, and applicable."""
    if x.dim() != 4 or x.device.type != "cpu" or x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        return False
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    channels_last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return channels_last and 0 < pixels <= min(_MOST_PIXELS, x.shape[1] - _LEAST_CHANNELS)


def _windows(x: Tensor) -> Tensor:
    """The 3 x 3 window around each pixel of `(B, C, H, W)`, zero-padded: `(B * H * W, 9 * C)`."""
    batch, channels, height, width = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    image, row, pixel, one = padded.stride()
    windows = padded.as_strided((batch, height, width, 3, 3, channels), (image, row, pixel, row, pixel, one))
    return windows.reshape(batch * height * width, 9 * channels)

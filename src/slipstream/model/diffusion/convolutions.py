"""Convolutions of many channels over small images, as products of the image's windows with the weight.

The library behind torch brings a weight into a layout of its own in every call. For an image of 8 x 8 that is
more than the product: 29 million weights of Stable Diffusion's innermost blocks take 63 ms for 32 ms of
products. With its channels last a weight is the matrix of a linear as it lies, and the windows of so small an
image are soon copied: 0.4 to 0.94 of the time on a Zen 4, in bfloat16 and float32.

Shapes: B batch, C channels, O channels of the answer, H height, W width.
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
"""With 1280 to 1536 channels it pays at 128 pixels, with 1920 and 2560 at 512, with none at 1024. Measured
with 64 to 2048 pixels and 512 to 2560 channels, windows of 3 x 3; a line is drawn between those."""


def wide_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Names of the convolutions of 3 x 3 that have enough channels, and nothing that a product has not."""
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
    """Let convolutions run so where an image is small, in place; each is of a subclass of its class."""
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
    """Whether a product is faster than the convolution, and as right."""
    if x.dim() != 4 or x.device.type != "cpu" or x.dtype != weight.dtype or x.shape[1] != weight.shape[1]:
        return False
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    channels_last = all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return channels_last and 0 < pixels <= min(_MOST_PIXELS, x.shape[1] - _LEAST_CHANNELS)


def _windows(x: Tensor) -> Tensor:
    """The 3 x 3 pixels around each pixel of `(B, C, H, W)`, zeros beyond its edges: `(B * H * W, 9 * C)`."""
    batch, channels, height, width = x.shape
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    image, row, pixel, one = padded.stride()
    windows = padded.as_strided((batch, height, width, 3, 3, channels), (image, row, pixel, row, pixel, one))
    return windows.reshape(batch * height * width, 9 * channels)

"""Random inputs on which a model is run to record how it calls its layers: tokens, images or audio.

Shapes: B batch, S tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Inputs", "beside_tokens", "sample_inputs", "takes_input", "vocabulary"]

Inputs = dict[str, Tensor]

_BATCH = 2
_FRAMES = 7
"""Audio frames after the convolutions before the layers."""


def takes_input(module: nn.Module) -> bool:
    """Whether a module is a model that runs on tokens, or on the output of `sample_inputs`."""
    accepts = inspect.signature(module.forward).parameters
    if "input_ids" in accepts and hasattr(module, "get_input_embeddings"):
        return True
    return _sense(module, accepts) is not None and hasattr(module, "config")


def vocabulary(root: nn.Module) -> int | None:
    """Return the vocabulary size of a model that takes `input_ids` and `attention_mask`; None for others."""
    accepts = inspect.signature(root.forward).parameters
    embeddings = getattr(root, "get_input_embeddings", None)
    if "input_ids" not in accepts or "attention_mask" not in accepts or embeddings is None:
        return None
    try:
        weight = getattr(embeddings(), "weight", None)
    except NotImplementedError:  # transformers does not know the embedding's name
        return _number(getattr(root, "config", None), "vocab_size")
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def beside_tokens(root: nn.Module, mask: Tensor) -> list[Inputs]:
    """Make inputs that a model takes besides tokens, and that reach modules which nothing else reaches.

    Args:
        root: The model.
        mask: `(B, S)`, 0 where a token is padding.

    Returns:
        Additional keyword arguments of its forward, for one run each; empty for most models.
    """
    accepts = inspect.signature(root.forward).parameters
    return [make(mask) for name, make in _BESIDE.items() if name in accepts]


def _global(mask: Tensor) -> Inputs:
    """Make a mask of globally attending tokens: the first real one of each row, and the last of the batch."""
    marks = torch.zeros_like(mask).scatter_(1, mask.argmax(dim=1, keepdim=True), 1)
    marks[-1, -1] = 1
    return {"global_attention_mask": marks}


def _entities(mask: Tensor) -> Inputs:
    """Make three entities per row, of one or two words; the last entity of the first row is padding."""
    places = torch.tensor([[4, -1], [5, 6], [4, -1]], device=mask.device).expand(len(mask), -1, -1)
    seen = mask.new_ones(len(mask), 3)
    seen[0, -1] = 0
    return {"entity_ids": torch.ones_like(seen), "entity_position_ids": places, "entity_attention_mask": seen}


_BESIDE: Mapping[str, Callable[[Tensor], Inputs]] = {
    "global_attention_mask": _global,
    "entity_ids": _entities,
}


def sample_inputs(root: nn.Module) -> list[Inputs]:
    """Make random input for a model of images or audio, in the sizes of its config.

    Returns:
        Keyword arguments of its forward, for one run each; empty for any other model.
    """
    accepts = inspect.signature(root.forward).parameters
    name = _sense(root, accepts)
    if name is None:
        return []
    like = next(p for p in root.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    runs = _MAKERS[name](getattr(root, "config", None), accepts, generator)
    return [
        {key: t.to(like) if t.is_floating_point() else t.to(like.device) for key, t in inputs.items()}
        for inputs in runs
    ]


def _sense(module: nn.Module, accepts: Mapping[str, Any]) -> str | None:
    """Return the name of a model's image or audio input, or None."""
    main = getattr(module, "main_input_name", None)
    names = [name for name in _MAKERS if name in accepts]
    return main if main in names else next(iter(names), None) if "input_ids" not in accepts else None


def _pictures(config: Any, accepts: Mapping[str, Any], generator: torch.Generator) -> list[Inputs]:
    """Make images of the config's size, or patches where images have individual shapes."""
    channels = int(_number(config, "num_channels", "in_channels", "in_chans") or 3)
    if "spatial_shapes" in accepts:
        return [_patches(config, channels, generator)]
    height, width = _pair(_value(config, "image_size") or 4 * _pair(_value(config, "patch_size") or 16)[0])
    if "aspect_ratio_mask" in accepts:
        return [_tiles(config, (channels, height, width), generator)]
    frames = _number(config, "num_frames") if _value(config, "tubelet_size") is not None else None
    shape = (*(() if frames is None else (frames,)), channels, height, width)
    return [{"pixel_values": _noise(generator, _BATCH, *shape)}]


def _tiles(config: Any, shape: tuple[int, ...], generator: torch.Generator) -> Inputs:
    """Make images cut into tiles; the second image has only one (Llama 3.2 Vision)."""
    tiles = _number(config, "max_num_tiles") or 1
    mask = torch.ones(_BATCH, 1, tiles, dtype=torch.long, device="cpu")
    mask[1, :, 1:] = 0
    return {
        "pixel_values": _noise(generator, _BATCH, 1, tiles, *shape),
        "aspect_ratio_mask": mask,
        "aspect_ratio_ids": torch.tensor([[2], [1]], device="cpu"),
    }


def _patches(config: Any, channels: int, generator: torch.Generator) -> Inputs:
    side = _pair(_value(config, "patch_size") or 16)[0]
    mask = torch.ones(_BATCH, 6, dtype=torch.long, device="cpu")
    mask[1, 4:] = 0
    return {
        "pixel_values": _noise(generator, _BATCH, 6, channels * side * side),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[2, 3], [2, 2]], device="cpu"),
    }


def _sound(config: Any, accepts: Mapping[str, Any], generator: torch.Generator) -> list[Inputs]:
    """Make a spectrogram of the config's size, or samples that convolutions turn into a few frames."""
    bins, length = _number(config, "num_mel_bins"), _number(config, "max_length")
    if bins is not None and length is not None:
        return [{"input_values": _noise(generator, _BATCH, length, bins)}]
    strides, kernels = _value(config, "conv_stride") or (320,), _value(config, "conv_kernel") or (400,)
    needed = _FRAMES
    for stride, kernel in zip(reversed(strides), reversed(kernels), strict=False):
        needed = (needed - 1) * int(stride) + int(kernel)
    wave = {"input_values": _noise(generator, _BATCH, needed)}
    if "attention_mask" not in accepts:
        return [wave]
    mask = torch.ones(_BATCH, needed, dtype=torch.long, device="cpu")
    mask[0, -3 * math.prod(int(stride) for stride in strides) :] = 0
    if _value(config, "conv_stride") is None:
        mask[0, needed // 3 :] = 0  # other convolutions, which may produce fewer frames
    return [wave, {**wave, "attention_mask": mask}]


def _spectrograms(config: Any, accepts: Mapping[str, Any], generator: torch.Generator) -> list[Inputs]:
    """Make spectrograms of the maximum length of Whisper's encoder, or of a few frames for Speech2Text."""
    bins, places = _number(config, "num_mel_bins"), _number(config, "max_source_positions")
    width = _number(config, "input_feat_per_channel")
    if width is not None:
        frames = _FRAMES * 2 ** (_number(config, "num_conv_layers") or 0)
        mask = torch.ones(_BATCH, frames, dtype=torch.long, device="cpu")
        mask[0, frames // 2 :] = 0
        return [{"input_features": _noise(generator, _BATCH, frames, width), "attention_mask": mask}]
    if bins is None or places is None:
        return []
    inputs = {"input_features": _noise(generator, _BATCH, bins, 2 * places)}
    if "input_features_mask" in accepts:
        inputs["input_features_mask"] = torch.ones(_BATCH, 2 * places, dtype=torch.long, device="cpu")
        inputs["input_features_mask"][0, places:] = 0
    return [inputs]


def _packed_patches(config: Any, accepts: Mapping[str, Any], generator: torch.Generator) -> list[Inputs]:
    """Make the patches of an image and a video in one row, for vision towers that take a grid for each."""
    merged = _number(config, "spatial_merge_size") or 1
    grids = torch.tensor([[1, 2 * merged, 3 * merged], [2, merged, 2 * merged]], device="cpu")
    side, channels = _pair(_value(config, "patch_size") or 14)[0], _number(config, "in_channels", "in_chans")
    width = (channels or 3) * _pair(_value(config, "temporal_patch_size") or 1)[0] * side * side
    patches = _noise(generator, int(grids.prod(dim=-1).sum()), width)
    return [{"hidden_states": patches, "grid_thw": grids}]


_MAKERS: Mapping[str, Callable[[Any, Mapping[str, Any], torch.Generator], list[Inputs]]] = {
    "pixel_values": _pictures,
    "input_values": _sound,
    "input_features": _spectrograms,
    "grid_thw": _packed_patches,
}


def _value(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _number(config: Any, *names: str) -> int | None:
    return next((v for name in names if isinstance(v := _value(config, name), int)), None)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    return (int(size[0]), int(size[-1])) if isinstance(size, list | tuple) else (int(size), int(size))


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw normal numbers in float32 on the CPU, whatever the caller's default dtype and device are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

"""diffusers' models: attention runs the bound op inside any processor, and convolutions are channels-last.

UNets, autoencoders and transformer denoisers (SD3, Flux, PixArt) have different attention processors, which
all call `scaled_dot_product_attention`. So the processors stay: while an attention module's forward runs,
that call goes to the engine's op. The module keeps its identity, and its class becomes a subclass; a
processor that is set later, such as an IP adapter's, is served as well.

Weights of convolutions are laid out with the channels last, which their outputs follow: the library behind
them reorders less (on a Zen 5 in bfloat16 most take 0.63 to 0.85 of the time), and tokens are a view of such
an image. Transformers within a UNet return such images, too (`model/diffusion/channels_last.py`).

Shapes: B batch, H heads, K kv heads, S queries, L keys, D head dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream.model.diffusion.channels_last import image_transformers, is_of_diffusers, keep_channels_last
from slipstream.model.diffusion.convolutions import multiply_windows, wide_convolutions
from slipstream.model.diffusion.feed_forwards import FeedPlan, plan_feeds, swap_feeds
from slipstream.model.fuse import Settings
from slipstream.model.layers import Found
from slipstream.model.parts.parts import Part
from slipstream.model.subclass import namesake
from slipstream.model.values import wants_operations
from slipstream.ops.bind import Bound

__all__ = ["AttendPlan", "attends", "plan_attention", "swap_attention", "with_attention"]

log = logging.getLogger(__name__)

_STATE = "_slipstream_attend"
_DIMS = (40, 64)
"""Head dims with which the op is checked: that of Stable Diffusion's first level, and a common one."""


@dataclass(frozen=True)
class AttendPlan:
    """The changes to a diffusers model.

    Attributes:
        names: Modules whose attention runs the op; empty where torch's own attention stays.
        op: The attention op.
        convolutions: Modules whose weights are laid out with the channels last.
        wide: Convolutions among them that multiply windows where an image is small.
        feeds: Changes to feed-forwards, or None.
        images: Transformers whose outputs keep their channels last.
        max_error: Largest error of the op compared with torch's attention.
    """

    names: tuple[str, ...]
    op: Bound
    convolutions: tuple[str, ...]
    wide: tuple[str, ...] = ()
    feeds: FeedPlan | None = None
    images: tuple[str, ...] = ()
    max_error: float = 0.0

    @property
    def changes(self) -> bool:
        """Whether the plan changes anything in the model."""
        return bool(
            self.names or self.convolutions or self.images or (self.feeds is not None and self.feeds.notes)
        )


def plan_attention(model: nn.Module, settings: Settings) -> AttendPlan | None:
    """Plan the changes to a diffusers model and check the op against torch's; the model is only read.

    Returns:
        The plan, or None for a model without diffusers modules.
    """
    if not any(is_of_diffusers(module) for module in model.modules()):
        return None
    names = tuple(name for name, module in model.named_modules() if _has_processor(module))
    convolutions = tuple(name for name, module in model.named_modules() if type(module) is nn.Conv2d)
    ops, on_cpu = settings.bind(None), settings.device.type == "cpu"
    wide = wide_convolutions(model) if on_cpu else ()
    feeds = plan_feeds(model, ops.feed_forward, alone=settings.mesh.is_alone) if on_cpu else None
    images, op = image_transformers(model), ops.attention
    if not names or op.name == "reference":
        return AttendPlan((), op, convolutions, wide, feeds, images)
    errors = [_disagreement(op.run, settings, dim, keys) for dim in _DIMS for keys in (9, 33)]
    worst = max(errors)
    if not worst <= 8 * torch.finfo(settings.dtype).eps:
        log.warning(
            "%s computes attention with an error of %.3g; attention runs diffusers' own code", op.name, worst
        )
        names = ()
    return AttendPlan(names, op, convolutions, wide, feeds, images, worst)


def with_attention(
    parts: Mapping[str, Part], layers: Sequence[Found], plan: AttendPlan | None
) -> dict[str, Part]:
    """Return the parts of layers, by layer name, with the attention modules of a plan added."""
    merged = dict(parts)
    for found in layers if plan is not None and plan.names else ():
        assert plan is not None
        own = f"{found.name}."  # a layer may be an attention itself
        served = {f"{name}."[len(own) : -1]: "attention" for name in plan.names if f"{name}.".startswith(own)}
        if served:
            part = merged.get(found.name, Part({}, {}, 0.0))
            kernels = {**part.kernels, "attention": plan.op.name}
            error = max(part.max_error, plan.max_error)
            merged[found.name] = replace(part, kernels=kernels, max_error=error, served=served)
    return merged


def _has_processor(module: nn.Module) -> bool:
    """Whether a module is one of diffusers' attentions, which all delegate to a processor."""
    return is_of_diffusers(module) and hasattr(module, "set_processor") and hasattr(module, "processor")


def _disagreement(run: Callable[..., Tensor], settings: Settings, dim: int, keys: int) -> float:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, length, dim, generator=generator, dtype=torch.float32, device="cpu").to(
            settings.device, settings.dtype
        )
        for length in (33, keys, keys)
    )
    got = run(q, k, v, mask=None, causal=False, scale=dim**-0.5).transpose(1, 2)
    return float((got.float() - F.scaled_dot_product_attention(q, k, v).float()).abs().max())


def swap_attention(model: nn.Module, plan: AttendPlan | None) -> list[str]:
    """Apply a plan in place; no step can fail any more.

    Returns:
        Notes for the report.
    """
    if plan is None:
        return []
    for name in plan.names:
        module = model.get_submodule(name)
        if not attends(module):
            module.__dict__[_STATE] = plan.op.run
            module.__class__ = _attending_class(type(module))  # type: ignore[arg-type]
    for name in plan.convolutions:
        weight = model.get_submodule(name).get_parameter("weight")
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    multiply_windows(model, plan.wide)
    if plan.feeds is not None:
        swap_feeds(model, plan.feeds)
    keep_channels_last(model, plan.images)
    notes = [f"the attention of {len(plan.names)} modules runs {plan.op.name}"] if plan.names else []
    if plan.convolutions:
        notes.append(f"the weights of {len(plan.convolutions)} convolutions are in channels_last layout")
    if plan.wide:
        notes.append(f"{len(plan.wide)} of them run as products of windows on small images")
    if plan.images:
        notes.append(f"the images of {len(plan.images)} transformers stay in channels_last layout")
    return notes + (plan.feeds.notes if plan.feeds is not None else [])


def attends(module: nn.Module) -> bool:
    """Whether a module's attention runs a bound op."""
    return _STATE in module.__dict__


@functools.cache
def _attending_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of an attention's class in whose forward torch's attention is replaced by the op."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training or torch.compiler.is_compiling() or wants_operations():
            return original.forward(self, *args, **kwargs)
        with _Attend(self.__dict__[_STATE]):
            return original.forward(self, *args, **kwargs)

    functools.update_wrapper(forward, original.forward)  # diffusers reads its signature
    return namesake(original, {"forward": forward})


class _Attend(TorchFunctionMode):
    """Mode in which this thread's calls of torch's attention run the op, where the op supports them."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the op for supported attention, skip divisions by 1, and pass on all other functions."""
        kwargs = kwargs or {}
        if func in _DIVISIONS and len(args) == 2 and _is_one(args[1]) and args[0].is_floating_point():
            return args[0]  # division by a `rescale_output_factor` of 1, which would copy an image's tokens
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if not _is_served(given):
            return func(*args, **kwargs)
        q: Tensor = given["query"]
        scale = given.get("scale")
        out: Tensor = self._run(
            q,
            given["key"],
            given["value"],
            mask=given.get("attn_mask"),
            causal=bool(given.get("is_causal", False)),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        )
        return out.transpose(1, 2)


def _is_one(divisor: Any) -> bool:
    return type(divisor) in (int, float) and divisor == 1


_DIVISIONS = frozenset({Tensor.__truediv__, Tensor.div})
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _is_served(given: Mapping[str, Any]) -> bool:
    """Whether the op computes the same as torch: four dimensions, one dtype, no dropout, no gradient."""
    q, k, v, mask = (given.get(name) for name in _ARGUMENTS[:4])
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if not q.dim() == k.dim() == v.dim() == 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if q.shape[-1] != v.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        return False
    if q.shape[1] != k.shape[1] and not given.get("enable_gqa", False):
        return False
    if given.get("dropout_p", 0.0) or (given.get("is_causal", False) and q.shape[2] != k.shape[2]):
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    # A boolean mask may hide a whole row, for which torch's result is defined and the op's is not.
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 4 and mask.is_floating_point())

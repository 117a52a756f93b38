"""Level `module`: norms and linears of layers that no family fuses, swapped one by one for the bound ops.

A swapped module stays the object it was: its class becomes a subclass that runs the op, so its name, its
parameters and `isinstance` hold. Every kind of norm is recognised by what it computes, never by its name
alone: on random input one formula of the op must answer as the module does, and the bound implementation must
agree in the engine's dtype.

What gains nothing is left alone: torch's own linear and norms are what the reference of their op calls, so
they are swapped only where a kernel was bound, or where an `injection_policy` names their layer.
transformers' RMSNorm takes 1.05 (128 rows) to 1.3 times (one row) as long as the reference; where an offset
is added to the weight both take the same time, so such norms wait for a kernel too.

Shapes: C hidden, I input width, O output width.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.formats import FORMATS
from slipstream.model.check import MODEL_ERRORS
from slipstream.model.convert import convert
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.layers import Found
from slipstream.model.namesake import namesake
from slipstream.model.packed import is_packed
from slipstream.ops import norm
from slipstream.ops.bind import Bound
from slipstream.ops.linear import Weight
from slipstream.spec import Norm

__all__ = ["Part", "disagreement", "fuse_parts", "is_swapped", "judge_parts", "swap"]

log = logging.getLogger(__name__)

_STATE = "_slipstream_part"
_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_NATIVE = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_SCALES = (1e-3, 1.0, 30.0)
"""Sizes of the random rows: the smallest one shows eps, the others the formula."""


@dataclass(frozen=True)
class Part:
    """What is swapped inside of one layer.

    Attributes:
        swaps: How each module runs, by its path from the layer.
        kernels: Implementation by op.
        max_error: Largest absolute error of the swapped modules on random input.
    """

    swaps: Mapping[str, Callable[[nn.Module, Tensor], Tensor]]
    kernels: Mapping[str, str]
    max_error: float


@dataclass(frozen=True)
class _Proven:
    """One kind of module as it would run, how far that is off, and whether it beats the module's own code."""

    run: Callable[[nn.Module, Tensor], Tensor]
    op: Bound
    error: float
    gains: bool = True


def judge_parts(
    layers: Sequence[Found], verdicts: Mapping[str, Verdict], settings: Settings, *, all_layers: bool
) -> dict[str, Part]:
    """Decide what is swapped inside of layers that are not fused whole; the model is only read.

    Args:
        layers: From `find_layers`.
        verdicts: From `judge`.
        settings: Has the dtype, the device and the implementations.
        all_layers: Whether every layer is looked at, or only those that an `injection_policy` names.

    Returns:
        By layer name, for layers in which anything is swapped.
    """
    ops = settings.bind(None)
    kinds: dict[tuple[Any, ...], _Proven | None] = {}
    parts: dict[str, Part] = {}
    for found in layers:
        if verdicts[found.name].returns is not None or not (all_layers or found.wanted):
            continue
        proven: dict[str, _Proven] = {}
        with settings.lent(found):
            for path, module in _candidates(found.layer):
                bound = ops.linear if _is_linear(module) else ops.norm
                if bound.name == "reference" and _is_native(module) and not found.wanted:
                    continue
                name = f"{found.name}.{path}"
                kept = any(pattern.search(f"{name}.weight") for pattern in settings.keep)
                key = (
                    type(module),
                    _shape(module),
                    _eps(module),
                    _has_bias(module),
                    _settings_of(module),
                    kept,
                )
                if key not in kinds:
                    kinds[key] = _prove(module, bound, settings, name)
                kind = kinds[key]
                if kind is not None and (kind.gains or found.wanted):
                    proven[path] = kind
        if proven:
            swaps = {path: kind.run for path, kind in proven.items()}
            kernels = {kind.op.op: kind.op.name for kind in proven.values()}
            parts[found.name] = Part(swaps, kernels, max(kind.error for kind in proven.values()))
    return parts


def fuse_parts(layers: Sequence[Found], parts: Mapping[str, Part]) -> None:
    """Swap the classes, in place: after `judge_parts` nothing is left that could refuse."""
    for found in layers:
        part = parts.get(found.name)
        for path, run in part.swaps.items() if part is not None else ():
            module = found.layer.get_submodule(path)
            if not is_swapped(module) and not is_packed(module):
                swap(module, run)


def swap(module: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Let a module run something else than its class' forward."""
    module.__dict__[_STATE] = run
    module.__class__ = _swapped_class(type(module))  # type: ignore[arg-type]


def is_swapped(module: nn.Module) -> bool:
    """Whether a module runs a bound op in place of its own code."""
    return _STATE in module.__dict__


@functools.cache
def _swapped_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class whose forward runs the op; it bears the original's name."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training or kwargs or len(args) != 1:
            return original.forward(self, *args, **kwargs)
        return self.__dict__[_STATE](self, args[0])

    return namesake(original, {"forward": forward})


def _candidates(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that may be norms or linears, by their paths; such as carry a forward of their own are not."""
    for path, module in layer.named_modules():
        if not path or "forward" in vars(module) or is_swapped(module):
            continue
        if all(p.is_floating_point() for p in module.parameters()) and (
            _is_linear(module) or _may_be_norm(module)
        ):
            yield path, module


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_native(module: nn.Module) -> bool:
    return _is_linear(module) or type(module).forward in _NATIVE


def _may_be_norm(module: nn.Module) -> bool:
    if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")) or _eps(module) is None:
        return False
    weight = module._parameters.get("weight")
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    parts = {name for name, _ in module.named_parameters()}
    return weight is not None and weight.dim() == 1 and parts <= {"weight", "bias"} and len(needed) == 1


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(module.get_parameter("weight").shape) if "weight" in module._parameters else ()


def _eps(module: nn.Module) -> float | None:
    """The module's eps, by the names that norms give it."""
    values = (getattr(module, name, None) for name in _EPS)
    return next((value for value in values if isinstance(value, float)), None)


def _settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What tells modules of one class and shape apart: where ConvNeXt's norms find their channels."""
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, str | int | float))
    return tuple(sorted((name, value) for name, value in plain if name != "training"))


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _prove(module: nn.Module, bound: Bound, settings: Settings, name: str) -> _Proven | None:
    """Compare one kind of module with the op on random input; None where they differ or the module fails."""
    try:
        with torch.no_grad():
            if _is_linear(module):
                return _prove_linear(_shape(module), bound, settings)
            return _prove_norm(module, bound, settings, name)
    except MODEL_ERRORS as error:
        log.info("%s keeps its own code: %s: %s", name, type(error).__name__, error)
        return None


def _prove_linear(shape: tuple[int, ...], bound: Bound, settings: Settings) -> _Proven | None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / shape[-1] ** 0.5
    x = torch.randn(3, shape[-1], generator=generator, dtype=torch.float32, device="cpu")
    matrix, x = matrix.to(settings.device, settings.dtype), x.to(settings.device, settings.dtype)
    error = disagreement(F.linear(x, matrix), bound.run(x, FORMATS["plain"].weight(matrix, None)))
    return None if error is None else _Proven(_Linear(bound.run), bound, error)


def _prove_norm(module: nn.Module, bound: Bound, settings: Settings, name: str) -> _Proven | None:
    generator = torch.Generator().manual_seed(0)
    exact = copy.deepcopy(module).float()
    for parameter in exact.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu"))
    rows = torch.cat(
        [
            scale * torch.randn(4, *_shape(module), generator=generator, dtype=torch.float32, device="cpu")
            for scale in _SCALES
        ]
    )
    rows = rows.to(exact.get_parameter("weight").device)
    answer = exact.forward(rows)  # not a call: the module's hooks are not to hear of this
    fits = (
        s for s in _specs(module) if disagreement(answer, _run_norm(norm.norm, exact, rows, s)) is not None
    )
    spec = next(fits, None)
    if spec is None:
        return None
    convert(exact, settings.dtype, keep=settings.keep, prefix=name)
    as_used = exact.to(settings.device)
    rows = rows.to(settings.device, settings.dtype)
    error = disagreement(as_used.forward(rows), _run_norm(bound.run, as_used, rows, spec))
    if error is None:
        return None
    return _Proven(_Normed(bound.run, spec), bound, error, bound.name != "reference" or not spec.offset)


def _specs(module: nn.Module) -> Iterator[Norm]:
    """The formulas that a norm may have."""
    eps = _eps(module)
    for kind in ("rms", "layer"):
        for offset in (0.0, 1.0):
            yield Norm("rms" if kind == "rms" else "layer", float(eps or 0.0), offset)


def disagreement(expected: Tensor, got: Tensor) -> float | None:
    """The largest absolute difference; None where it is more than rounding, which a norm may do twice."""
    bound = max(2e-5, 4 * torch.finfo(expected.dtype).eps)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return None
    if not torch.allclose(got, expected, rtol=bound, atol=bound):
        return None
    return float((got.float() - expected.float()).abs().max())


def _run_norm(run: Callable[..., Tensor], module: nn.Module, x: Tensor, spec: Norm) -> Tensor:
    parameters = module._parameters  # as attributes they cost a tenth of the whole norm
    return run(x, parameters["weight"], parameters.get("bias"), spec=spec)


@dataclass(frozen=True)
class _Normed:
    """How a swapped norm runs: on the module's own parameters, as they are now."""

    run: Callable[..., Tensor]
    spec: Norm

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        return _run_norm(self.run, module, x, self.spec)


@dataclass(frozen=True)
class _Linear:
    """How a swapped linear runs: on the module's own parameters, as they are now."""

    run: Callable[[Tensor, Weight], Tensor]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        weight: Any = module.weight
        bias: Any = module.bias
        packed = FORMATS["plain"].weight(weight, bias)
        return self.run(x.reshape(-1, x.shape[-1]), packed).view(*x.shape[:-1], weight.shape[0])

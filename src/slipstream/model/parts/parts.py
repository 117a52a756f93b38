"""Injection level `module`: norms, linears, gated feed-forwards and attention of layers that no family fuses.

A swapped module keeps its identity: its class becomes a subclass that runs the op, so its name, parameters
and `isinstance` hold. Every kind is recognised by what it computes, never by its name: on random input, and
on the inputs it gets while its model runs on random input, one formula must give the module's output, and the
bound implementation must agree in the engine's dtype (`norms.py`, `gated_feed_forwards.py`).

Modules that would gain nothing stay as they are. The reference of an op calls torch's own linear and norms,
so those are swapped only where a kernel was bound, or where an `injection_policy` names their layer; torch's
LayerNorm is as fast as the CPU's kernel. In bfloat16 torch multiplies more than a few rows as fast.

Shapes: C hidden, I input width, O output width.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.formats import FORMATS
from slipstream.model.diffusion.channels_last import is_of_diffusers
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.fused.links import PART
from slipstream.model.layers import Found
from slipstream.model.parts.attention_calls import Attends, is_attending, let_attend
from slipstream.model.parts.find_attention import calls_of, find_attention
from slipstream.model.parts.gated_feed_forwards import Gated, may_be_gated, prove_gated
from slipstream.model.parts.norms import Normed, is_native_norm, may_be_norm, prove_norm
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.selfcheck.proof import Proven, RecordedInputs, disagreement
from slipstream.model.selfcheck.recorded_calls import recorded_inputs
from slipstream.model.subclass import namesake
from slipstream.model.values import is_plain
from slipstream.model.weights.packed import is_packed, weight_of
from slipstream.ops import Ops
from slipstream.ops.bind import Bound
from slipstream.ops.linear import Weight, rows_of

__all__ = ["Part", "fuse_parts", "is_swapped", "judge_parts", "swap"]

log = logging.getLogger(__name__)

_STATE = PART

_MOST_ROWS_BFLOAT16 = 4
"""Maximum number of rows given to the op between torch's own operations in bfloat16: with 16 rows of 576 to
4096 inputs torch takes 0.7 to 0.9 of the time."""

_MOST_ROWS_CUDA = 1
"""Maximum number of rows given to the op on a GPU: for more, torch's call costs the host less."""


@dataclass(frozen=True)
class Part:
    """The modules swapped inside one layer.

    Attributes:
        swaps: How each module runs, by its path from the layer.
        kernels: Implementation by op.
        max_error: Largest absolute error of the swapped modules.
        refused: By path, why a module that looks like a supported kind runs its own code.
        served: By path, the kinds of modules whose op `model/diffusion/attention.py` swaps in.
    """

    swaps: Mapping[str, Proven]
    kernels: Mapping[str, str]
    max_error: float
    refused: Mapping[str, str] = field(default_factory=dict)
    served: Mapping[str, str] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each module that runs an op, by its path."""
        return {path: proven.kind for path, proven in self.swaps.items()} | dict(self.served)


def judge_parts(
    model: nn.Module,
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    settings: Settings,
    *,
    all_layers: bool,
) -> dict[str, Part]:
    """Decide which modules are swapped inside layers that are not fused; the model is only read.

    Args:
        model: In eval mode.
        layers: From `find_layers`.
        verdicts: From `judge`.
        settings: Has the dtype, the device and the implementations.
        all_layers: Whether to examine every layer, or only those that an `injection_policy` names.

    Returns:
        Parts by layer name, for layers in which a module is swapped or was refused.
    """
    asked = [f for f in layers if verdicts[f.name].returns is None and (all_layers or f.wanted)]
    ops = settings.bind(None)
    recorded = _recorded_inputs(model, layers, asked, settings)
    # `model/diffusion/attention.py` serves diffusers' models, whose linears see an image's many tokens.
    images = any(is_of_diffusers(module) for module in model.modules())
    attention = _attention(model, layers, [] if images else asked, settings, ops.attention)
    few_rows_alone = images and _product(ops.linear, settings).most_rows is not None
    kinds: dict[tuple[Any, ...], Proven | str] = {}
    parts: dict[str, Part] = {}
    for found in asked:
        swaps: dict[str, Proven] = {}
        refused: dict[str, str] = {}
        with settings.lent(found):
            for path, module in _candidates(found.layer):
                if few_rows_alone and _is_linear(module) and not found.wanted:
                    continue
                name = f"{found.name}.{path}"
                key = _kind(module, any(p.search(f"{name}.weight") for p in settings.keep))
                if key not in kinds:
                    kinds[key] = _prove(module, ops, settings, name, recorded.get(name), wanted=found.wanted)
                kind = kinds[key]
                if isinstance(kind, Proven) and (kind.gains or found.wanted):
                    swaps[path] = kind
                elif isinstance(kind, str) and kind:
                    refused[path] = kind
        attending, silent = attention.get(found.name, ({}, {}))
        swaps |= attending
        refused |= silent
        if swaps or refused:
            kernels = {proven.op.op: proven.op.name for proven in swaps.values()}
            worst = max((proven.error for proven in swaps.values()), default=0.0)
            parts[found.name] = Part(swaps, kernels, worst, refused)
    return parts


def _recorded_inputs(
    model: nn.Module, layers: Sequence[Found], asked: Sequence[Found], settings: Settings
) -> dict[str, RecordedInputs]:
    """Record the inputs of parts in the first layer of each kind."""
    firsts: dict[tuple[Any, ...], Found] = {}
    for found in asked:
        inside = tuple((path, type(part)) for path, part in found.layer.named_modules())
        firsts.setdefault((found.root, inside), found)
    paths = {found.name: [path for path, _ in _candidates(found.layer)] for found in firsts.values()}
    if not any(paths.values()):
        return {}
    with nullcontext() if settings.filling is None else settings.filling.lending(layers):
        return recorded_inputs(model, list(firsts.values()), paths)


def _attention(
    model: nn.Module, layers: Sequence[Found], asked: Sequence[Found], settings: Settings, bound: Bound
) -> dict[str, tuple[Mapping[str, Proven], Mapping[str, str]]]:
    """Modules of each layer whose attention runs the op, and why others' does not; proved once per kind."""
    nothing: tuple[dict[str, Proven], dict[str, str]] = ({}, {})
    if bound.name == "reference" or settings.device.type != "cpu" or not settings.mesh.is_alone:
        return dict.fromkeys((found.name for found in asked), nothing)
    kinds = {found.name: (found.root, _kind(found.layer, False)) for found in asked}
    firsts: dict[Any, Found] = {}
    for found in asked:
        if next(found.layer.parameters(), None) is not None:
            firsts.setdefault(kinds[found.name], found)
    calls = calls_of(model, list(firsts.values()), settings)
    proved: dict[Any, tuple[dict[str, Proven], dict[str, str]]] = {}
    for kind, found in firsts.items():
        with settings.lent(found):
            proved[kind] = find_attention(found, calls.get(found.name, ()), bound, settings)
    return {found.name: proved.get(kinds[found.name], nothing) for found in asked}


def fuse_parts(layers: Sequence[Found], parts: Mapping[str, Part]) -> None:
    """Swap the classes in place; after `judge_parts` no step can fail."""
    for found in layers:
        swaps = parts[found.name].swaps if found.name in parts else {}
        # Feed-forwards come last: they record their linears, which must be swapped by then.
        for path, proven in sorted(swaps.items(), key=lambda pair: isinstance(pair[1].run, Gated)):
            module = found.layer.get_submodule(path)
            if isinstance(proven.run, Attends):
                if not is_attending(module):
                    let_attend(module, replace(proven.run, proved=set(proven.run.proved)))
            elif not is_swapped(module) and not is_packed(module):
                run = proven.run
                run = run.settled(module) if isinstance(run, Gated | Normed) else run
                swap(module, run, takes=proven.takes)


def swap(module: nn.Module, run: Callable[..., Tensor], *, takes: int = 1) -> None:
    """Replace a module's forward by `run`, for calls with exactly `takes` tensors."""
    module.__dict__[_STATE] = run
    kind: Any = type(module)
    module.__class__ = _swapped_class(kind, kind.forward, takes)


def is_swapped(module: nn.Module) -> bool:
    """Whether a module runs a bound op in place of its own code."""
    return _STATE in module.__dict__ or is_attending(module)


@functools.cache
def _swapped_class(original: Any, known: Callable[..., Any], takes: int) -> Any:
    """Make a subclass of a module's class whose forward runs the op; it keeps the original's name.

    Args:
        original: The class.
        known: Its forward; once another one has taken its place, that runs.
        takes: Number of tensors in the calls that run the op.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.training or kwargs or len(args) != takes or original.forward is not known
        if own or not all(is_plain(self, x) for x in args):
            return original.forward(self, *args, **kwargs)
        return self.__dict__[_STATE](self, *args)

    return namesake(original, {"forward": forward})


def _candidates(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that may be swapped, with their paths; not those with an instance-level forward."""
    for path, module in layer.named_modules():
        if not path or "forward" in vars(module) or is_swapped(module):
            continue
        if all(p.is_floating_point() for p in module.parameters()) and (
            _is_linear(module) or may_be_norm(module) or may_be_gated(module)
        ):
            yield path, module


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _kind(module: nn.Module, kept: bool) -> tuple[Any, ...]:
    """Key of modules proved together; it has their attributes, in which e.g. ConvNeXt's norms differ."""
    parts = tuple((path, type(part), _settings_of(part)) for path, part in module.named_modules())
    return parts, tuple((name, p.shape, p.dtype) for name, p in module.named_parameters()), kept


def _settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, str | int | float))
    functions = ((name, value) for name, value in vars(module).items() if inspect.isroutine(value))
    return tuple(sorted((name, value) for name, value in plain if name != "training")) + tuple(functions)


def _prove(
    module: nn.Module,
    ops: Ops,
    settings: Settings,
    name: str,
    recorded: RecordedInputs | None,
    *,
    wanted: bool,
) -> Proven | str:
    """Return how one kind of module runs, or why not; an empty reason is not reported."""
    bound = ops.norm if may_be_norm(module) and not _is_linear(module) else ops.linear
    native = _is_linear(module) or is_native_norm(module)
    if bound.name == "reference" and native and not wanted:
        return ""
    try:
        with torch.no_grad():
            if _is_linear(module):
                return _prove_linear(module, bound, settings)
            if may_be_norm(module):
                why = prove_norm(module, bound, settings, name, recorded)
                return why if isinstance(why, Proven) or _is_named_norm(module) else ""
            if not settings.mesh.is_alone:
                return "its linears are split over ranks"
            return prove_gated(module, ops, _product(bound, settings).of, settings, name, recorded)
    except MODEL_ERRORS as error:
        log.info("%s runs its own code: %s: %s", name, type(error).__name__, error)
        is_norm = may_be_norm(module) and _is_named_norm(module)  # others only have a norm's shapes
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" if is_norm else ""


def _is_named_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _prove_linear(module: nn.Module, bound: Bound, settings: Settings) -> Proven | str:
    shape = tuple(module.get_parameter("weight").shape)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") / shape[-1] ** 0.5
    x = torch.randn(3, shape[-1], generator=generator, dtype=torch.float32, device="cpu")
    matrix, x = matrix.to(settings.device, settings.dtype), x.to(settings.device, settings.dtype)
    error = disagreement(F.linear(x, matrix), bound.run(x, FORMATS["plain"].weight(matrix, None)))
    if error is None:
        return f"the product by {bound.name} is wrong"
    return Proven("linear", _product(bound, settings), bound, error)


def _product(bound: Bound, settings: Settings) -> _Linear:
    if settings.device.type == "cuda":
        return _Linear(bound.run, _MOST_ROWS_CUDA)
    slow = settings.dtype == torch.bfloat16 and bound.name != "reference"
    return _Linear(bound.run, _MOST_ROWS_BFLOAT16 if slow else None)


@dataclass(frozen=True)
class _Linear:
    """Runs a swapped linear on the module's current parameters; by torch for more than `most_rows` rows."""

    run: Callable[[Tensor, Weight], Tensor]
    most_rows: int | None

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        own: Any = module._parameters
        weight, bias = own["weight"], own["bias"]
        if self.most_rows is not None and x.numel() > self.most_rows * x.shape[-1]:
            return F.linear(x, weight, bias)
        packed = FORMATS["plain"].weight(weight, bias)
        return self.run(rows_of(x), packed).view(*x.shape[:-1], weight.shape[0])

    def of(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the product of any linear, packed or not."""
        if not is_packed(module):
            return self(module, x)
        weight = weight_of(module)
        return self.run(rows_of(x), weight).view(*x.shape[:-1], weight.shape[0])

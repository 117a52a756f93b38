"""Data flow in a layer: which linears read the outputs of which others, observed in a run of its own code.

Every tensor is tagged with the linears whose outputs it was computed from without another linear in between,
and with marks if the layer's own input or an attention went into it. A linear whose input has tags of other
linears and no mark of the layer's input ends a branch: its input may be split over ranks, and its output is
summed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slipstream.model.selfcheck.check import MODEL_ERRORS, RecordedCall
from slipstream.model.selfcheck.untouched import left_as_it_was
from slipstream.model.values import tensors_in

__all__ = ["Branch", "Flow", "branches_of", "is_matrix", "matrix_dims", "watch_flow"]

STREAM = "*stream"
"""Tag of tensors computed from the layer's input."""

ATTENTION = "*attention"
"""Tag of tensors computed by a softmax or an attention kernel."""

_ATTENDS = ("softmax", "scaled_dot_product_attention")

Tags = frozenset[str]


@dataclass
class Flow:
    """Observations from a layer's run.

    Attributes:
        reads: Tags of the input of each linear, and of each other module with parameters, by path in the
            order of the calls.
        arguments: For each module, the shapes of its floating tensor arguments by position or name, call by
            call.
    """

    reads: dict[str, Tags] = field(default_factory=dict)
    arguments: dict[str, list[dict[int | str, tuple[int, ...]]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Branch:
    """Linears that are cut together.

    Attributes:
        row: Path of the linear that ends the branch; its inputs are cut, and its output is summed over ranks.
        columns: Paths of the linears whose outputs it reads; their rows are cut.
        attends: Whether its input came through attention.
    """

    row: str
    columns: tuple[str, ...]
    attends: bool

    @property
    def parent(self) -> str:
        """Path of the innermost module that contains all of the linears; "" is the layer."""
        paths = [path.split(".")[:-1] for path in (self.row, *self.columns)]
        shared = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        return ".".join(shared)


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is just a matrix, or a matrix for each expert, with or without a bias."""
    weight = module._parameters.get("weight")
    if weight is None or "forward" in vars(module) or not weight.is_floating_point() or not weight.numel():
        return False
    if type(module).forward is nn.Linear.forward:
        return type(module).__name__ != "NonDynamicallyQuantizableLinear"  # other code reads its matrix
    if isinstance(module, nn.Linear):
        return _multiplies(module)
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return True
    others = [p for name, p in module._parameters.items() if name != "weight" and p is not None]
    return weight.dim() == 3 and not others and not module._modules and "Expert" in kind.__name__


def _multiplies(module: nn.Linear) -> bool:
    """Whether a linear with its own forward, like Falcon's, is a plain product; tried on a small copy."""
    others = {name for name, p in module._parameters.items() if p is not None} - {"weight", "bias"}
    if others or module._modules or module._buffers:
        return False
    generator = torch.Generator().manual_seed(0)
    numbers = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    weight, x = numbers(3, 5), numbers(2, 5)
    bias = None if module.bias is None else numbers(3)
    small = copy.copy(module)
    small.__dict__ = {**vars(module), "in_features": 5, "out_features": 3}
    small._parameters = {
        name: None if p is None else nn.Parameter(p, requires_grad=False)
        for name, p in (("weight", weight), ("bias", bias))
    }
    try:
        with torch.no_grad():
            out = type(module).forward(small, x)
    except MODEL_ERRORS:
        return False
    return (
        isinstance(out, Tensor)
        and out.shape == (2, 3)
        and torch.allclose(out, nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-5)
    )  # float32, sums in another order


def matrix_dims(module: nn.Module) -> tuple[int, int]:
    """Return the dims of the outputs and of the inputs in a matrix's parameter."""
    weight = module.get_parameter("weight")
    if weight.dim() == 3:
        return 1, 2
    return (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)


class _Follow(TorchFunctionMode):
    """Mode that tags the results of every function with the tags of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self._tags: dict[int, tuple[Tensor, Tags]] = {}

    def of(self, value: Any) -> Tags:
        tags: Tags = frozenset()
        for tensor in tensors_in(value):
            found = self._tags.get(id(tensor))
            tags |= found[1] if found is not None else frozenset()
        return tags

    def mark(self, value: Any, tags: Tags) -> None:
        for tensor in tensors_in(value):
            if tensor.is_floating_point():
                self._tags[id(tensor)] = (tensor, tags)  # the reference keeps the id unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tags = self.of((args, kwargs))
        if any(part in name for part in _ATTENDS):
            tags |= {ATTENTION}
        if tags:
            in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
            self.mark((args[0], output) if in_place and args else output, tags)
        return output


def watch_flow(layer: nn.Module, calls: Sequence[RecordedCall]) -> Flow:
    """Run a layer's own code on recorded calls and observe the data flow; the layer is left as it was.

    Args:
        layer: The whole layer.
        calls: Recorded calls of the layer; the caches in them are copied.
    """
    flow = Flow()
    with left_as_it_was(layer), torch.no_grad():
        for call in calls:
            args, kwargs = copy.deepcopy((call.args, call.kwargs))
            follow = _Follow()
            with _listening(layer, flow, follow), follow:
                follow.mark(args[0] if args else kwargs.get("hidden_states"), frozenset({STREAM}))
                layer(*args, **kwargs)
    return flow


@contextmanager
def _listening(layer: nn.Module, flow: Flow, follow: _Follow) -> Iterator[None]:
    handles = []
    for path, module in layer.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(path, flow, follow), with_kwargs=True))
        if is_matrix(module) or _holds_experts(module):
            handles.append(module.register_forward_hook(_leave(path, follow)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _holds_experts(module: nn.Module) -> bool:
    return any(p is not None and p.dim() == 3 for p in module._parameters.values())


def _enter(path: str, flow: Flow, follow: _Follow) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes: dict[int | str, tuple[int, ...]] = {}
        given: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        for key, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                shapes[key] = tuple(value.shape)
        flow.arguments.setdefault(path, []).append(shapes)
        if module._parameters and args:
            flow.reads[path] = flow.reads.get(path, frozenset()) | follow.of(args[0])

    return hook


def _leave(path: str, follow: _Follow) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        follow.mark(output, frozenset({path}))

    return hook


def branches_of(layer: nn.Module, flow: Flow, reducing: Sequence[str] = ()) -> list[Branch]:
    """Return the branches of a layer, the last one first.

    Args:
        layer: The whole layer.
        flow: Observed in a run of the layer.
        reducing: Paths of linears that are known to end branches; if given, no others are considered.
    """
    modules: Mapping[str, nn.Module] = dict(layer.named_modules())
    branches = []
    for path, tags in reversed(flow.reads.items()):
        if not is_matrix(modules[path]) or (reducing and path not in reducing):
            continue
        columns = [tag for tag in tags if tag in modules]
        if columns and STREAM not in tags and all(is_matrix(modules[column]) for column in columns):
            order = [column for column in flow.reads if column in columns]
            branches.append(Branch(path, tuple(order), ATTENTION in tags))
    return branches

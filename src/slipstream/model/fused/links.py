"""A fused layer's own parameters: views of its block's tensors, or placeholders without values.

Writing into a view writes into the block. A parameter that the block holds in another layout (rows grouped
per head, packed formats) is released: it keeps its shape and dtype, but refuses writes, which would not reach
the block, and computation, for which it has no values. `Link.holds` detects if a parameter is replaced by
another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.model.values import tensors_in, writes_into
from slipstream.spec import Role
from slipstream.weights.load import BlockWeights, own_views
from slipstream.weights.recipe import Plan

__all__ = ["PACKED", "PART", "Link", "all_hold", "link", "packed_names", "refuse_alone", "relink", "restored"]

PACKED = "_slipstream_packed"
"""Attribute that holds the state of a packed module (`weights/packed.py`): `weights` by parameter name."""

PART = "_slipstream_part"
"""Attribute of a module whose forward was replaced by an op (`parts/parts.py`): what runs the op."""

_COMPARES = frozenset({"_has_compatible_shallow_copy_type", "is_same_size", "is_set_to"})


class _Valueless(Tensor):
    """A tensor derived from a released parameter, such as its transpose; it has no values either."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse computation; leave everything else to torch."""
        return _answer(func, args, kwargs or {})


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function on tensors without values, as torch does on the meta device.

    Raises:
        UnsupportedError: A tensor with values is among the arguments; torch's own products would then return
            uninitialized memory.
    """
    if getattr(func, "__name__", "") not in _COMPARES:
        others = (t for t in tensors_in((args, kwargs)) if not isinstance(t, _Released | _Valueless))
        if not all(t.is_meta for t in others):
            raise _refusal()
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        return result.as_subclass(_Valueless) if type(result) is Tensor and result.is_meta else result


class _Released(nn.Parameter):
    """A released parameter, without values, on the meta device."""

    def __new__(cls, like: Tensor) -> _Released:
        """Create one with the shape and dtype of `like`."""
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return super().__new__(cls, empty, requires_grad=False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse writes and computation; leave everything else to torch."""
        if writes_into(cls, func, args, kwargs or {}):
            raise _refusal()
        return _answer(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """Not available: raises `UnsupportedError`."""
        raise _refusal()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # `nn.Module._apply` assigns what it leaves unchanged
            raise _refusal()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Released:
        """Return another one with this shape and dtype."""
        memo[id(self)] = copied = _Released(self)
        return copied


def _refusal() -> UnsupportedError:
    return UnsupportedError(
        "a fused block holds this parameter's values in another layout; call the whole layer instead of its "
        "submodules, read values from the model's state_dict(), and change them by engine.refresh_weights "
        "or before init_inference"
    )


def refuse_alone(part: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook for the modules inside a layer, which alone cannot restore released parameters.

    Raises:
        UnsupportedError: The state dict is taken of such a module itself, and it has released parameters.
    """
    if not prefix and any(isinstance(t, _Released | _Valueless) for t in state_dict.values()):
        raise _refusal()


@dataclass(frozen=True)
class Link:
    """A parameter as `link` left it.

    Attributes:
        name: The source tensor's path from the layer.
        owner: The module that holds the parameter.
        leaf: Its name in `owner`.
        parameter: The view (for a buffer too), or the released parameter.
        address: Address of its values; 0 if it has none.
        stride: Stride of its values.
        shape: Their shape.
    """

    name: str
    owner: nn.Module
    leaf: str
    parameter: Tensor
    address: int
    stride: tuple[int, ...]
    shape: torch.Size

    def holds(self) -> bool:
        """Whether the parameter is still the same object, with its values where they were, in their shape."""
        return all_hold((self,))


def all_hold(links: Sequence[Link]) -> bool:
    """Whether all parameters are still the same objects, with values where they were, in their shapes."""
    # One loop without function calls, as this runs for every layer of every forward.
    for one in links:
        held = one.owner.__dict__
        now = held["_parameters"].get(one.leaf)
        if now is None:
            now = held["_buffers"].get(one.leaf)
        # A released parameter has no address, and reading it takes ten times as long as for others.
        if now is not one.parameter:
            return False
        if not one.address:
            continue
        if now.data_ptr() != one.address or now.stride() != one.stride or now.size() != one.shape:
            return False
    return True


def link(layer: nn.Module, weights: BlockWeights, plans: Mapping[Role, Plan]) -> tuple[Link, ...]:
    """Make a layer's parameters views of its block's tensors; release those for which that is impossible."""
    links = []
    for name, view in own_views(weights, plans).items():
        path, _, leaf = name.rpartition(".")
        links.append(_put(name, layer.get_submodule(path), leaf, view))
    return tuple(links)


def packed_names(module: nn.Module) -> Collection[str]:
    """Return the names of a module's parameters that are stored as planes, without values of their own."""
    state: Any = vars(module).get(PACKED)
    return () if state is None else state.weights


def relink(
    links: Sequence[Link], held: Sequence[bool], weights: BlockWeights, plans: Mapping[Role, Plan]
) -> tuple[Link, ...]:
    """Link a layer's parameters again after the block's tensors were moved, cast or copied.

    Args:
        links: The links from before.
        held: Which of them held before that (`Link.holds`); the others were replaced by the user, and stay.
        weights: The block's weights.
        plans: How they are made of the layer's own tensors.
    """
    views = own_views(weights, plans)
    return tuple(
        _put(one.name, one.owner, one.leaf, views[one.name]) if holds else one
        for one, holds in zip(links, held, strict=True)
    )


def _put(name: str, owner: nn.Module, leaf: str, view: Tensor | None) -> Link:
    if leaf in owner._buffers and view is not None:
        owner._buffers[leaf] = buffer = view.view(owner.get_buffer(leaf).shape)
        return Link(name, owner, leaf, buffer, buffer.data_ptr(), buffer.stride(), buffer.size())
    shape = owner.get_parameter(leaf).shape
    if view is None:
        parameter: nn.Parameter = _Released(owner.get_parameter(leaf))
    else:
        parameter = nn.Parameter(view.view(shape), requires_grad=False)
    owner._parameters[leaf] = parameter
    return Link(name, owner, leaf, parameter, parameter.data_ptr(), parameter.stride(), parameter.size())


def restored(
    layer: nn.Module, links: tuple[Link, ...], values: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the values of the released parameters that are still in a layer, by their current paths.

    Args:
        layer: The layer.
        links: The links from `link` or `relink`.
        values: Returns the layer's own tensors by the names of the links.
    """
    names = {id(one.parameter): one.name for one in links if isinstance(one.parameter, _Released)}
    now = {path: names[id(p)] for path, p in layer.named_parameters(remove_duplicate=False) if id(p) in names}
    if not now:
        return {}
    tensors = values()
    return {path: tensors[name].view(layer.get_parameter(path).shape) for path, name in now.items()}

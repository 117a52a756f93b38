"""A fused layer's own parameters: views of its block's tensors, or names without values.

Writing into a view writes into the block. A parameter that the block holds in another layout (rows grouped
per head, packed formats) is released: it keeps its shape and dtype, and refuses to be written to, because
nobody would hear of it, and to be computed with, because there is nothing to compute with. Whoever puts
another tensor in a parameter's place is noticed by `Link.holds`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.model.values import tensors_in
from slipstream.spec import Role
from slipstream.weights.load import BlockWeights, own_views
from slipstream.weights.recipe import Plan

__all__ = ["PACKED", "Link", "all_hold", "link", "packed_names", "refuse_alone", "relink", "restored"]

PACKED = "_slipstream_packed"
"""What a packed module carries (`weights/packed.py`): in `weights`, its matrices by parameter name."""

_HARMLESS = frozenset({"requires_grad_", "share_memory_"})
_COMPARES = frozenset({"_has_compatible_shallow_copy_type", "is_same_size", "is_set_to"})


class _Valueless(Tensor):
    """What is made of a parameter without values, such as its transpose."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what computes; everything else is torch's."""
        return _answer(func, args, kwargs or {})


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch says of tensors without values, among themselves.

    Raises:
        UnsupportedError: One that has values is there too, of which torch's own products make a tensor with
            whatever its memory held before.
    """
    if getattr(func, "__name__", "") not in _COMPARES:
        others = (t for t in tensors_in((args, kwargs)) if not isinstance(t, _Released | _Valueless))
        if not all(t.is_meta for t in others):
            raise _refusal()
    with torch._C.DisableTorchFunctionSubclass():
        made = func(*args, **kwargs)
        return made.as_subclass(_Valueless) if type(made) is Tensor and made.is_meta else made


class _Released(nn.Parameter):
    """A parameter without values, on the meta device."""

    def __new__(cls, like: Tensor) -> _Released:
        """With the shape and dtype of `like`."""
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
        return super().__new__(cls, empty, requires_grad=False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what writes, and what computes; everything else is torch's."""
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and name not in _HARMLESS and isinstance(args[0], cls):
            raise _refusal()
        return _answer(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """There is none."""
        raise _refusal()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # as a move writes back what it left alone
            raise _refusal()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Released:
        """Another one of this shape."""
        memo[id(self)] = made = _Released(self)
        return made


def _refusal() -> UnsupportedError:
    return UnsupportedError(
        "this parameter's values are in a fused block, in another layout, where the whole layer runs and not "
        "its parts; read them from the model's state_dict(), and change them by engine.refresh_weights, or "
        "before init_inference"
    )


def refuse_alone(part: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook of a part of a layer: asked by itself, it has no values for its released parameters.

    Raises:
        UnsupportedError: It is asked by itself, and holds some.
    """
    if not prefix and any(isinstance(t, _Released | _Valueless) for t in state_dict.values()):
        raise _refusal()


@dataclass(frozen=True)
class Link:
    """A parameter as `link` left it.

    Attributes:
        name: Path from the layer that the source tensor had.
        owner: The module that holds it.
        leaf: Its name there.
        parameter: The view, or the released parameter; a buffer's view.
        address: Where its values are.
        stride: How they lie there.
    """

    name: str
    owner: nn.Module
    leaf: str
    parameter: Tensor
    address: int
    stride: tuple[int, ...]

    def holds(self) -> bool:
        """Whether the parameter is still there, with its values where they were and as they lay."""
        return all_hold((self,))


def all_hold(links: Sequence[Link]) -> bool:
    """Whether parameters are still there, with their values where they were and as they lay."""
    # In one loop without calls: this runs for every layer of every forward.
    for one in links:
        held = one.owner.__dict__
        now = held["_parameters"].get(one.leaf)
        if now is None:
            now = held["_buffers"].get(one.leaf)
        # A released parameter has no address, and asking it for one takes as long as ten others.
        if now is not one.parameter:
            return False
        if one.address and (now.data_ptr() != one.address or now.stride() != one.stride):
            return False
    return True


def link(layer: nn.Module, weights: BlockWeights, plans: Mapping[Role, Plan]) -> tuple[Link, ...]:
    """Make a layer's parameters views of its block's tensors; release those that cannot be."""
    links = []
    for name, view in own_views(weights, plans).items():
        path, _, leaf = name.rpartition(".")
        links.append(_put(name, layer.get_submodule(path), leaf, view))
    return tuple(links)


def packed_names(module: nn.Module) -> Collection[str]:
    """The parameters of a module that planes stand for: they have no values of their own either."""
    state: Any = vars(module).get(PACKED)
    return () if state is None else state.weights


def relink(
    links: Sequence[Link], held: Sequence[bool], weights: BlockWeights, plans: Mapping[Role, Plan]
) -> tuple[Link, ...]:
    """The same after the block's tensors were moved, cast or copied.

    Args:
        links: As they were.
        held: Which of them held before that (`Link.holds`); the others are someone else's by now, and stay.
        weights: The block's.
        plans: How the layer's own tensors make them up.
    """
    views = own_views(weights, plans)
    return tuple(
        _put(one.name, one.owner, one.leaf, views[one.name]) if holds else one
        for one, holds in zip(links, held, strict=True)
    )


def _put(name: str, owner: nn.Module, leaf: str, view: Tensor | None) -> Link:
    if leaf in owner._buffers and view is not None:
        owner._buffers[leaf] = buffer = view.view(owner.get_buffer(leaf).shape)
        return Link(name, owner, leaf, buffer, buffer.data_ptr(), buffer.stride())
    shape = owner.get_parameter(leaf).shape
    if view is None:
        parameter: nn.Parameter = _Released(owner.get_parameter(leaf))
    else:
        parameter = nn.Parameter(view.view(shape), requires_grad=False)
    owner._parameters[leaf] = parameter
    return Link(name, owner, leaf, parameter, parameter.data_ptr(), parameter.stride())


def restored(
    layer: nn.Module, links: tuple[Link, ...], values: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Values of the released parameters that are still in a layer, by their paths of now.

    Args:
        layer: The layer.
        links: As `link` left them.
        values: Makes the layer's own tensors, by the names of the links.
    """
    names = {id(one.parameter): one.name for one in links if isinstance(one.parameter, _Released)}
    now = {path: names[id(p)] for path, p in layer.named_parameters(remove_duplicate=False) if id(p) in names}
    if not now:
        return {}
    tensors = values()
    return {path: tensors[name].view(layer.get_parameter(path).shape) for path, name in now.items()}

"""A module with packed weights: a linear, transformers' Conv1D, an embedding, or experts with parameters.

A packed module keeps its identity: its class becomes a subclass in which the packed parameters are properties
that unpack. The forward of a linear runs the bound op on the planes; that of an embedding unpacks the rows
that it looks up. The parameter itself stays registered under its name, without values, so that names and
shapes hold; a state dict contains the unpacked matrices.

Reading `module.weight` returns a new dense tensor, which refuses writes (`unpacked.py`): they would not reach
the planes.

Shapes: I input width, O output width, C hidden.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.model.fused.links import PACKED
from slipstream.model.fused.no_compile import as_it_is, prepare
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.subclass import deep_twin, namesake, shallow_twin
from slipstream.model.weights.unpacked import Unpacked, UnpackedParameter, resize_refusal
from slipstream.ops.linear import Weight, among_all

__all__ = [
    "BESIDE",
    "holds",
    "is_packed",
    "looks_up_rows",
    "pack",
    "packed_bytes",
    "packed_matrices",
    "put_matrix",
    "refuse_load",
    "weight_of",
]

_STATE = PACKED
BESIDE = "_slipstream_beside"
"""Attribute of a module with adapters: the `Beside` that is added to its product."""

_OPEN = "_slipstream_unpacked"
_ORIGINAL = "_slipstream_original"


@dataclass
class _State:
    """State of a packed module: its matrices by name, the op of a linear, and the bias at packing."""

    weights: dict[str, Weight]
    transposed: frozenset[str]
    run: Callable[[Tensor, Weight], Tensor] | None
    bias: nn.Parameter | None = None

    def weight(self, module: nn.Module) -> Weight:
        """Return the matrix of a linear or an embedding, with the module's current bias."""
        weight, bias = self.weights["weight"], module._parameters.get("bias")
        return weight if bias is self.bias else replace(weight, bias=bias)


def pack(
    module: nn.Module,
    name: str,
    weight: Weight,
    *,
    transposed: bool = False,
    run: Callable[[Tensor, Weight], Tensor] | None = None,
) -> None:
    """Replace a parameter with packed planes, and release it.

    Args:
        module: Becomes an instance of a subclass of its class. An `nn.Embedding` unpacks the rows that it
            looks up.
        name: Name of the parameter.
        weight: The packed matrix, with the module's own bias if the module is to run the op.
        transposed: The parameter is stored `(..., I, O)`.
        run: The op that replaces the module's forward, where that is a plain product.
    """
    state = vars(module).get(_STATE)
    if state is None:
        state = _State({}, frozenset(), run)
        module.__dict__[_STATE] = state
        module.register_state_dict_post_hook(_fill_state_dict)
        module.register_load_state_dict_pre_hook(refuse_load)
        original: Any = type(module)
    else:
        original = vars(type(module))[_ORIGINAL]
    prepare()
    state.weights[name], state.bias = weight, module._parameters.get("bias")
    state.transposed |= {name} if transposed else frozenset()
    module.__class__ = _packed_class(original, tuple(state.weights))
    _release(module, name)


def _release(module: nn.Module, name: str) -> None:
    own = module._parameters[name]
    weight = vars(module)[_STATE].weights[name]
    if own is not None and isinstance(module, nn.Embedding):
        module._parameters[name] = _Absent.of(weight.shape, weight.dtype, weight.planes[0].device)
    elif own is not None:
        empty = torch.empty(own.shape, dtype=weight.dtype, device="meta")
        module._parameters[name] = nn.Parameter(empty, requires_grad=False)


class _Absent(nn.Parameter):
    """Placeholder for an embedding's matrix, with its shape, dtype and device; one NaN stands for all values.

    Models take their device from their first parameter, which this often is, so it cannot be on the meta
    device.
    """

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> _Absent:
        """Make a placeholder; it takes the memory of one number."""
        return cls(torch.full((), torch.nan, dtype=dtype, device=device).expand(shape), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Absent:
        """Copy the placeholder; the copy takes the memory of one number as well."""
        memo[id(self)] = made = _Absent.of(self.shape, self.dtype, self.device)
        return made


def is_packed(module: nn.Module) -> bool:
    """Whether a module holds packed parameters."""
    return _STATE in vars(module)


def holds(module: nn.Module, name: str) -> bool:
    """Whether a module has planes for a parameter."""
    return is_packed(module) and name in vars(module)[_STATE].weights


def packed_matrices(module: nn.Module) -> dict[str, tuple[Weight, bool]]:
    """A packed module's matrices, and whether each is transposed, by name; replaced ones are left out."""
    state: _State = vars(module)[_STATE]
    mine = {name: weight for name, weight in state.weights.items() if _held(module, name) is None}
    return {name: (weight, name in state.transposed) for name, weight in mine.items()}


def put_matrix(module: nn.Module, name: str, weight: Weight) -> None:
    """Replace a packed module's matrix with another, or with the same planes unpacked in another way."""
    vars(module)[_STATE].weights[name] = weight


def weight_of(module: nn.Module) -> Weight:
    """Return a linear's or embedding's matrix and bias, packed or plain, as the `Weight` that ops take."""
    beside = vars(module).get(BESIDE)
    if is_packed(module) and _held(module, "weight") is None:
        weight: Weight = vars(module)[_STATE].weight(module)
        return weight if beside is None else replace(weight, beside=beside)
    matrix: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    return Weight("plain", tuple(matrix.shape), (matrix,), lambda planes: planes[0], bias, beside=beside)


def looks_up_rows(module: nn.Module) -> bool:
    """Whether an embedding reads its matrix only through `nn.Embedding`'s own forward.

    A class with a forward of its own, which may scale the rows, is tried: a twin that looks up rows as a
    packed module would has to return the same for a few tokens.
    """
    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Embedding) or weight is None or "forward" in vars(module):
        return False
    if module.max_norm is not None or type(module).forward is nn.Embedding.forward:
        return module.max_norm is None
    twin = copy.copy(module)
    twin.__dict__ = {**vars(module), "_parameters": dict(module._parameters)}
    rows = Weight("plain", tuple(weight.shape), (weight.detach(),), lambda planes, *_: planes[0])
    twin.__dict__[_STATE] = _State({"weight": rows}, frozenset(), None)
    twin._parameters["weight"] = _Absent.of(weight.shape, weight.dtype, weight.device)
    original: Any = type(module)
    twin.__class__ = _packed_class(original, ("weight",))  # type: ignore[assignment]
    ids = torch.tensor([[0, len(weight) - 1, module.padding_idx or 0]], device=weight.device)
    with torch.no_grad():
        try:
            return torch.equal(twin.forward(ids), module.forward(ids))
        except MODEL_ERRORS:
            return False


def packed_bytes(module: nn.Module) -> int:
    """Bytes of all parameters of a module and its submodules; packed ones count with their packed size."""
    own = (p for p in module.parameters() if not (p.is_meta or isinstance(p, _Absent)))
    dense = sum(p.numel() * p.element_size() for p in own)
    states: list[_State] = [vars(part)[_STATE] for part in module.modules() if is_packed(part)]
    return dense + sum(replace(w, bias=None).nbytes for state in states for w in state.weights.values())


def _records(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether autograd has to record a module; its own code has derivatives, packed products have none.

    Raises:
        UnsupportedError: A packed parameter requires a gradient.
    """
    if not torch.is_grad_enabled():
        return False
    trained = [name for name, p in module._parameters.items() if p is not None and p.requires_grad]
    for name in trained:
        if _held(module, name) is None:
            raise UnsupportedError(
                f"the {name} of {type(module).__name__} is packed and cannot have a gradient; exclude it "
                "from training (requires_grad_(False)), or train the model before init_inference"
            )
    return bool(trained) or any(getattr(x, "requires_grad", False) for x in args)


@functools.cache
def _packed_class(original: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """Make a subclass of a module's class in which some parameters are unpacked when they are read."""
    # A subclass of `nn.Embedding` comes before `_Rows` in the MRO, so that its `super().forward` is `_Rows`'.
    embeds = issubclass(original, nn.Embedding)
    bases = (original,) if not embeds else (_Rows,) if original is nn.Embedding else (original, _Rows)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return as_it_is(forward, self, *args, **kwargs)
        state = vars(self)[_STATE]
        whole = all(_held(self, name) is None for name in names)
        own = _records(self, args) or self.training or kwargs or len(args) != 1
        if state.run is not None and whole and not own:
            weight, x = state.weight(self), args[0]
            rows = among_all(x.reshape(-1, x.shape[-1]), weight)
            return state.run(rows, weight).view(*x.shape[:-1], weight.shape[0])
        if embeds and whole:  # its code may read the dtype or device of its matrix
            self.__dict__[_OPEN] = dict(self._parameters)
        elif state.run is None:  # unpack once: the code reads the attribute for each chosen expert
            self.__dict__[_OPEN] = {name: _dense(self, name) for name in names}
        try:
            return super(made, self).forward(*args, **kwargs)
        finally:
            self.__dict__.pop(_OPEN, None)

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        state = vars(self)[_STATE]
        had = state.bias is self._parameters.get("bias")
        nn.Module._apply(self, lambda t: t if t.is_meta or isinstance(t, _Absent) else fn(t), recurse)
        state.bias = self._parameters.get("bias") if had else None
        for name, weight in state.weights.items():
            bias = None if weight.bias is None else self._parameters.get("bias")
            state.weights[name] = replace(replace(weight, bias=None).apply(fn), bias=bias)
            if _held(self, name) is None:
                _release(self, name)
        return self

    own: dict[str, Any] = {"forward": forward, "_apply": _apply, _ORIGINAL: original}
    own |= {"__copy__": shallow_twin, "__deepcopy__": deep_twin, "__reduce_ex__": _refuse_pickle}
    read = _dense_parameter if embeds else _dense_to_read
    own |= {name: property(functools.partial(read, name=name)) for name in names}
    if embeds:
        own["num_embeddings"] = property(lambda self: vars(self)["num_embeddings"], _refuse_resize)
    made: Any = namesake(original, own, bases=bases)
    kind: type[nn.Module] = made
    return kind


class _Rows(nn.Embedding):
    """An embedding that unpacks the rows it looks up."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows `(*input.shape, C)`."""
        if _held(self, "weight") is not None:
            return super().forward(input)
        weight: Weight = vars(self)[_STATE].weights["weight"]
        return weight.rows(input.reshape(-1)).view(*input.shape, weight.shape[-1])


def _held(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter that user code has put in place of a packed one, or None."""
    own = module._parameters.get(name)
    return None if own is None or own.is_meta or isinstance(own, _Absent) else own


def _dense(module: nn.Module, name: str) -> Tensor:
    own = _held(module, name)
    if own is not None:
        return own
    opened = vars(module).get(_OPEN)
    if opened is not None and name in opened:
        tensor: Tensor = opened[name]
        return tensor
    state = vars(module)[_STATE]
    dense: Tensor = state.weights[name].dense()
    return dense.mT if name in state.transposed else dense


def _dense_to_read(module: nn.Module, name: str) -> Tensor:
    """Getter of a packed attribute: return the dense values as a tensor that refuses writes."""
    dense = _dense(module, name)
    own = isinstance(dense, nn.Parameter) or vars(module).get(_OPEN) is not None
    return dense if own or torch.compiler.is_compiling() else dense.as_subclass(Unpacked)


def _dense_parameter(module: nn.Module, name: str) -> Tensor:
    """Getter for embeddings: return a dense parameter, to which transformers may tie other modules."""
    dense = _dense(module, name)
    if isinstance(dense, nn.Parameter):
        return dense
    kind = nn.Parameter if torch.compiler.is_compiling() else UnpackedParameter
    return kind(dense, requires_grad=False)


def _refuse_resize(module: nn.Module, rows: int) -> None:
    """Setter of `num_embeddings`, which transformers writes on resizing, before it assigns the new rows.

    Raises:
        UnsupportedError: The number differs from that of the packed rows.
    """
    if _held(module, "weight") is None and rows != vars(module)["num_embeddings"]:
        raise resize_refusal(vars(module)["num_embeddings"], rows)
    vars(module)["num_embeddings"] = rows


def _fill_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: insert the unpacked matrices under their names."""
    for name in vars(module)[_STATE].weights:
        if prefix + name in state_dict:
            state_dict[prefix + name] = _dense(module, name).contiguous()


def _refuse_pickle(self: nn.Module, protocol: Any) -> Any:
    raise UnsupportedError(
        f"{type(self).__name__} holds packed weights, which cannot be pickled; pickle its state_dict(), or "
        "use save_checkpoint"
    )


def refuse_load(module: nn.Module, *args: Any) -> None:
    """Load-state-dict hook: refuse, since loading would not change the planes."""
    raise UnsupportedError(
        f"{type(module).__name__} holds packed weights, which load_state_dict would not change; use "
        "engine.refresh_weights(state_dict), engine.load_adapter for adapters, or load the weights before "
        "init_inference"
    )

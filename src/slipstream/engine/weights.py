"""The weight interface of an engine: reading, refreshing, adapting, saving and loading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slipstream.engine.build import Built
from slipstream.engine.forward_graph import ForwardGraphs
from slipstream.engine.ranks import agree_on_adapter, agree_on_names, first_writes
from slipstream.engine.reload import reload
from slipstream.engine.settings import PASSES, format_named
from slipstream.errors import ConfigError, RequestError, UnsupportedError
from slipstream.model.weights.adapters import Adapters
from slipstream.model.weights.refresh import refresh
from slipstream.weights.lora import read_adapter
from slipstream.weights.packed_folder import MANIFEST, is_packed_folder

__all__ = ["Weights"]


class Weights(nn.Module):
    """An engine's methods for its weights; they work in place, under the model's own parameter names.

    Attributes:
        module: The model.
    """

    module: nn.Module
    _adapters: Adapters
    _built: Built
    _graphs: ForwardGraphs | None
    _keeps_peft: bool

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's own names and values, as if nothing had been fused."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into a model without fused or packed parts; else use `refresh_weights`.

        Raises:
            UnsupportedError: A layer to be loaded runs a fused block, or has packed weights.
        """
        with self._without_adapters():
            return self.module.load_state_dict(*args, **kwargs)

    def refresh_weights(self, state: Mapping[str, Tensor] | nn.Module) -> None:
        """Write new values to every weight in place, so that graphs and kernels stay valid.

        Packed weights are packed again; everything is checked before the first value is written. A call that
        runs in another thread meanwhile may see a mixture of old and new values. With several ranks, each of
        them must make this call, with whole tensors, and takes its part of them. Active adapters stay active
        on top of the new weights.

        Args:
            state: A value for every name of `state_dict()`, in any floating dtype and on any device, or a
                module with such a state dict, such as the model that is being trained. One of several tied
                tensors is enough.

        Raises:
            WeightError: Unknown or missing names, a wrong shape, NaN or infinity; nothing was written.
            ConfigError: Not a state dict.
        """
        with self._without_adapters():
            refresh(self.module, state, format_named, PASSES, self._built.mesh.replica)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Deactivate all adapters within the context; at its end apply them to the then current weights."""
        active, merged = self._adapters.active, self._adapters.merged
        self._select(())
        try:
            yield
        finally:
            self._select(active, merged=merged)

    def _select(self, names: Sequence[str], *, merged: bool = False) -> None:
        """Activate adapters, and drop captured forwards, which have the previous ones in them."""
        others = bool(names or self._adapters.active)
        self._adapters.select(self.module, names, merged=merged)
        if others and self._graphs is not None:
            self._graphs.forget()

    def load_adapter(
        self,
        adapter: str | Path | Mapping[str, Tensor],
        name: str,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a LoRA adapter in peft's format; `set_adapter` activates it.

        An adapter of the same name is replaced, and the new one is active if the old one was. With several
        ranks, each of them must make this call and those below; adapters are then never merged, and are split
        like the matrices that they adapt.

        Args:
            adapter: The folder that peft wrote, or the tensors by peft's names.
            name: The name for the adapter.
            config: For tensors, the contents of peft's `adapter_config.json`: `r`, `lora_alpha`, ...

        Raises:
            WeightError: The adapter cannot be read, or belongs to another model; nothing has changed.
            UnsupportedError: More than LoRA (DoRA, PiSSA, ...), or an adapter of a tied tensor; with several
                ranks, an adapter of anything but the matrices of linears.
            ConfigError: Tensors without a configuration.
        """
        self._refuse_peft("load_adapter")
        read = agree_on_adapter(lambda: read_adapter(adapter, config), self._built.mesh.replica)
        self._adapters.add(self.module, name, read)

    def set_adapter(self, name: str | Sequence[str] | None) -> None:
        """Activate one adapter, or the sum of several, instead of the active ones; None for none.

        The adapter is not merged: its low-rank product is added to that of each matrix, which stays
        unchanged, packed or not. Use `merge_adapter` to merge it. Tensors that an adapter replaces as a whole
        (`modules_to_save`, biases), and its updates of embeddings, routers and latent projections, are always
        merged, and later restored bit by bit. `state_dict` does not include what is not merged.

        Raises:
            ConfigError: No adapter has this name, or two of them replace one tensor; nothing has changed.
            WeightError: A value is not finite in the engine's dtype; no adapter is active then.
            UnsupportedError: Nothing is fused or packed, so peft's modules still hold the adapters.
        """
        self._refuse_peft("set_adapter")
        self._activate(_names(name))

    def _activate(self, names: Sequence[str]) -> None:
        """Activate adapters instead of the active ones, after all ranks have named the same."""
        agree_on_names(tuple(names), self._built.mesh.replica)
        self._select(names)

    def merge_adapter(self, name: str | Sequence[str] | None = None) -> None:
        """Merge adapters into the weights, replacing the active ones; the engine is as fast as without any.

        Weights are changed in place, so graphs and kernels stay valid; packed matrices are packed again. A
        copy of the original adapted matrices is kept, from which they are later restored bit by bit.

        Args:
            name: One name, or several; None for the active adapters.

        Raises:
            ConfigError: As for `set_adapter`, or no name is given and no adapter is active.
            UnsupportedError: A matrix is tied to another one, which would change, too, or is split over
                ranks; nothing has changed.
            WeightError: The sum is not finite in the engine's dtype; no adapter is active then.
        """
        self._refuse_peft("merge_adapter")
        names = self._adapters.active if name is None else _names(name)
        if not names:
            raise ConfigError("no adapter is active; name the one to merge")
        self._select(names, merged=True)

    def unmerge_adapter(self) -> None:
        """Restore the original weights bit by bit; the adapters stay active, unmerged."""
        self._refuse_peft("unmerge_adapter")
        self._select(self._adapters.active)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the engine without adapters within the context.

        Raises:
            UnsupportedError: As for `set_adapter`.
        """
        self._refuse_peft("disable_adapter")
        with self._without_adapters():
            yield

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter; if it is active, the other active ones stay active.

        Raises:
            ConfigError: No adapter has this name.
        """
        self._refuse_peft("delete_adapter")
        self._adapters.drop(self.module, name)
        if self._graphs is not None:
            self._graphs.forget()

    def _refuse_peft(self, method: str) -> None:
        """Refuse to change the engine's adapters where those that the model came with stay peft's."""
        if self._keeps_peft:
            raise UnsupportedError(
                f"{method} is for the engine's own adapters, and nothing of this model is fused or packed, "
                "so its adapters are still peft's: call peft's methods on engine.module, or build the "
                "engine with replace_with_kernel_inject=True"
            )

    def _refuse_names(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a call that names an adapter for each row, which the model would ignore.

        Raises:
            RequestError: The engine has adapters, and `adapter_names` is given.
        """
        if kwargs.get("adapter_names") is not None and self._adapters.known:
            raise RequestError(
                f"adapter_names={kwargs['adapter_names']!r} asks for an adapter per row, and the engine "
                "applies its active ones to every row; call set_adapter with one of "
                f"{', '.join(self._adapters.known)} and then the engine, for each adapter's rows"
            )

    def active_adapters(self) -> list[str]:
        """Return the names of the active adapters."""
        return list(self._adapters.active)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write the model as a transformers folder, under its original names.

        With several ranks, each of them must make this call; the first one writes, and needs memory for the
        whole model.

        Args:
            path: A folder; created if it does not exist.

        Raises:
            UnsupportedError: The model has no `save_pretrained`.
            ConfigError: The folder holds packed weights; nothing was written.
        """
        if not hasattr(self.module, "save_pretrained"):
            raise UnsupportedError(
                f"{type(self.module).__name__} has no save_pretrained; save engine.module.state_dict() "
                "instead"
            )
        first_writes(self._built.mesh.replica, lambda: _refuse_packed(Path(path)))
        state = self.module.state_dict()
        save: Any = self.module.save_pretrained
        first_writes(self._built.mesh.replica, lambda: save(path, state_dict=state))

    def load_checkpoint(self, path: str | Path, tag: str | None = None, strict: bool = True) -> None:
        """Load a checkpoint's weights into the engine, in place; packed matrices are packed again.

        With several ranks, each of them must make this call, and reads whole tensors before taking its part.

        Args:
            path: A folder, a file, a folder with tags, or a JSON description, as for the `checkpoint`
                setting; but neither packed weights nor a GGUF file: for those, build a new engine.
            tag: One of the folder's tags; None for the one named in its file `latest`.
            strict: False accepts missing tensors, whose weights then stay unchanged, and surplus ones.

        Raises:
            WeightError: The checkpoint is damaged or belongs to another model; the engine is unchanged.
            UnsupportedError: A layer's parts were replaced since it was fused.
        """
        with self._without_adapters():
            reload(self.module, path, tag=tag, strict=strict, axis=self._built.mesh.replica)


def _refuse_packed(folder: Path) -> None:
    """Refuse to write plain weights to a folder of packed ones, which would take precedence on opening it."""
    if is_packed_folder(folder):
        raise ConfigError(
            f"{folder} holds packed weights ({MANIFEST}), which would take precedence over the plain ones; "
            "name another folder, or remove this one"
        )


def _names(name: str | Sequence[str] | None) -> tuple[str, ...]:
    if name is None:
        return ()
    return (name,) if isinstance(name, str) else tuple(name)

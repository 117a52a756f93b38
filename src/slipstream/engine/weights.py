"""The weights of an engine, as users read, refresh, adapt, save and load them."""

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
from slipstream.errors import ConfigError, UnsupportedError
from slipstream.model.weights.adapters import Adapters
from slipstream.model.weights.refresh import refresh
from slipstream.weights.lora import read_adapter
from slipstream.weights.packed_folder import MANIFEST, is_packed_folder

__all__ = ["Weights"]


class Weights(nn.Module):
    """What an engine lets its users do with its weights; all of it in place, under the model's own names.

    Attributes:
        module: The model.
    """

    module: nn.Module
    _adapters: Adapters
    _built: Built
    _graphs: ForwardGraphs | None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own names and values, as if nothing had been fused."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's own names, where nothing was fused or packed; `refresh_weights` always can.

        Raises:
            UnsupportedError: A layer that is to be loaded runs a fused block, or holds packed weights.
        """
        with self._without_adapters():
            return self.module.load_state_dict(*args, **kwargs)

    def refresh_weights(self, state: Mapping[str, Tensor] | nn.Module) -> None:
        """Put new values into every weight, in the memory that it is in: graphs and kernels go on with them.

        Packed weights are packed anew; everything is checked before the first value is written. A call that
        runs meanwhile in another thread may see some of both. On several ranks all of them make the call,
        with whole tensors, and each takes its part of them.

        Args:
            state: Every name of `state_dict()`, in any floating dtype and on any device, or a module that has
                such a state dict: the model that is being trained. Of tied tensors, one will do. An adapter
                that is at work stays so, upon the new weights.

        Raises:
            WeightError: A name too many or too few, another shape, NaN or infinity; nothing was written.
            ConfigError: Not a state dict.
        """
        with self._without_adapters():
            refresh(self.module, state, format_named, PASSES, self._built.mesh.replica)

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        """Within, no adapter is at work; afterwards those are that were, upon the weights of then."""
        active, merged = self._adapters.active, self._adapters.merged
        self._select(())
        try:
            yield
        finally:
            self._select(active, merged=merged)

    def _select(self, names: Sequence[str], *, merged: bool = False) -> None:
        """Put adapters to work; captured forwards know of those that were at work before."""
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
        """Read a LoRA adapter in peft's format; `set_adapter` puts it to work.

        One that is loaded under the name of another takes its place, also at work. On several ranks all of
        them make this call and those below; adapters are kept apart there, cut as their matrices are.

        Args:
            adapter: The folder that peft wrote, or the tensors by peft's names.
            name: To call it by.
            config: For tensors, what peft's `adapter_config.json` would say: `r`, `lora_alpha`, ...

        Raises:
            WeightError: It cannot be read, or is of another model; nothing has changed.
            UnsupportedError: More than LoRA (DoRA, PiSSA, ...), or an adapter of a tied tensor; on several
                ranks, one that has more than matrices of linears.
            ConfigError: Tensors without a configuration.
        """
        read = agree_on_adapter(lambda: read_adapter(adapter, config), self._built.mesh.replica)
        self._adapters.add(self.module, name, read)

    def set_adapter(self, name: str | Sequence[str] | None) -> None:
        """Put an adapter to work, or the sum of several, in the place of those that were; None for none.

        It is kept apart: its product is added beside each matrix, which stays as it is, also where it is
        packed. `merge_adapter` merges it. What an adapter replaces as a whole (`modules_to_save`, biases),
        and what it adds to embeddings, to routers and to the projections of latents, is merged at once, and
        comes back to the bit. `state_dict` has the weights without what is kept apart.

        Raises:
            ConfigError: No adapter has this name, or two of them replace one tensor; nothing has changed.
            WeightError: A number is not finite in the engine's dtype; no adapter is at work then.
        """
        agree_on_names(_names(name), self._built.mesh.replica)
        self._select(_names(name))

    def merge_adapter(self, name: str | Sequence[str] | None = None) -> None:
        """Merge adapters into the weights, in the place of those at work: the speed is the base model's.

        The weights are changed where they lie, so graphs and kernels go on with them; packed matrices are
        packed anew. What they were is kept, a copy of the adapted matrices, and comes back to the bit.

        Args:
            name: Of one, or of several; None for those that are at work.

        Raises:
            ConfigError: As for `set_adapter`, or none is named and none is at work.
            UnsupportedError: A matrix is tied to another, which would change, too, or is on several ranks;
                nothing has changed.
            WeightError: The sum is not finite in the engine's dtype; no adapter is at work then.
        """
        names = self._adapters.active if name is None else _names(name)
        if not names:
            raise ConfigError("no adapter is at work; name the one that is to be merged")
        self._select(names, merged=True)

    def unmerge_adapter(self) -> None:
        """Take what was merged out again, to the bit; the adapters stay at work, kept apart."""
        self._select(self._adapters.active)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within, the engine answers without adapters."""
        with self._without_adapters():
            yield

    def delete_adapter(self, name: str) -> None:
        """Forget an adapter; where it is at work, the others stay there without it.

        Raises:
            ConfigError: No adapter has this name.
        """
        self._adapters.drop(self.module, name)
        if self._graphs is not None:
            self._graphs.forget()

    def active_adapters(self) -> list[str]:
        """Names of the adapters at work."""
        return list(self._adapters.active)

    def save_checkpoint(self, path: str | Path) -> None:
        """Write the model as a transformers folder, under its original names.

        On several ranks every one of them has to call it; the first one writes, and needs memory for all.

        Args:
            path: A folder; made where it does not exist.

        Raises:
            UnsupportedError: The model has no `save_pretrained`.
            ConfigError: The folder holds packed weights; nothing was written.
        """
        if not hasattr(self.module, "save_pretrained"):
            raise UnsupportedError(
                f"{type(self.module).__name__} has no save_pretrained; write engine.module.state_dict() "
                "instead"
            )
        first_writes(self._built.mesh.replica, lambda: _refuse_packed(Path(path)))
        state = self.module.state_dict()
        save: Any = self.module.save_pretrained
        first_writes(self._built.mesh.replica, lambda: save(path, state_dict=state))

    def load_checkpoint(self, path: str | Path, tag: str | None = None, strict: bool = True) -> None:
        """Put a checkpoint's weights into the engine, in place; packed matrices are packed again.

        On several ranks every one of them has to call it, and reads whole tensors before it takes its parts.

        Args:
            path: A folder, a file, a folder with tags, or a JSON description, as `checkpoint` takes them; but
                neither packed weights nor a GGUF file, of which an engine is made.
            tag: Which of a folder's tags; None takes what `latest` says.
            strict: False lets tensors be missing, which stay as they are, or left over.

        Raises:
            WeightError: The checkpoint is damaged or another model's; the engine is then as it was.
            UnsupportedError: A layer's parts were replaced since it was fused.
        """
        with self._without_adapters():
            reload(self.module, path, tag=tag, strict=strict, axis=self._built.mesh.replica)


def _refuse_packed(folder: Path) -> None:
    """Keep plain weights out of a folder of packed ones, which would be opened by these again."""
    if is_packed_folder(folder):
        raise ConfigError(
            f"{folder} holds packed weights ({MANIFEST}), and would have two kinds of them; name another "
            "folder, or remove this one"
        )


def _names(name: str | Sequence[str] | None) -> tuple[str, ...]:
    if name is None:
        return ()
    return (name,) if isinstance(name, str) else tuple(name)

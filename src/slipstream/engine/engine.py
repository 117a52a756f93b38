"""The inference engine: an object that is called exactly like the model it wraps."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import InferenceConfig, resolve
from slipstream.devices.huge_pages import in_huge_pages
from slipstream.engine.admit import check_inputs, check_request
from slipstream.engine.build import build
from slipstream.engine.class_like import class_like
from slipstream.engine.forward_graph import ForwardGraphs
from slipstream.engine.generation.draft import Held
from slipstream.engine.generation.generate import Loop
from slipstream.engine.generation.request import (
    by_name,
    by_position,
    move_stop_strings,
    own_settings,
    read_request,
    unread_cache,
)
from slipstream.engine.generation.road import helpers_of, why_not_the_road
from slipstream.engine.generation.runner import Runner
from slipstream.engine.generation.shared_criteria import share_criteria
from slipstream.engine.peft_models import keeps_peft, unwrapped
from slipstream.engine.ranks import taking_part
from slipstream.engine.save import check_destination, save_described
from slipstream.engine.settings import format_named
from slipstream.engine.weights import Weights
from slipstream.errors import InjectionError, UnsupportedError
from slipstream.model.frame.text_encoder import answers_at_once, at_once
from slipstream.model.fused.no_compile import as_it_is
from slipstream.model.fused.state import is_injected
from slipstream.model.report import Report
from slipstream.model.values import moved_to, promoted, wants_operations
from slipstream.model.weights.adapters import Adapters
from slipstream.model.weights.memory import held_memory
from slipstream.parallel import ALONE, Axis
from slipstream.parallel.agree import agree_on_tokens, share_random_state
from slipstream.profile.times import Profile

__all__ = ["InferenceEngine", "remark"]


class InferenceEngine(Weights):
    """A model with fused layers: the same calls as the original model, the same outputs, faster.

    Attributes that the engine does not define are looked up on the model: `engine.device`,
    `engine.generation_config`, `engine.get_input_embeddings()`.

    Attributes:
        module: The model that was passed in, now with fused layers; for a peft wrapper, its base model.
        config: The model's own config (with the configuration's overrides applied), or None.
        inference_config: The engine's configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any] | str | PathLike[str] | InferenceConfig | None = None,
    ) -> None:
        """Build an engine from a model; the model is modified in place and belongs to the engine.

        Args:
            model: Any module.
            config: The configuration, as accepted by `init_inference`; None for the defaults.

        Raises:
            SlipstreamError: Any subclass; the model is then unchanged, except where writing to
                `save_mp_checkpoint_path` fails once the engine is built (a full disk): then the model stays
                as the engine has made it.
        """
        super().__init__()
        if isinstance(model, InferenceEngine):
            raise InjectionError("model is an engine already; pass a model that does not belong to an engine")
        settings = resolve(config, {})
        with unwrapped(model, settings) as own, _without_autocast():
            model = own.base
            check_destination(model, settings)
            built = build(model, settings)
        if settings.zero.offload_param.device == "none":
            in_huge_pages(held_memory(model))
        self.config = built.model_config
        self.inference_config = settings
        self._built = built
        captures = settings.enable_cuda_graph and built.mesh.ep.size == 1
        self._graphs = ForwardGraphs(model, built.device) if captures else None
        self._profile: Profile | None = None
        self._fused = any(map(is_injected, model.modules()))
        self._keeps_peft = keeps_peft(model)
        self._adapters = Adapters(format_named, built.mesh.replica.size)
        self.training = False
        self.module = model
        self.__class__ = class_like(type(self), type(model))  # type: ignore[arg-type]
        for name, adapter in own.adapters.items():
            self._adapters.add(model, name, adapter)
        self._activate(own.active)
        if settings.save_mp_checkpoint_path is not None:
            save_described(model, settings, Path(settings.save_mp_checkpoint_path), built.mesh.replica)

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute where the engine has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise AttributeError(
                    f"this engine was destroyed, or never built, and has no attribute {name!r}"
                ) from None
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the model if the model has it and the engine does not, else on the engine."""
        module = self.__dict__.get("_modules", {}).get("module")
        own = name in self.__dict__ or name == "module" or hasattr(type(self), name)
        if module is None or own or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def _get_name(self) -> str:
        """Return the name that `print` shows; `type(self).__name__` is the model's class name."""
        return InferenceEngine.__name__

    def __copy__(self) -> InferenceEngine:
        """Return another engine on the same model."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> InferenceEngine:
        """Return an independent engine with its own copy of the weights."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        # It cannot change, and a process group in it cannot be copied.
        memo[id(self.inference_config)] = self.inference_config
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        twin._compiled_call_impl = None  # the compiled callable would run the original engine
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: bound kernels and their native structs cannot be serialized.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "an engine cannot be pickled; save the model with save_checkpoint or state_dict(), and build an "
            "engine from it where it is needed"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward without autograd, moving input tensors to its device.

        Returns:
            The model's output; only its first tensor if `return_tuple` is False.

        Raises:
            RequestError: An input that cannot be run.
        """
        if torch.compiler.is_dynamo_compiling() and self._fused:
            return as_it_is(type(self).forward, self, *args, **kwargs)
        self._refuse_names(kwargs)
        if (answer := self._at_once(args, kwargs)) is not None:
            return answer
        args, kwargs = self._here((args, kwargs))
        kwargs = promoted(self.module, kwargs)
        given = {**{f"{place}": value for place, value in enumerate(args)}, **kwargs}
        seen = wants_operations()  # reading input values here would become part of the traced program
        small = nullcontext() if seen else self._built.small.scope(given)
        with torch.no_grad(), small, taking_part(self._built.mesh, self.module, "forward", given):
            if not seen:
                check_inputs(self.module, args, kwargs)
            if seen or self._graphs is None or self._profile is not None:
                output = self.module(*args, **kwargs)
            else:
                output = self._graphs(args, kwargs)
        return output if self.inference_config.return_tuple else _first_tensor(output)

    def _at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a text encoder run as one native call; None for other models or bad input."""
        if not answers_at_once(self.module) or not self.inference_config.return_tuple:
            return None
        with torch.no_grad():
            return at_once(self.module, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' `generate`; all of its options are supported.

        Greedy search, sampling, beam search and assisted decoding (an assistant model, or a lookup in the
        prompt) run on the engine road (packed batch, paged cache). Every option that the engine road does not
        support runs transformers' own loops over the fused layers. An assistant is fastest as an engine, too.

        Raises:
            RequestError: An input that cannot be run.
            TokenLimitError: The call needs more tokens than `max_out_tokens`.
            UnsupportedError: The model has no `generate`.
        """
        if not hasattr(self.module, "generate"):
            raise UnsupportedError(f"{type(self.module).__name__} has no generate; call the engine directly")
        self._refuse_names(kwargs)
        generate: Callable[..., Any] = self.module.generate  # type: ignore[assignment]
        args, kwargs = self._here(args), promoted(self.module, self._here(kwargs))
        with torch.no_grad():
            if not hasattr(self.module, "_prepare_generation_config"):  # not transformers' own generate
                return generate(*args, **kwargs)
            generate, kwargs = by_position(self.module, len(args)), by_name(self.module, args, kwargs)
            given = {name: value for name, value in kwargs.items() if name != "streamer"}
            given |= {} if self._built.mesh.is_alone else own_settings(self.module)
            with taking_part(self._built.mesh, self.module, "generate", given) as ranks:
                return self._generate(generate, kwargs, ranks)

    def _generate(
        self, generate: Callable[..., Any], kwargs: dict[str, Any], ranks: Axis, held: Held | None = None
    ) -> Any:
        """Call the model's own `generate`, on ranks that have all received this call."""
        share_random_state(ranks, self._built.device.torch_device)
        request = read_request(self.module, kwargs)
        check_request(self.module, request, kwargs, self.inference_config)
        kwargs = kwargs if ranks.size == 1 else share_criteria(kwargs, request.config, ranks)
        runner = self._built.runner
        if runner is None or why_not_the_road(self.module, runner, request, kwargs, ranks) is not None:
            output = generate(**kwargs)
            if ranks.size > 1:  # on one rank it is not inspected: a model's own loop may return anything
                agree_on_tokens(_sequences(output), ranks)
            return output
        helpers = helpers_of(request, kwargs, _as_assistant)
        cache = kwargs.get("past_key_values")
        loop = Loop(runner, kwargs.get("streamer"), ranks, helpers=helpers, held=held, cache=cache)
        decode = loop.method()
        spared = {} if runner.takes_over or cache is not None else unread_cache(self.module, request)
        return generate(**{**move_stop_strings(kwargs), **spared, "custom_generate": decode})

    def _draft(self, given: dict[str, Any], held: Held) -> Any:
        """Generate for another model whose assistant this is, continuing from what is held."""
        generate: Callable[..., Any] = self.module.generate  # type: ignore[assignment]
        return self._generate(generate, given, ALONE.replica, held)

    def _here(self, value: Any) -> Any:
        """Return nested tuples, lists and dictionaries with their tensors moved to the engine's device."""
        return moved_to(value, self._place())

    def _place(self) -> torch.device:
        """Return the model's current device: it may have been kept on the host, or moved by the caller."""
        places = (p.device for p in self.module.parameters() if not p.is_meta)
        return next(places, self._built.device.torch_device)

    def why_compatible(self) -> str | None:
        """Return why no `generate` call can take the engine road; None if the engine has that road."""
        return None if self._built.runner is not None else self._built.why_compatible

    def report(self) -> Report:
        """Report what was fused, what was not, and why; with median times per layer while profiling is on."""
        report = self._built.report
        if self._graphs is not None and self._graphs.reason:
            report = replace(
                report, notes=(*report.notes, f"a forward ran without a graph: {self._graphs.reason}")
            )
        if self._profile is None:
            return report
        return replace(
            report, times={name: _median(times) for name, times in self._profile.peek_layers().items()}
        )

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Start timing every run of the model and of each layer.

        Args:
            use_cuda_events: On a GPU, time with CUDA events instead of the wall clock.
        """
        if self._profile is not None:
            return
        self._profile = Profile(self._built.device, use_cuda_events)
        self._profile.watch(self.module, "")
        for layer in self._built.report.layers:
            self._profile.watch(self.module.get_submodule(layer.name), layer.name)
        if self._built.runner is not None:
            self._built.runner.timer = self._profile.timer

    def model_times(self) -> list[float]:
        """Return the milliseconds of every run of the model since the last call, and clear the record.

        Raises:
            UnsupportedError: `profile_model_time` was not called.
        """
        return self._profiled().read()

    def layer_times(self) -> dict[str, list[float]]:
        """Return the milliseconds of every run since the last call, by layer, and clear the record.

        Raises:
            UnsupportedError: `profile_model_time` was not called.
        """
        return self._profiled().read_layers()

    def _profiled(self) -> Profile:
        if self._profile is None:
            raise UnsupportedError("model profiling is not enabled; call profile_model_time() first")
        return self._profile

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled_call_impl is not None

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Compile the forward with `torch.compile`, in place; a second call does nothing.

        Fused layers already run their own kernels, so a model that has any is not compiled: outputs and
        speed stay the same. `generate` is never compiled.

        Args:
            backend: The backend for `torch.compile`.
            compile_kwargs: Further `torch.compile` options in one mapping, as in DeepSpeed.
            options: Further `torch.compile` options by keyword, as in `torch.nn.Module.compile`.
        """
        if not self.is_compiled:
            super().compile(backend=backend, **{**(compile_kwargs or {}), **options})

    def destroy(self) -> None:
        """Release the model and everything that was built for it."""
        self._modules.pop("module", None)
        self.__dict__.pop("_built", None)
        self._profile = self._graphs = self._compiled_call_impl = None

    def __enter__(self) -> InferenceEngine:
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy the engine."""
        self.destroy()


def remark(engine: InferenceEngine, notes: Sequence[str]) -> None:
    """Prepend notes on how the model was opened to an engine's report."""
    report = engine._built.report
    engine._built = replace(engine._built, report=replace(report, notes=(*notes, *report.notes)))


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Disable autocast, so that the self-check compares with layers that compute in their own dtype."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _as_assistant(model: Any) -> tuple[Runner, Callable[..., Any]] | None:
    """Return an engine's runner and what drafts with it; None for other models, and with several ranks."""
    is_engine = isinstance(model, InferenceEngine) and model._built.mesh.is_alone
    return (model._built.runner, model._draft) if is_engine and model._built.runner is not None else None


def _sequences(found: Any) -> Tensor:
    """Return the tokens in the output of `generate`, which some models wrap in a dictionary with segments."""
    tokens: Tensor = found if isinstance(found, Tensor) else found["sequences"]
    return tokens


def _first_tensor(output: Any) -> Any:
    """Return the output's first tensor that is not a scalar, such as the logits after a loss."""
    if isinstance(output, Tensor):
        return output
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    )
    return next((part for part in parts if isinstance(part, Tensor) and part.dim() > 0), output)


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0

"""transformers' own code, eager or compiled, and the engine, all in the engine's environment.

`how` is "eager", "compile" (a static cache and torch.compile, as transformers sets them up) or "engine", with
the keyword arguments of `slipstream.init_inference` in `keywords`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.peers.worker import Timed, serve

_LONGEST = 192
"""Size of the static cache in tokens: one size for all calls, because each size is compiled separately."""


class _Streamer:
    """Records the steps of a `generate`; the first value that it receives is the prompt."""

    def __init__(self) -> None:
        self.timed = Timed()
        self.started = False

    def put(self, value: Tensor) -> None:
        if self.started:
            self.timed.note(int(value.flatten()[0]))
        self.started = True

    def end(self) -> None:
        """Do nothing: every step has been recorded."""


class TorchModel:
    """A transformers model, or an engine built from it."""

    def load(
        self, folder: str, precision: str, threads: int, *, how: str, keywords: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See `Peer`; quantized rows start from the checkpoint's bfloat16."""
        torch.set_num_threads(threads)
        path = Path(folder) / "hf"
        config = transformers.AutoConfig.from_pretrained(path)
        kind = transformers.AutoModel if config.model_type == "bert" else transformers.AutoModelForCausalLM
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        self.model: Any = kind.from_pretrained(path, dtype=dtype).eval()
        self.options: dict[str, Any] = {"eos_token_id": config.vocab_size, "pad_token_id": 0}  # never comes
        answer = {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}
        if how == "engine":
            return self._make_engine(dtype, keywords or {})
        if how == "compile" and config.model_type == "bert":
            self.model = torch.compile(self.model, dynamic=False)
        elif how == "compile":
            compiling = transformers.CompileConfig(fullgraph=False, dynamic=False, mode="default")
            compiling._compile_all_devices = True  # transformers compiles by itself on accelerators only
            self.options |= {"cache_implementation": "static", "max_cache_len": _LONGEST}
            self.options["compile_config"] = compiling
        return {**answer, "weight_bytes": _read_bytes(self.model)}

    def generate(self, ids: list[list[int]], new: int) -> Timed:
        """See `Peer`."""
        tokens = torch.tensor(ids)
        streamer = _Streamer()
        # A copy, because transformers modifies the options that it receives.
        options = copy.copy(self.options)
        mask = torch.ones_like(tokens)
        with torch.inference_mode():
            self.model.generate(
                tokens, attention_mask=mask, streamer=streamer, max_new_tokens=new, do_sample=False, **options
            )
        streamer.timed.spared_bytes = self._spared_bytes(len(ids))
        return streamer.timed

    def encode(self, ids: list[list[int]]) -> Callable[[], Any]:
        """See `Peer`."""
        tokens = torch.tensor(ids)
        mask = torch.ones_like(tokens)

        def forward() -> Any:
            with torch.inference_mode():
                return self.model(input_ids=tokens, attention_mask=mask)

        return forward

    def _spared_bytes(self, batch: int) -> int:
        """Return the bytes of the vocabulary projection that a step of an engine has skipped."""
        runner = getattr(getattr(self.model, "_built", None), "runner", None)
        screens = getattr(getattr(runner, "whole", None), "screens", None)
        if screens is None or batch > 1:
            return 0
        return int(screens.spared_bytes(runner.frame.matrices()["head"]))

    def _make_engine(self, dtype: torch.dtype, keywords: dict[str, Any]) -> dict[str, Any]:
        import slipstream
        from slipstream.model.weights.packed import packed_bytes

        model = self.model
        head = model.get_output_embeddings()
        engine = slipstream.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **keywords)
        self.model = engine
        report = engine.report()
        size = sum(layer.bytes for layer in report.layers)
        if head is not None:
            size += packed_bytes(head)
        kernels = sorted({kernel for layer in report.layers for kernel in layer.kernels.values()})
        return {
            "version": f"slipstream {slipstream.__version__}",
            "weight_bytes": size,
            "notes": f"level {report.level}, kernels {', '.join(kernels)}",
        }


def _read_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a step reads entirely: all but tables that are only looked up."""
    multiplied = {
        p.data_ptr() for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(False)
    }
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return sum(size for place, size in weights.items() if place in multiplied)


if __name__ == "__main__":
    serve(TorchModel())

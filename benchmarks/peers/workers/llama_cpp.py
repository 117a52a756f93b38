"""llama.cpp, through the C interface that llama-cpp-python includes: one context per batch size, greedy."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.worker import Timed, serve

_TYPES = {"bfloat16": None, "int8": lib.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": lib.LLAMA_FTYPE_MOSTLY_Q4_0}
_CELLS = {1: 768, 8: 8 * 256}
"""Cache capacity in tokens, by batch size: prompts of 512 run alone, prompts of 128 in batches."""


class LlamaCpp:
    """A GGUF file, in BF16 or quantized by llama.cpp with its own defaults."""

    def prepare(self, folder: str, precision: str) -> None:
        """See `Peer`."""
        plain, wanted = (self._file(folder, name) for name in ("bfloat16", precision))
        if not plain.exists():
            write_gguf(Path(folder) / "hf", plain)
        if wanted.exists():
            return
        partial = wanted.with_suffix(".partial")
        options = lib.llama_model_quantize_default_params()
        options.ftype, options.nthread = _TYPES[precision], 1
        if lib.llama_model_quantize(str(plain).encode(), str(partial).encode(), ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp could not quantize {plain} to {precision}")
        partial.rename(wanted)

    def load(self, folder: str, precision: str, threads: int) -> dict[str, Any]:
        """See `Peer`."""
        lib.llama_backend_init()
        path = self._file(folder, precision)
        self.threads = threads
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.contexts: dict[int, Any] = {}
        return {"version": f"llama-cpp-python {lib.__version__}", "weight_bytes": self._read_bytes(path)}

    def generate(self, ids: list[list[int]], new: int) -> Timed:
        """See `Peer`."""
        count, length = len(ids), len(ids[0])
        context = self._context(count)
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        batch = lib.llama_batch_init(count * length, 0, 1)
        timed = Timed()
        tokens = self._run(
            context, batch, [(row, i, t) for row, each in enumerate(ids) for i, t in enumerate(each)]
        )
        timed.note(tokens[0])
        for step in range(new - 1):
            tokens = self._run(context, batch, [(row, length + step, t) for row, t in enumerate(tokens)])
            timed.note(tokens[0])
        lib.llama_batch_free(batch)
        return timed

    def _run(self, context: Any, batch: Any, entries: list[tuple[int, int, int]]) -> list[int]:
        """Run entries of (sequence, position, token), and return each sequence's most likely next token."""
        last = [
            i for i, entry in enumerate(entries) if i + 1 == len(entries) or entries[i + 1][0] != entry[0]
        ]
        batch.n_tokens = len(entries)
        for i, (row, position, token) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = row, False
        for i in last:
            batch.logits[i] = True
        if status := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode answered {status}")
        return [self._best(lib.llama_get_logits_ith(context, i)) for i in last]

    def _best(self, logits: Any) -> int:
        return int(np.ctypeslib.as_array(logits, shape=(self.vocabulary,)).argmax())

    def _context(self, count: int) -> Any:
        if count not in self.contexts:
            options = lib.llama_context_default_params()
            options.n_ctx, options.n_batch, options.n_seq_max = _CELLS[count], 2048, count
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts[count] = lib.llama_init_from_model(self.model, options)
            if not self.contexts[count]:
                raise RuntimeError(f"llama.cpp could not make a context for {count} sequences")
        return self.contexts[count]

    @staticmethod
    def _file(folder: str, precision: str) -> Path:
        return Path(folder) / f"llama.cpp-{precision}.gguf"

    @staticmethod
    def _read_bytes(path: Path) -> int:
        from gguf import GGUFReader

        tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
        tied = "output.weight" not in tensors
        return sum(size for name, size in tensors.items() if not _is_table(name, tied))


def _is_table(name: str, tied: bool) -> bool:
    return name == "position_embd.weight" or (name == "token_embd.weight" and not tied)


if __name__ == "__main__":
    serve(LlamaCpp())

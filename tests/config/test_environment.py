"""The environment variables, and that nothing else in the library reads any."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import slipstream.config
from slipstream.config import environment
from slipstream.errors import ConfigError


def test_without_variables_there_is_one_process_and_no_limit() -> None:
    assert (environment.rank(), environment.local_rank(), environment.world_size()) == (0, 0, 1)
    assert environment.cpu_isa() is None
    assert not environment.launched()
    assert environment.cache_dir() == Path.home() / ".cache" / "slipstream"


def test_the_launcher_s_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert (environment.rank(), environment.local_rank(), environment.world_size()) == (3, 1, 4)
    assert environment.launched()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["one", "-1", "1.5", " ", "²"])
def test_a_number_is_a_number(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    read: Callable[[], int] = getattr(environment, name.lower())
    with pytest.raises(ConfigError, match=name):
        read()


def test_there_is_at_least_one_process_and_ranks_are_below_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        environment.world_size()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK=2 must be below WORLD_SIZE=2"):
        environment.rank()


def test_the_cache_is_ours_then_xdg_s_then_home_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert environment.cache_dir() == tmp_path / "xdg" / "slipstream"
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "ours"))
    assert environment.cache_dir() == tmp_path / "ours"
    monkeypatch.setenv("SLIPSTREAM_CACHE", "~/ours")
    assert environment.cache_dir() == Path.home() / "ours"


def test_a_relative_xdg_path_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert environment.cache_dir() == Path.home() / ".cache" / "slipstream"


def test_the_cache_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="SLIPSTREAM_CACHE"):
        environment.cache_dir()


@pytest.mark.parametrize("value", ["reference", "avx2", "avx512", "amx", "AVX2"])
def test_an_instruction_set_is_one_of_the_known(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", value)
    assert environment.cpu_isa() == value.lower()


def test_another_instruction_set_is_refused_with_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "sse2")
    with pytest.raises(ConfigError, match="'sse2'.*avx2, avx512, amx"):
        environment.cpu_isa()


def test_every_variable_read_is_documented() -> None:
    tree = ast.parse(Path(environment.__file__).read_text())
    read = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    found = {name for name in read if re.fullmatch("[A-Z][A-Z_]+", name)} - {*environment.__all__}
    assert found == {*environment.VARIABLES, "XDG_CACHE_HOME"}


def test_no_other_file_of_the_configuration_reads_the_environment() -> None:
    for path in Path(slipstream.config.__file__).parent.glob("*.py"):
        if path.name != "environment.py":
            names = {
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert not names & {"environ", "getenv", "environb"}, path.name

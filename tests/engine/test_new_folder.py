"""Folders that appear at once: where they may be, and who is first."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine.new_folder import free_place, made_at_once
from slipstream.errors import ConfigError


def fill(folder: Path) -> None:
    with made_at_once(folder) as made:
        (made / "file").write_text("made")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["new", "empty", "deep/er", "link", "./empty/../new"])
def test_it_is_made_where_nothing_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty", target_is_directory=True)
    fill(tmp_path / name)
    assert (tmp_path / name / "file").read_text() == "made"
    assert (tmp_path / "link").is_symlink()
    assert not [one for one in names(tmp_path) if one.startswith(".")]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("full", "exists already; remove it or name another"),
        ("full/file", "exists already"),
        ("dangling", "exists already"),
        ("full/file/below", "is not a writable folder"),
        ("circle", "is not a valid path"),
        ("n\0ul", "is not a valid path"),
        ("x" * 300, "is not a valid path"),
        (".", "is the working directory of this process"),
    ],
)
def test_elsewhere_it_is_refused(
    name: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    folder = Path(name) if name == "." else tmp_path / name
    before = names(tmp_path)
    with pytest.raises(ConfigError, match=match):
        free_place(folder)
    with pytest.raises(ConfigError, match=match):
        fill(folder)
    assert names(tmp_path) == before and names(tmp_path / "full") == ["file"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no file system that refuses its owner")
def test_where_nothing_can_be_made_it_is_refused_before_work() -> None:
    with pytest.raises(ConfigError, match="cannot be created: /proc is not a writable folder"):
        free_place(Path("/proc/new"))


def test_the_second_of_two_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="exists already"),
        made_at_once(tmp_path / "one") as late,
    ):
        fill(tmp_path / "one")
        (late / "file").write_text("late")
    assert (tmp_path / "one/file").read_text() == "made"
    assert names(tmp_path) == ["one"]


def test_an_error_while_it_is_filled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), made_at_once(tmp_path / "one") as made:
        (made / "file").touch()
        raise ZeroDivisionError
    assert names(tmp_path) == []

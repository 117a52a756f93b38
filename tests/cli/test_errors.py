"""What a user can mend is one line on stderr and an exit code, never a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from slipstream import DeviceError
from slipstream.cli import chat, generate

MODEL = "{checkpoint}"


def assert_one_line(done: Any, code: int, said: str) -> None:
    assert done.exit_code == code, (done.stderr, done.exception)
    assert isinstance(done.exception, SystemExit), done.exception
    assert said in done.stderr
    assert done.stderr.startswith("slipstream: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize(
    "command",
    [("generate", "-m", "{}", "hello"), ("chat", "-m", "{}"), ("inspect", "{}"), ("bench", "-m", "{}")],
)
def test_a_wrong_path_is_named(run: Any, command: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*(part.format(tmp_path / "absent") for part in command))
    assert_one_line(done, 1, "absent: there is no such folder")


def test_a_folder_without_a_model_is_named(run: Any, tmp_path: Path) -> None:
    assert_one_line(run("generate", "-m", tmp_path, "hello"), 1, "no model could be loaded from")


def test_a_missing_gguf_file_is_named(run: Any, tmp_path: Path) -> None:
    assert_one_line(run("inspect", tmp_path / "absent.gguf"), 1, "absent.gguf: there is no such file")


def test_a_checkpoint_cut_short_is_one_line(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run("generate", "-m", broken, "hello")
    assert done.exit_code == 1, (done.stderr, done.exception)
    assert isinstance(done.exception, SystemExit)
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_missing_tokenizer_is_one_line(run: Any, checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(checkpoint / name, bare)
    assert_one_line(run("generate", "-m", bare, "hello"), 1, "it has none of tokenizer.json, tokenizer.model")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top-p", 0.5, "hello"), "--top-p has no effect at --temperature 0"),
        (("--compare", "--temperature", 1.0, "hello"), "--compare needs the same tokens"),
        (("",), "the prompt is empty"),
    ],
)
def test_options_that_contradict_each_other(
    run: Any, checkpoint: Path, options: tuple[object, ...], said: str
) -> None:
    assert_one_line(run("generate", "-m", checkpoint, *options), 2, said)


@pytest.mark.parametrize(
    "options",
    [
        ("generate", "-m", MODEL, "--temperature", "-1", "hello"),
        ("generate", "-m", MODEL, "--dtype", "int3", "hello"),
        ("generate", "-m", MODEL, "-n", "0", "hello"),
        ("generate", "-m", MODEL, "--seed", str(2**64), "hello"),
        ("generate", "hello"),
        ("bench", "-m", MODEL, "--new-tokens", "1"),
        ("bench", "-m", MODEL, "--compare", "nobody"),
        ("inspect",),
        ("fly",),
    ],
)
def test_a_value_out_of_bounds_is_a_usage_error(run: Any, checkpoint: Path, options: tuple[str, ...]) -> None:
    done = run(*(option.format(checkpoint=checkpoint) for option in options))
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output


def test_more_tokens_than_the_model_was_made_for(run: Any, checkpoint: Path) -> None:
    done = run("generate", "-m", checkpoint, "-n", 500, "hello")
    assert_one_line(done, 1, "the model supports 96 including the answer; give --max-new-tokens (-n) ")
    assert_one_line(run("generate", "-m", checkpoint, "w1 " * 100), 1, "including the answer; shorten it")


@pytest.mark.parametrize("command", [("generate", "--compare", "hello"), ("bench", "--compare", "hf")])
def test_packed_weights_have_no_original_to_compare_with(
    run: Any, checkpoint: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = run("quantize", checkpoint, tmp_path / "packed", "--format", "int8")
    assert done.exit_code == 0, (done.stderr, done.exception)
    said = "packed holds only packed weights; leave it out, or name the original"
    assert_one_line(run(command[0], "-m", tmp_path / "packed", *command[1:]), 2, said)


@pytest.mark.parametrize("module", [generate, chat], ids=["generate", "chat"])
def test_a_closed_stdin_is_an_empty_one(
    run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=None))  # the runner has one of its own
    if module is chat:
        assert run("chat", "-m", checkpoint).exit_code == 0
    else:
        assert_one_line(run("generate", "-m", checkpoint, "-"), 2, "the prompt is empty")


def test_a_defect_keeps_its_traceback(run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("slipstream.cli.generate.open_session", broken)
    done = run("generate", "-m", checkpoint, "hello")
    assert isinstance(done.exception, KeyError)


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("header too large"),
        PermissionError(13, "Permission denied"),
        DeviceError("no\nmemory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_world_does_to_a_command_is_one_line(
    run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr("slipstream.cli.generate.open_session", failing)
    assert_one_line(run("generate", "-m", checkpoint, "hello"), 1, " ".join(str(error).split()))


def test_ctrl_c_leaves_without_a_word(run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.cli.generate.open_session", interrupted)
    done = run("generate", "-m", checkpoint, "hello")
    assert (done.exit_code, done.output) == (130, "")


@pytest.mark.parametrize("place", ["", " "])
def test_an_empty_place_is_named_as_it_was_given(run: Any, place: str) -> None:
    assert_one_line(run("generate", "-m", place, "hello"), 1, f"{place!r} does not name a model")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_bytes_that_are_no_text_are_refused(run: Any, command: str, checkpoint: Path) -> None:
    rest = ["-"] if command == "generate" else []
    done = run(command, "-m", checkpoint, *rest, stdin=b"w1 \xff\xfe w2\n")
    assert done.exit_code == 2, (done.stderr, done.exception)
    assert "is not UTF-8 text" in done.stderr.strip().splitlines()[-1]


def test_an_argument_that_is_no_text_is_refused(run: Any, checkpoint: Path) -> None:
    assert_one_line(run("generate", "-m", checkpoint, "w1 \udcff"), 2, "the prompt is not UTF-8 text: byte 3")

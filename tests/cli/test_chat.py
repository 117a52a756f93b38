"""`slipstream chat` remembers, forgets when told to, and leaves cleanly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import chat as command
from slipstream.cli.session import Session


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that the model was given, in order."""
    seen: list[list[dict[str, str]]] = []
    encode = Session.encode

    def record(self: Session, messages: Any) -> Any:
        seen.append([dict(message) for message in messages])
        return encode(self, messages)

    monkeypatch.setattr(Session, "encode", record)
    return seen


def test_history_grows_and_reset_forgets_it(run: Any, checkpoint: Path, asked: Any) -> None:
    done = run("chat", "-m", checkpoint, "-n", 4, stdin="w1 w2\nw3\n/reset\nw4\n")
    assert done.exit_code == 0, (done.stderr, done.exception)
    roles = [[message["role"] for message in messages] for messages in asked]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]
    first_answer = asked[1][1]["content"]
    assert first_answer == done.stdout.splitlines()[0].strip() != ""
    assert "the conversation was reset" in done.stderr


def test_the_system_prompt_survives_a_reset(run: Any, checkpoint: Path, asked: Any) -> None:
    run("chat", "-m", checkpoint, "-n", 2, "--system", "w9", stdin="w1\n/reset\nw2\n")
    assert [messages[0] for messages in asked] == [{"role": "system", "content": "w9"}] * 2


@pytest.mark.parametrize("stdin", ["/exit\nw1\n", "", "\n\n"], ids=["exit", "end of input", "empty lines"])
def test_it_leaves_without_asking_the_model(run: Any, checkpoint: Path, asked: Any, stdin: str) -> None:
    done = run("chat", "-m", checkpoint, stdin=stdin)
    assert done.exit_code == 0
    assert not asked


def test_slash_words_are_not_for_the_model(run: Any, checkpoint: Path, asked: Any) -> None:
    done = run("chat", "-m", checkpoint, stdin="/help\n/fly away\n")
    assert "/reset  forget the conversation" in done.stderr
    assert "/fly is not known" in done.stderr
    assert not asked


def test_ctrl_c_at_the_prompt_leaves(run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    done = run("chat", "-m", checkpoint)
    assert done.exit_code == 0, done.exception


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(
    run: Any, checkpoint: Path, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Session.answer

    def interrupted(self: Session, ids: Any, sampling: Any, show: Any) -> Any:
        if len(asked) == 1:
            show("w7 ")
            raise KeyboardInterrupt
        return answer(self, ids, sampling, show)

    monkeypatch.setattr(Session, "answer", interrupted)
    done = run("chat", "-m", checkpoint, "-n", 2, stdin="w1\nw2\n")
    assert done.exit_code == 0, done.exception
    assert "(stopped)" in done.stderr
    assert asked[1][1] == {"role": "assistant", "content": "w7"}


def test_a_conversation_that_has_grown_too_long_can_be_reset(run: Any, checkpoint: Path) -> None:
    long = " ".join(["w1"] * 100)
    done = run("chat", "-m", checkpoint, "-n", 4, stdin=f"{long}\n/reset\nw1\n")
    assert done.exit_code == 0, done.exception
    assert "/reset begins a new one" in done.stderr
    assert done.stdout.strip()


def test_a_model_without_a_template_does_not_chat(run: Any, plain_checkpoint: Path) -> None:
    done = run("chat", "-m", plain_checkpoint)
    assert done.exit_code == 1
    assert "has no chat template; use slipstream generate" in done.stderr


def test_help_lists_every_word_it_knows() -> None:
    assert all(word in command._HELP for word in ("/help", "/reset", "/exit", "Ctrl-D", "Ctrl-C"))

"""`slipstream generate` says what the model says, and how it was made fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream import InferenceEngine
from slipstream.cli import generate as command


def answer_of(checkpoint: Path, prompt: str, count: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
    else:
        text = prompt
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_answer_is_the_originals_through_the_chat_template(run: Any, checkpoint: Path) -> None:
    done = run("generate", "--model", checkpoint, "--max-new-tokens", 12, "w3 sky w5")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == answer_of(checkpoint, "w3 sky w5", 12)
    assert "model.layers.0 .. 1  block  llama" in done.stderr
    assert " tokens/s" in done.stderr


def test_without_a_template_the_text_is_continued(run: Any, checkpoint: Path, plain_checkpoint: Path) -> None:
    done = run("generate", "-m", plain_checkpoint, "-n", 12, "w3 sky w5")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == answer_of(plain_checkpoint, "w3 sky w5", 12)
    assert done.stdout.strip() != answer_of(checkpoint, "w3 sky w5", 12)


def test_a_dash_reads_the_prompt_from_stdin(run: Any, checkpoint: Path) -> None:
    given = run("generate", "-m", checkpoint, "-n", 9, "w3 sky w5")
    read = run("generate", "-m", checkpoint, "-n", 9, "-", stdin="w3 sky w5\n")
    assert read.stdout == given.stdout != ""


def test_compare_finds_the_tokens_identical(run: Any, checkpoint: Path) -> None:
    done = run("generate", "-m", checkpoint, "-n", 10, "--compare", "w1 w2")
    assert done.exit_code == 0, done.stderr
    assert "original" in done.stderr
    assert "tokens are identical" in done.stderr
    assert "x the original's speed" in done.stderr


def test_compare_says_where_tokens_differ(
    run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = command.load_original

    def wrong(loading: Any, device: Any) -> Any:
        model = load(loading, device)
        model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)
        return model

    monkeypatch.setattr(command, "load_original", wrong)
    done = run("generate", "-m", checkpoint, "-n", 10, "--compare", "w1 w2")
    assert "the tokens differ from number 1 on" in done.stderr
    assert "identical" not in done.stderr


def test_no_inject_leaves_the_layers_alone(run: Any, checkpoint: Path) -> None:
    done = run("generate", "-m", checkpoint, "-n", 5, "--no-inject", "w1")
    assert done.exit_code == 0, done.stderr
    assert "level none" in done.stderr


def test_a_seed_repeats_a_sampled_answer(run: Any, checkpoint: Path) -> None:
    def sample(seed: int) -> str:
        done = run("generate", "-m", checkpoint, "-n", 15, "--temperature", 5.0, "--seed", seed, "w1 w2")
        assert done.exit_code == 0, done.stderr
        return done.stdout

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_dtype_reaches_the_engine(run: Any, checkpoint: Path) -> None:
    done = run("generate", "-m", checkpoint, "-n", 3, "--dtype", "bfloat16", "w1")
    assert "bfloat16" in done.stderr, done.stderr


def test_nothing_but_the_answer_goes_to_stdout_and_no_bar_to_stderr(run: Any, checkpoint: Path) -> None:
    done = run("generate", "-m", checkpoint, "-n", 3, "w1")
    assert len(done.stdout.strip().splitlines()) == 1
    assert "it/s" not in done.stderr
    assert "Loading weights" not in done.stderr


def test_a_high_temperature_flattens_the_choice_and_a_low_one_sharpens_it(run: Any, checkpoint: Path) -> None:
    def sampled(*options: object) -> str:
        done = run("generate", "-m", checkpoint, "-n", 15, *options, "w1 w2")
        assert done.exit_code == 0, done.stderr
        return done.stdout

    greedy = sampled()
    assert sampled("--temperature", 1e-4) == greedy
    assert sampled("--temperature", 100.0, "--top-p", 1e-4) == greedy
    assert sampled("--temperature", 100.0) != greedy


def test_an_answer_of_no_given_length_ends_where_the_context_does(
    run: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    answers = InferenceEngine.generate

    def record(self: InferenceEngine, ids: Any, **options: Any) -> Any:
        asked.append(ids.shape[1] + options["max_new_tokens"])
        return answers(self, ids, **options)

    monkeypatch.setattr(InferenceEngine, "generate", record)
    done = run("generate", "-m", checkpoint, "w1 w2")
    assert done.exit_code == 0, done.stderr
    assert asked == [96]

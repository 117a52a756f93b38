"""The runner that lets peers take turns: workers that are stopped, rows that say why they are missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.models import Facts, make
from benchmarks.peers import workers
from benchmarks.peers.conductor import Failed, Worker, last_words
from benchmarks.peers.measure import Entry
from benchmarks.peers.rows import PRECISIONS, Row, check_left_out, rows_of, tables
from benchmarks.peers.worker import Timed, prompts
from benchmarks.run import BENCHMARKS, PARTS, main, table

ROOT = Path(__file__).resolve().parents[2]
ROW = Row("fake", "fake", "", "bfloat16")
# A peer that spins in a thread beside the one that answers, prints, and can be told to fail.
FAKE = """
import threading
from benchmarks.peers.worker import serve
class Fake:
    def load(self, fail=False):
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
        print("a library has a word to say")
        if fail: raise RuntimeError("no such file")
        return {"version": "1"}
serve(Fake())
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with Worker(ROW, tmp_path / "log", [sys.executable, "-c", FAKE]) as started:
        yield started


def state_of(worker: Worker) -> str:
    """Letter of the process's state; "T" is stopped."""
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_answers_and_is_stopped_in_between(worker: Worker) -> None:
    assert worker.ask("load") == {"version": "1"}
    assert state_of(worker) == "T"
    assert worker.ask("peak")["bytes"] > 1 << 20
    assert state_of(worker) == "T"


def test_a_worker_that_fails_leaves_its_last_words(worker: Worker) -> None:
    with pytest.raises(Failed, match="load: RuntimeError: no such file"):
        worker.ask("load", fail=True)


def test_progress_bars_are_no_last_words() -> None:
    log = "Traceback (most recent call last):\n  File x\nmod.OddError: no room\n\rLoading:  40%|##  | 2/5\r\n"
    assert last_words(log) == "mod.OddError: no room"
    assert last_words("one\ntwo\n\n") == "two"
    assert last_words("") == ""


def test_a_stopped_worker_ends_with_its_conductor(tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from benchmarks.peers.conductor import Worker
from tests.benchmarks.test_peers import FAKE, ROW
worker = Worker(ROW, Path({str(tmp_path / "log")!r}), [sys.executable, "-c", FAKE])
worker.ask("load")
print(worker._process.pid, flush=True)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    number = int(done.stdout)
    for _ in range(500):
        if not Path(f"/proc/{number}").exists() or "Z" in Path(f"/proc/{number}/stat").read_text().split()[2]:
            return
        time.sleep(0.01)
    os.kill(number, signal.SIGKILL)
    pytest.fail("the worker is still there")


def test_a_peer_that_is_not_installed_is_a_row_that_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERS", str(tmp_path))
    missing = [entry.error for entry in map(Entry, rows_of("smollm2", "int8")) if entry.row.environment]
    assert missing == [
        "not installed; run: benchmarks/peers/install llama_cpp",
        "not installed; run: benchmarks/peers/install openvino",
    ]


def test_every_row_has_a_worker_and_every_environment_an_installer() -> None:
    installer = (ROOT / "benchmarks/peers/install").read_text()
    for model in ("smollm2", "minilm"):
        for precision in PRECISIONS:
            for row in rows_of(model, precision):
                assert (Path(workers.__file__).parent / f"{row.worker}.py").exists()
                assert not row.environment or f"install_{row.environment}()" in installer


def test_every_table_has_the_engine_and_transformers() -> None:
    for precision in PRECISIONS:
        names = [row.name for row in rows_of("smollm2", precision)]
        assert names[0].startswith("slipstream") and any(n.startswith("transformers eager") for n in names)
        assert len(set(names)) == len(names)


def test_tables_are_chosen_by_name() -> None:
    assert tables([], quick=True) == [("tiny-llama", "bfloat16")]
    assert tables(["gpt2/int8"], quick=False) == [("gpt2", "int8")]
    assert [precision for _, precision in tables(["moe"], quick=False)] == list(PRECISIONS)
    with pytest.raises(ValueError, match="'gpt3'.*smollm2.*float32"):
        tables(["gpt3"], quick=False)
    check_left_out(["OpenVINO", "llama.cpp q4"])
    with pytest.raises(ValueError, match="no row's name begins with 'vLLM'; there are slipstream fp32"):
        check_left_out(["slipstream", "vLLM"])


@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - {"peers"}))
def test_a_word_that_a_benchmark_does_not_take_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--only", "--without"):
        monkeypatch.setattr(sys, "argv", ["bench", name, "--quick", option, "nonsense"])
        with pytest.raises(SystemExit):
            main()
        said = capsys.readouterr().err
        assert f"{name} takes no {option}" in said or (name in PARTS and "not 'nonsense'" in said)


def test_a_step_of_a_mixture_reads_the_experts_that_are_chosen() -> None:
    counted = Facts(
        10, 0, matrix=100, experts=800, experts_used=0.25, head=100, embedding=0, cache=0, attention=0
    )
    assert counted.decode_share(1) == pytest.approx((200 + 200) / 1000)
    assert counted.decode_share(8) == pytest.approx((200 + 800 * (1 - 0.75**8)) / 1000)
    # A token multiplies the matrices and its own experts; the vocabulary projection belongs to the last one.
    assert counted.flops(2, 3, causal=True) == 2 * 2 * (3 * (100 + 200) + 100)


def test_prompts_are_the_same_in_every_process() -> None:
    assert prompts(1000, 2, 3) == [[864, 394, 776], [911, 430, 41]]


def test_the_first_token_is_not_a_step() -> None:
    timed = Timed()
    timed.times, timed.tokens = [3.0, 3.5, 4.0], [1, 2, 3]
    assert timed.to_dict() == {"first": 3.0, "step": 0.5, "tokens": [1, 2, 3], "spared_bytes": 0}
    timed.times = [3.0]
    assert timed.to_dict()["step"] is None


def test_a_table_leaves_cells_empty_where_a_row_has_none() -> None:
    assert (
        table([{"a": 1.23456, "version": "9"}, {"b": [1, 2.5]}])
        == "    a       b\n1.235        \n       1..2.5"
    )


def test_the_quick_run_measures_the_engine_beside_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERS", str(tmp_path))
    make("tiny-llama", tmp_path / "models/tiny-llama/hf")
    options = ["--quick", "--without", "openvino", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", "peers", *options])
    main()
    result = json.loads((tmp_path / "peers" / "tiny-llama-bfloat16.json").read_text())
    rows = {row["row"]: row for row in result["rows"]}
    assert rows["slipstream bf16"]["same_tokens"] == rows["transformers eager bf16"]["same_tokens"] == 4
    for name in ("slipstream bf16", "transformers eager bf16"):
        low, high = rows[name]["decode_8_range"]
        assert 0 < low <= rows[name]["decode_8"] <= high
    assert "benchmarks/peers/install llama_cpp" in rows["llama.cpp BF16"]["error"]
    assert rows["OpenVINO bf16"]["error"] == "left out"

"""The tables that are made from results say what the results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import families_table
from benchmarks.peers.document import FOLDERS, best_peer, machines, page, read, summary

ROOT = Path(__file__).resolve().parents[2]


def row(name: str, figure: float, **more: Any) -> dict[str, Any]:
    tasks = {}
    for task in ("decode_1", "decode_8", "prefill_512"):
        tasks |= {task: figure, f"{task}_range": [figure - 1, figure + 1], f"{task}_share": 0.8}
    rest = {"version": "x 1", "peak_bytes": 5e8, "first_token_128_s": 0.25, "same_tokens": 7}
    return {"row": name, **rest, **tasks, **more}


RESULT: dict[str, Any] = {
    "model": "SmolLM2-135M",
    "device": "a processor",
    "threads": 2,
    "measured": "today",
    "limits": {"read": 27.0, "float32": None},
    "rows": [
        row("slipstream bf16", 90.0),
        row("transformers eager bf16", 30.0),
        row("OpenVINO bf16", 60.0),
        {"row": "llama.cpp BF16", "error": "not installed; run: benchmarks/peers/install llama_cpp"},
    ],
}


def results(tmp_path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    (tmp_path / "smollm2-bfloat16.json").write_text(json.dumps(RESULT))
    return read(tmp_path)


def test_the_summary_compares_with_the_best_peer_and_with_eager(tmp_path: Path) -> None:
    lines = summary(results(tmp_path)).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| SmolLM2-135M | bf16 | **90.0**, 1.50x OpenVINO bf16, 3.0x eager |")


def test_eager_is_the_baseline_and_no_peer() -> None:
    peer = best_peer({"rows": RESULT["rows"][:2]}, "decode_1")
    assert peer is None


def test_less_time_is_the_better_one() -> None:
    rows = [{"row": "OpenVINO", "encode_1x16": 2.0}, {"row": "ONNX Runtime", "encode_1x16": 1.5}]
    assert best_peer({"rows": rows}, "encode_1x16") == rows[1]


def test_the_page_has_every_row_and_why_one_is_missing(tmp_path: Path) -> None:
    text = page(results(tmp_path))
    assert "| slipstream bf16 | 90.0 (89.0 - 91.0), 80% |" in text
    assert "| llama.cpp BF16 | not installed; run: benchmarks/peers/install llama_cpp |" in text
    assert "measured limits: read 27 GB/s" in text


def test_the_committed_tables_are_what_the_results_say() -> None:
    readme = (ROOT / "README.md").read_text()
    assert summary(read()) in readme
    assert machines() in readme
    for folder in FOLDERS:
        results, file = read(folder), folder / "README.md"
        assert (file.read_text() if file.exists() else None) == (page(results) if results else None)


def test_a_machine_is_the_range_of_its_ratios() -> None:
    ratios = []
    for (model, _), result in read(FOLDERS[0]).items():
        for task in ("encode_1x16", "encode_32x128") if model == "minilm" else ():
            peer = best_peer(result, task)
            for row in result["rows"]:
                if peer and row["row"].startswith("slipstream") and task in row:
                    ratio = row[task] / peer[task]
                    ratios.append(1 / ratio if task == "encode_1x16" else ratio)
    assert f"{min(ratios):.1f} to {max(ratios):.1f}x |" in machines().splitlines()[2]


def family(model: str, task: str, **found: Any) -> dict[str, Any]:
    return {"model": model, "kind": "decoder", "level": "block", "task": task, **found}


def times(ratio: float) -> dict[str, Any]:
    return {"times_original": ratio, "times_original_range": [ratio - 0.5, ratio + 0.25], "engine_ms": 12.34}


FAMILIES: dict[str, Any] = {
    "device": "a processor",
    "threads": 2,
    "torch": "2",
    "transformers": "5",
    "dtype": "bfloat16",
    "rounds": 3,
    "rows": [
        family("gpt2", "generate_1x32", **times(2.0)),
        family("gpt2", "prompt_1x512", differs="the numbers are off | by 1"),
        family("opt", "generate_1x32", **times(3.0)),
        {"model": "vit", "kind": "vision", "task": "-", "error": "InjectionError: layer 0"},
    ],
}


def test_the_table_of_families_has_every_row_and_no_time_where_answers_differ(tmp_path: Path) -> None:
    assert families_table.section(tmp_path) == "No results are committed yet.\n"
    (tmp_path / "families_cpu_float32.json").write_text(json.dumps(FAMILIES))
    text = families_table.section(tmp_path)
    assert "In bfloat16: a processor, 2 threads, torch 2, transformers 5, 3 rounds." in text
    assert "| decoder | level | generate_1x32 | prompt_1x512 |\n" in text
    assert "| gpt2 | block | 2.00x (1.50 - 2.25), 12.3 ms | the numbers are off / by 1 |\n" in text
    assert "| opt | block | 3.00x (2.50 - 3.25), 12.3 ms |  |\n| median | | 2.50x |  |\n" in text
    assert "| vision | level | - |\n|---|---|---:|\n| vit | - | InjectionError: layer 0 |\n" in text


def test_the_committed_tables_of_families_are_what_the_results_say() -> None:
    page = (ROOT / "benchmarks/results/README.md").read_text()
    assert f"<!-- families_cpu -->\n{families_table.section()}<!-- /families_cpu -->" in page

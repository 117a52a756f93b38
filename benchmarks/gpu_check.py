"""Checks on a GPU whether kernels, families, formats and graphs are right, and measures how fast they are.

    scripts/gpu_check [--part NAME] [--only WORD] [--minutes N] [--out FOLDER] [--quick]

Parts: `kernels` (every case of every kernel), `engines` (formats, int8 caches and graphs of one model),
`speed`, `families` (every architecture in float32). Each runs in a process of its own, because after a GPU
error a process cannot use the GPU any more, and writes FOLDER/gpu_check_NAME_GPU.json as it goes. `--only`
selects rows whose name contains a word (`--only linear`, `--only int4`), and for `speed` a model and a format
(`--only 8b`, `--only 8b/int4`). Nothing is fetched, and nothing but torch, triton, transformers and this
package's own dependencies is imported. The exit status is 1 if something is wrong, and 2 if the checks could
not run.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "safetensors", "pydantic", "psutil")
SHARES = {"kernels": 0.25, "engines": 0.15, "speed": 0.45, "families": 0.15}
"""Each part's share of the minutes, when several parts run."""
LOST = (
    "illegal memory access",
    "device-side assert",
    "launch failure",
    "misaligned address",
    "CUDA error: unknown",
)
"""Error messages after which this process cannot use the GPU any more."""


def kernels(quick: bool, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Compare each kernel of this device with its op's reference in double, with a row for each case."""
    import torch

    from slipstream.devices import choose
    from slipstream.kernels import kernels_for
    from slipstream.ops import OPS
    from slipstream.ops.bind import Facts

    device = choose()
    facts = Facts(device.torch_device, torch.float32)
    able = [kernel for kernel in kernels_for(device) if kernel.refuse(facts) is None]
    for kernel in able[:2] if quick else kernels_for(device):
        for case in OPS[kernel.op].cases:
            for dtype, most in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
                name = f"{kernel.op}/{kernel.name}/{case.name}/{str(dtype).removeprefix('torch.')}"
                if kernel.refuse(Facts(device.torch_device, dtype)) is not None or not _asked(name, only):
                    continue
                if kernel.op in ("draw", "sample"):  # returns tokens, for float32 logits only
                    most = 0.0
                    if dtype != torch.float32:
                        continue
                yield _guarded(name, lambda k=kernel, c=case, d=dtype, m=most: _compared(k, c, d, m, device))  # type: ignore[misc]


def _compared(kernel: Any, case: Any, dtype: Any, most: float, device: Any) -> dict[str, Any]:
    import torch

    from slipstream.ops import OPS
    from slipstream.ops.kv_cache import read_cache

    arguments, others = (case.make(torch.Generator().manual_seed(3), dtype) for _ in range(2))
    exact = {n: _double(v) for n, v in arguments.items()}
    expected = OPS[kernel.op].reference(**exact)
    there = {n: _moved(v, device.torch_device) for n, v in others.items()}
    got = kernel.run(**there).cpu().double()
    error = float((got - expected).abs().max() / expected.double().abs().max().clamp(min=1.0))
    right = error <= most
    for ours, theirs in ((there[n], exact[n]) for n in OPS[kernel.op].writes):
        blocks = torch.arange(ours.shape[0])
        found, wanted = (
            read_cache(c, blocks, torch.float64) for c in (_moved(ours, torch.device("cpu")), theirs)
        )
        off = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        error, right = max(error, off), right and off <= max(most, 0.01 if ours.dtype == torch.int8 else 0)
    return {"error": error, "right": right}


def _asked(name: str, only: tuple[str, ...]) -> bool:
    return not only or any(word in name for word in only)


def _guarded(name: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return one row; an exception becomes the row's error, so that the other rows still run."""
    try:
        return {"row": name, **ask()}
    except Exception as error:  # noqa: BLE001 - whatever it is stands in the row
        if any(words in str(error) for words in LOST):
            raise RuntimeError(f"{name}: {error}") from error
        return {"row": name, "error": f"{type(error).__name__}: {str(error)[:300]}", "right": False}


def _moved(value: Any, device: Any) -> Any:
    """Move an argument to a device: a tensor, weight, step, mask or cache; return anything else as it is."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: _moved(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **moved)
    return tuple(_moved(one, device) for one in value) if isinstance(value, tuple) else value


def _double(value: Any) -> Any:
    from torch import Tensor

    from slipstream.ops.linear import Weight

    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value.apply(lambda t: t.double()) if isinstance(value, Weight) else value


def families(quick: bool, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Compare the decoders of every family with transformers: float32 logits and greedy tokens."""
    import torch

    import slipstream
    from tests.families.sweep import VARIANTS, label, peaked_model

    for variant in VARIANTS[: 3 if quick else None]:
        if not _asked(label(variant), only):
            continue
        row = _guarded(label(variant), lambda v=variant: _generated(peaked_model(v[1]), torch, slipstream))  # type: ignore[misc]
        if len(row) > 1:
            yield row


def _generated(model: Any, torch: Any, slipstream: Any) -> dict[str, Any]:
    """Compare a decoder in the engine with its original; return nothing for other models.

    If the original on the CPU differs, the engine is compared with the original on the device: indexers rank
    tokens by sums of ReLUs, exact zeros among these tie, and which of them topk takes depends on the device.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        return {}
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(5, min(vocabulary, 100), (2, 9), generator=torch.Generator().manual_seed(1))
    original = copy.deepcopy(model)
    with torch.no_grad():
        engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
        got = _says(engine, ids.to(engine.device))
        row = _beside(got, _says(original, ids), "cpu")
        if not row["right"]:
            expected_there = _says(original.to(engine.device), ids.to(engine.device))
            row = {**_beside(got, expected_there, engine.device.type), "error_on_cpu": row["error"]}
    engine.destroy()
    return row


def _beside(said: tuple[Any, Any], expected: tuple[Any, Any], device: str) -> dict[str, Any]:
    error, same = float((said[0] - expected[0]).abs().max()), said[1].equal(expected[1])
    row = {"error": error, "same": same, "against": f"the original on {device}"}
    return {**row, "right": error <= 1e-3 and same}


def _says(asked: Any, ids: Any) -> tuple[Any, Any]:
    """Return logits and greedy tokens, on the CPU."""
    tokens = asked.generate(ids, max_new_tokens=6, do_sample=False)
    return asked(input_ids=ids).logits.cpu(), tokens.cpu()


def engines(quick: bool, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Compare a small Llama in each format, with graphs and int8 caches, with its dequantized weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.models import LLAMA_TINY

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_TINY)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    on_gpu = torch.cuda.is_available()
    for name in ("plain", "int4") if quick else ("plain", "int8", "fp8", "fp6", "int4"):
        for settings in ({}, {"enable_cuda_graph": on_gpu}, {"kv_cache_dtype": "int8"}):
            row = f"{name}/{settings}"
            if _asked(row, only):
                yield _guarded(row, lambda n=name, s=settings: _engine_says(model, n, s, 4 if quick else 40))  # type: ignore[misc]


def _engine_says(model: Any, name: str, settings: dict[str, Any], new: int) -> dict[str, Any]:
    """Compare greedy tokens of one and three rows with transformers; check that a seed repeats its tokens."""
    import torch

    import slipstream

    ids = torch.randint(5, 1000, (3, 40), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": new, "do_sample": False}
    given = {**settings, **({} if name == "plain" else {"quant": name})}
    engine = slipstream.init_inference(
        copy.deepcopy(model), dtype=torch.float32, replace_with_kernel_inject=True, **given
    )
    # transformers' own code with the dequantized values of the packed weights.
    original = copy.deepcopy(model)
    original.load_state_dict({k: v.cpu().clone() for k, v in engine.state_dict().items()})
    found: dict[str, Any] = {}
    for rows in (1, 3):
        expected = original.generate(ids[:rows], **options)
        got = engine.generate(ids[:rows].to(engine.device), **options).cpu()
        found[f"alike_{rows}"] = (
            float((got == expected).float().mean()) if got.shape == expected.shape else 0.0
        )
    found["alike_next"] = _alike_next(engine, original.generate(ids, **options), ids.shape[1])
    drawn = []
    for _ in range(2):
        torch.manual_seed(4)
        warm = {**options, "do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}
        drawn.append(engine.generate(ids.to(engine.device), **warm).cpu())
    found["seed_repeats"] = torch.equal(drawn[0], drawn[1])
    report = engine.report()
    notes = [note for note in report.notes if "no effect" in note]
    notes += [k for k in (report.layers[0].kernels["stack"],) if k != "triton"]
    engine.destroy()
    alike = min(found["alike_1"], found["alike_3"]) == 1.0
    if "kv_cache_dtype" in settings:  # near ties may resolve differently, and texts diverge after the first
        alike = found["alike_next"] >= 0.8
    right = alike and found["seed_repeats"]
    return {**found, "notes": notes, "right": right and not (notes and torch.cuda.is_available())}


def _alike_next(engine: Any, texts: Any, begin: int) -> float:
    """Return the share of the original's tokens that the engine predicts, given the tokens before each."""
    same = []
    for end in range(begin, texts.shape[1], 3):
        generated = engine.generate(texts[:, :end].to(engine.device), max_new_tokens=1, do_sample=False)
        same.append((generated[:, -1].cpu() == texts[:, end]).float().mean())
    return float(sum(same) / len(same))


def speed(quick: bool, only: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of `benchmarks.gpu`."""
    from benchmarks.gpu import measure
    from benchmarks.request import Request

    for _, result in measure(Request(quick=quick, only=only)):
        limits = {k: v for k, v in result.items() if k != "rows"}
        yield {**limits, **result["rows"][-1], "right": "error" not in result["rows"][-1]}


PARTS: dict[str, Callable[[bool, tuple[str, ...]], Iterator[dict[str, Any]]]] = {
    "kernels": kernels,
    "engines": engines,
    "speed": speed,
    "families": families,
}


def run(part: str, out: Path, given: argparse.Namespace) -> bool:
    """Run one part and return whether all is right; an exception becomes a row that is wrong."""
    from benchmarks.machine import describe

    start, rows = time.perf_counter(), []
    try:
        for row in PARTS[part](given.quick, tuple(given.only or ())):
            rows.append(row)
            if not row["right"] or part == "speed":
                print(part, row, flush=True)
            _write(out, part, describe(), rows, start)
            if time.perf_counter() - start > 60 * given.minutes:
                rows.append({"row": "what did not fit into the minutes was left out", "right": True})
                break
    except Exception as error:  # noqa: BLE001 - a part that fails must not take the others' results with it
        traceback.print_exc()
        rows.append({"row": "the part itself", "error": repr(error), "right": False})
    _write(out, part, describe(), rows, start)
    wrong = sum(not row["right"] for row in rows)
    print(f"{part}: {len(rows)} rows, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    return not wrong and bool(rows)


def _apart(part: str, given: argparse.Namespace) -> bool:
    """Run one part in a process of its own, which is killed if it hangs."""
    minutes = given.minutes * SHARES[part]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", part, "--out", str(given.out)]
    command += ["--minutes", str(minutes), *(["--quick"] if given.quick else [])]
    command += [word for one in given.only or () for word in ("--only", one)]
    try:
        return subprocess.run(command, timeout=60 * minutes + 60).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{part}: ended after {minutes + 1:.1f} minutes; its file has what came before", flush=True)
        return False


def _write(out: Path, part: str, machine: dict[str, Any], rows: list[dict[str, Any]], start: float) -> None:
    from benchmarks.machine import of_gpu

    out.mkdir(parents=True, exist_ok=True)
    took = round(time.perf_counter() - start, 1)
    text = json.dumps({"part": part, **machine, "seconds": took, "rows": rows}, indent=1, default=str)
    (out / f"gpu_check_{part}{of_gpu()}.json").write_text(text + "\n")


def main(given: list[str] | None = None) -> int:
    """Parse the command line, run the parts, and return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=[*PARTS], help="repeatable; all without it")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="little of each part; runs without a GPU, too")
    parser.add_argument("--only", action="append", metavar="WORD", help="rows that have it in their name")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row begins later than this")
    arguments = parser.parse_args(given)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"gpu_check: this Python lacks {', '.join(missing)}; install what the package needs, or bring "
            "them with the checkout: scripts/gpu_check --wheels, where there is a network"
        )
        return 2
    import torch

    if not torch.cuda.is_available() and not arguments.quick:
        print("gpu_check: torch sees no GPU here; --quick tries the script itself on the CPU")
        return 2
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        print("gpu_check: there is a GPU and no Triton; it comes with torch's CUDA build")
        return 2
    parts = arguments.part or list(PARTS)
    if len(parts) == 1:
        return 0 if run(parts[0], arguments.out, arguments) else 1
    right = [_apart(part, arguments) for part in parts]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())

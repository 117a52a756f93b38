"""What a GPU is asked once there is one: are kernels, families, formats and graphs right, and how fast.

    scripts/gpu_check [--part NAME] [--out FOLDER] [--quick]

Parts: `kernels` (every case of every kernel), `families` (every architecture in float32), `engines` (formats,
int8 caches and graphs of one model), `speed`. Each writes FOLDER/gpu_check_NAME.json as it goes. Nothing is
fetched, and nothing but torch, triton, transformers and this package's own dependencies is imported. Ends
with 1 where something is wrong, with 2 where it could not be asked.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "safetensors", "pydantic", "psutil")


def kernels(quick: bool) -> Iterator[dict[str, Any]]:
    """Each kernel of this device against its op's reference in double: a row for each case that is off."""
    import torch

    from slipstream.devices import choose
    from slipstream.kernels import kernels_for
    from slipstream.ops import OPS
    from slipstream.ops.bind import Facts

    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    device = choose()
    for kernel in kernels_for(device)[: 2 if quick else None]:
        for case in OPS[kernel.op].cases:
            for dtype, most in tolerance.items():
                if kernel.refuse(Facts(device.torch_device, dtype)) is not None:
                    continue
                arguments = case.make(torch.Generator().manual_seed(3), dtype)
                expected = OPS[kernel.op].reference(**{n: _double(v) for n, v in arguments.items()})
                there = {n: _moved(v, device.torch_device) for n, v in arguments.items()}
                got = kernel.run(**there).cpu().double()
                error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))
                name = f"{kernel.op}/{kernel.name}/{case.name}/{str(dtype).removeprefix('torch.')}"
                yield {"row": name, "error": error, "right": error <= most}


def _moved(value: Any, device: Any) -> Any:
    """An argument on a device: a tensor, a weight, a step, a mask, a cache, or something else."""
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


def families(quick: bool) -> Iterator[dict[str, Any]]:
    """Decoders of every family: float32 logits and greedy tokens against transformers' on the CPU."""
    import torch

    import slipstream
    from tests.families.sweep import VARIANTS, label, peaked_model

    for variant in VARIANTS[: 3 if quick else None]:
        model = peaked_model(variant[1])
        if not model.can_generate() or model.config.is_encoder_decoder:
            continue
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(5, min(vocabulary, 100), (2, 9), generator=torch.Generator().manual_seed(1))
        options = {"max_new_tokens": 6, "do_sample": False}
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            tokens = model.generate(ids, **options)
            engine = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
            error = float((engine(input_ids=ids).logits.cpu() - expected).abs().max())
            same = torch.equal(engine.generate(ids.to(engine.device), **options).cpu(), tokens)
        yield {"row": label(variant), "error": error, "same": same, "right": error <= 1e-3 and same}


def engines(quick: bool) -> Iterator[dict[str, Any]]:
    """One small llama in each format, with graphs and int8 caches: the tokens of the unpacked weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import slipstream
    from benchmarks.models import LLAMA_TINY

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_TINY)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    on_gpu = torch.cuda.is_available()
    ids = torch.randint(5, 1000, (3, 40), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 4 if quick else 40, "do_sample": False}
    for name in ("plain", "int4") if quick else ("plain", "int8", "fp8", "fp6", "int4"):
        for settings in ({}, {"enable_cuda_graph": on_gpu}, {"kv_cache_dtype": "int8"}):
            quant = {} if name == "plain" else {"quant": name}
            engine = slipstream.init_inference(
                copy.deepcopy(model),
                dtype=torch.float32,
                replace_with_kernel_inject=True,
                **quant,
                **settings,
            )
            # What the packed weights stand for, by transformers' own code.
            original = copy.deepcopy(model)
            original.load_state_dict({k: v.cpu().clone() for k, v in engine.state_dict().items()})
            for rows in (1, 3):
                expected = original.generate(ids[:rows], **options)
                got = engine.generate(ids[:rows].to(engine.device), **options).cpu()
                alike = float((got == expected).float().mean()) if got.shape == expected.shape else 0.0
                # In int8 caches near ties may fall the other way.
                right = alike >= (0.6 if "kv_cache_dtype" in settings else 1.0)
                yield {"row": f"{name}/{settings}/{rows}", "alike": alike, "right": right}
            report = engine.report()
            notes = [note for note in report.notes if "no effect" in note]
            notes += [k for k in (report.layers[0].kernels["stack"],) if k != "triton"]
            if notes and on_gpu:
                yield {"row": f"{name}/{settings}", "error": notes, "right": False}
            engine.destroy()


def speed(quick: bool) -> Iterator[dict[str, Any]]:
    """The rows of `benchmarks.gpu`."""
    from benchmarks.gpu import measure
    from benchmarks.request import Request

    shown = 0
    last = ""
    for name, result in measure(Request(quick=quick)):
        shown, last = (0, name) if name != last else (shown, last)
        limits = {k: v for k, v in result.items() if k != "rows"}
        yield {**limits, **result["rows"][-1], "right": "error" not in result["rows"][-1]}


PARTS: dict[str, Callable[[bool], Iterator[dict[str, Any]]]] = {
    "kernels": kernels,
    "engines": engines,
    "families": families,
    "speed": speed,
}


def run(part: str, out: Path, quick: bool) -> bool:
    """Ask one part; whatever it raises is a row that is wrong, and what came before it is kept."""
    from benchmarks.machine import describe

    start, rows = time.perf_counter(), []
    try:
        for row in PARTS[part](quick):
            rows.append(row)
            if not row["right"] or part == "speed":
                print(part, row, flush=True)
            _write(out, part, describe(), rows, start)
    except Exception as error:  # noqa: BLE001 - a part that fails must not take the others' results with it
        traceback.print_exc()
        rows.append({"row": "the part itself", "error": repr(error), "right": False})
    _write(out, part, describe(), rows, start)
    wrong = sum(not row["right"] for row in rows)
    print(f"{part}: {len(rows)} rows, {wrong} wrong, {time.perf_counter() - start:.0f} s", flush=True)
    return not wrong and bool(rows)


def _write(out: Path, part: str, machine: dict[str, Any], rows: list[dict[str, Any]], start: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    took = round(time.perf_counter() - start, 1)
    text = json.dumps({"part": part, **machine, "seconds": took, "rows": rows}, indent=1, default=str)
    (out / f"gpu_check_{part}.json").write_text(text + "\n")


def main(given: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", action="append", choices=[*PARTS], help="repeatable; all without it")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="little of each part; runs without a GPU, too")
    arguments = parser.parse_args(given)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu_check: this Python lacks {', '.join(missing)}; install the package's dependencies")
        return 2
    import torch

    if not torch.cuda.is_available() and not arguments.quick:
        print("gpu_check: torch sees no GPU here; --quick tries the script itself on the CPU")
        return 2
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        print("gpu_check: there is a GPU and no Triton; it comes with torch's CUDA build")
        return 2
    right = [run(part, arguments.out, arguments.quick) for part in arguments.part or PARTS]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Generates from a model under a memory limit smaller than its weights, with the layers streamed.

    python -m benchmarks.offload FOLDER [--limit 0.75] [--kind cgroup|as|data] [--buffers 2] [--tokens 16]

A separate process sets the limit before it imports torch: `cgroup` limits resident memory and page cache
(memory.limit_in_bytes, or memory.max), `as` the address space including mapped files (RLIMIT_AS), `data`
private memory (RLIMIT_DATA). The file's pages are evicted from the system's cache before, so that they are
charged to the process. Another process without limit and without streaming provides the expected tokens.
Prints JSON: bytes of the weights and of the limit, peaks in bytes, seconds, tokens per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def main() -> None:
    """Run both processes and compare their tokens."""
    args = _arguments()
    if args.child:
        print("CHILD " + json.dumps(_generate(args)))
        return
    files = sorted(Path(args.folder).glob("*.safetensors"))
    weights = sum(file.stat().st_size for file in files)
    plain = None if args.without_reference else _child(args, "none", 0, [])
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    limit = int(weights * args.limit)
    with _cgroup(limit) if args.kind == "cgroup" else contextlib.nullcontext() as group:
        streamed = _child(args, args.kind, limit, [] if group is None else ["--group", str(group)])
        peak = None if group is None else _peak_of(group)
    row = {"weights": weights, "kind": args.kind, "limit": limit, "limit_of_weights": args.limit, **streamed}
    if peak is not None:
        row["cgroup_peak"] = peak
    if plain is not None:
        row |= {"parity": plain["tokens"] == streamed["tokens"], "unlimited_rss": plain["peak_rss"]}
        row["unlimited_tokens_per_second"] = plain["tokens_per_second"]
    print(json.dumps(row, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--limit", type=float, default=0.75, help="of the weights' bytes")
    parser.add_argument("--kind", choices=("cgroup", "as", "data", "none"), default="cgroup")
    parser.add_argument("--device", choices=("cpu", "nvme"), default="cpu")
    parser.add_argument("--nvme-path", default=None)
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quant", default=None)
    parser.add_argument("--hollow", action="store_true", help="a model on the meta device and checkpoint=")
    parser.add_argument("--without-reference", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--group", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _child(args: argparse.Namespace, kind: str, limit: int, more: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.offload", args.folder, "--child", "--kind", kind, *more]
    command += ["--bytes", str(limit), "--buffers", str(args.buffers), "--tokens", str(args.tokens)]
    command += ["--dtype", args.dtype, "--device", args.device]
    command += ["--quant", args.quant] if args.quant else []
    command += ["--nvme-path", args.nvme_path] if args.nvme_path else []
    command += ["--hollow"] if args.hollow else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("CHILD "):
            found: dict[str, Any] = json.loads(line.removeprefix("CHILD "))
            return found
    raise SystemExit(f"the process with {kind}={limit} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def _generate(args: argparse.Namespace) -> dict[str, Any]:
    """Set the limit, load the model and generate, in a child process."""
    if args.group is not None:
        Path(args.group, "cgroup.procs").write_text(str(os.getpid()))
    if args.kind in ("as", "data"):
        which = resource.RLIMIT_AS if args.kind == "as" else resource.RLIMIT_DATA
        resource.setrlimit(which, (args.bytes, args.bytes))
    import torch

    import slipstream
    from slipstream.compat import OnDevice

    imported = _status("VmHWM")
    options: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "replace_with_kernel_inject": True}
    if args.quant:
        options["quant"] = args.quant
    if args.kind != "none":
        wish = {"device": args.device, "buffer_count": args.buffers}
        if args.device == "nvme":
            wish["nvme_path"] = args.nvme_path
        options["zero"] = {"stage": 3, "offload_param": wish}
    begin = time.perf_counter()
    if args.hollow:
        import transformers

        config = transformers.AutoConfig.from_pretrained(args.folder)
        with OnDevice(dtype=options["dtype"], device="meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        engine = slipstream.init_inference(model, checkpoint=args.folder, **options)
    else:
        engine = slipstream.init_inference(args.folder, **options)
    built = time.perf_counter()
    ids = torch.arange(3, 11)[None]
    engine.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    first = time.perf_counter()
    tokens = engine.generate(ids, max_new_tokens=args.tokens, min_new_tokens=args.tokens, pad_token_id=0)
    seconds = time.perf_counter() - first
    return {
        "tokens": tokens[0].tolist(),
        "build_s": round(built - begin, 2),
        "tokens_per_second": round(args.tokens / seconds, 2),
        "imports_rss": imported,
        "peak_rss": _status("VmHWM"),
        "peak_addresses": _status("VmPeak"),
        "notes": [note for note in engine.report().notes if "streamed" in note],
    }


def _status(name: str) -> int:
    """Return a memory figure from the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


@contextlib.contextmanager
def _cgroup(limit: int) -> Iterator[Path]:
    """Create a control group (v1 or v2) with a memory limit, and remove it afterwards."""
    name = f"slipstream-{uuid.uuid4().hex[:8]}"
    second = (_V2 / "cgroup.controllers").is_file()
    group = (_V2 if second else _V1) / name
    group.mkdir()
    try:
        (group / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def _peak_of(group: Path) -> int:
    names = ("memory.max_usage_in_bytes", "memory.peak")
    found = next(group / name for name in names if (group / name).is_file())
    return int(found.read_text())


if __name__ == "__main__":
    main()

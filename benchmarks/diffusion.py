"""One denoising step of Stable Diffusion 1.5's UNet at its real shapes, with eager PyTorch and torch.compile.

860 million random parameters, two latents of 4 x 64 x 64 (a prompt and its negative), 77 tokens of 768. The
measurements of the rows alternate in one process over one set of weights. torch.compile takes minutes to
compile, so it is only measured with `--only compile`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import slipstream
from benchmarks.request import Request
from slipstream.engine.pipeline import shared_copy

__all__ = ["PARTS", "measure"]

PARTS = ("compile",)
"""The values that `--only` accepts: here they add a row, and leave out none."""

_REAL = {"block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": 8, "cross_attention_dim": 768}
_QUICK = {"block_out_channels": (32, 64, 64, 64), "attention_head_dim": 4, "cross_attention_dim": 32}
_REPEAT = 3


def measure(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each way to run the step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _random(_QUICK if request.quick else _REAL).to(device)
    side = 16 if request.quick else 64
    width = model.config.cross_attention_dim  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    sample, prompt = (torch.randn(2, *s, generator=generator) for s in ((4, side, side), (77, width)))
    inputs: dict[str, Tensor] = {
        "sample": sample.to(device, torch.bfloat16),
        "encoder_hidden_states": prompt.to(device, torch.bfloat16),
        "timestep": torch.tensor([500, 500], device=device),
    }
    engine = slipstream.init_inference(
        shared_copy(model), dtype=torch.bfloat16, replace_with_kernel_inject=True
    )
    ways: dict[str, Callable[..., Any]] = {"diffusers eager": model, "slipstream": engine}
    if device == "cuda":
        ways["slipstream, graph"] = slipstream.init_inference(
            shared_copy(model), dtype=torch.bfloat16, replace_with_kernel_inject=True, enable_cuda_graph=True
        )
    if "compile" in request.only:
        ways["diffusers torch.compile"] = torch.compile(model)
    rounds = 1 if request.quick else request.rounds or _REPEAT
    answers, times = _in_turns(ways, inputs, rounds)
    exact = answers["diffusers eager"].float()
    size = float(exact.std())
    eager = statistics.median(times["diffusers eager"])
    rows = [
        {
            "row": name,
            "step_s": statistics.median(taken),
            "step_s_range": [min(taken), max(taken)],
            "times_eager": eager / statistics.median(taken),
            "off": float((answers[name].float() - exact).abs().max()) / size,
            "repeat": rounds,
        }
        for name, taken in times.items()
    ]
    yield "diffusion", {"shape": "SD 1.5 UNet, 2 x 4 x 64 x 64, 77 x 768, bfloat16", "rows": rows}


def _in_turns(
    ways: dict[str, Callable[..., Any]], inputs: dict[str, Tensor], rounds: int
) -> tuple[dict[str, Tensor], dict[str, list[float]]]:
    answers: dict[str, Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            with torch.no_grad():
                answers[name] = run(**inputs)[0]
            if inputs["sample"].is_cuda:
                torch.cuda.synchronize()
            if turn:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return answers, times


def _random(shape: dict[str, Any]) -> nn.Module:
    """Make the UNet in bfloat16; its matrices repeat one block of random numbers, which saves a minute."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(sample_size=64, **shape).to(torch.bfloat16)
    model.to_empty(device="cpu")
    block = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(float(name.endswith("weight")))
                continue
            for part in parameter.view(-1).split(len(block)):
                part.copy_(block[: len(part)] * parameter[0].numel() ** -0.5)
    unet: nn.Module = model.eval()
    return unet

"""Applies options of the configuration to the engine road: the dtype of its cache, captured steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.config import InferenceConfig
from slipstream.devices import Device
from slipstream.engine.generation.encoder_decoder import TakesEncoderStates, cross_attends
from slipstream.engine.generation.graph import LADDER, Graphs
from slipstream.engine.generation.prompt_graph import MOST_TOKENS
from slipstream.engine.generation.runner import Runner
from slipstream.model.block.block import Block
from slipstream.model.block.paged_cache import bytes_per_token
from slipstream.ops.bind import Bound
from slipstream.parallel import Mesh

__all__ = ["prepare_road", "together"]


def prepare_road(runner: Runner | None, device: Device, config: InferenceConfig, mesh: Mesh) -> list[str]:
    """Apply the configuration's options to the engine road.

    Args:
        runner: Runs the engine road, None where transformers' own loops run; modified.
        device: The device that it runs on.
        config: The configuration.
        mesh: The ranks that share the model.

    Returns:
        Notes for the report: one on each option that is set, and one if the model's own forward runs prompts.
    """
    notes = []
    if runner is not None and runner.takes_over:
        notes.append("generate runs prompts by the model's own forward, and decode steps as a packed batch")
    if config.kv_cache_dtype is not None:
        notes.append(_keep_in_int8(runner, config.kv_cache_dtype))
    if config.enable_cuda_graph:
        notes.append(_capture(runner, device, config.max_out_tokens, mesh))
    return notes


def _keep_in_int8(runner: Runner | None, wish: str) -> str:
    if runner is None:
        note = f"kv_cache_dtype={wish!r} has no effect: generate runs transformers' own loop and cache"
        warnings.warn(note, UserWarning, stacklevel=6)
        return note
    runner.cache_dtype = torch.int8
    specs = [block.spec for block in runner.blocks]
    own, plain = (bytes_per_token(specs, dtype) for dtype in (torch.int8, runner.dtype))
    dense = str(runner.dtype).removeprefix("torch.")
    return f"generate keeps keys and values in int8: {own} bytes per token, {plain} in {dense}"


def _capture(runner: Runner | None, device: Device, tokens: int, mesh: Mesh) -> str:
    reason = device.no_graph()
    if mesh.ep.size > 1:
        reason = "ranks that share experts may run different calls, whose steps cannot be captured in advance"
    if runner is None and not reason:
        return "forwards without a cache are captured as graphs, one for each shape of the inputs"
    if runner is not None and runner.takes_over:
        reason = "the model's own forward runs the prompt, and positions may not continue from its length"
    if runner is not None and cross_attends(runner):
        reason = "the decoder attends to encoder states, whose address changes in every generation"
    if runner is not None and not reason:
        runner.whole = graphs = Graphs(runner, device, tokens=tokens)
        runner.new_cache = graphs.new_cache
        graphs.prove()
        reason = graphs.reason
    if reason:
        return f"enable_cuda_graph has no effect: {reason}"
    return (
        f"decode steps are captured as graphs of up to {LADDER[-1]} rows, and single prompts of up to "
        f"{MOST_TOKENS} tokens when a size is repeated"
    )


def together(
    blocks: Mapping[str, Block], runner: Runner | None, stack: Bound, encoder: Any
) -> dict[str, str]:
    """Map each layer's name to what runs it in one call with others: in generation, or without a cache."""
    names = {} if runner is None else dict.fromkeys(runner.names if runner.takes_over else blocks, stack.name)
    if runner is not None and isinstance(runner.whole, TakesEncoderStates):
        names |= dict.fromkeys(runner.names, runner.whole.name)
    return names | {name: encoder.name for name, one in blocks.items() if encoder and encoder.has(one)}

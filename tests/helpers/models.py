"""Tiny random models with peaked logits, their engines, and counters of the roads that a call takes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.engine.generation.runner import Session
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.kernels.cpu.text import NativeText
from slipstream.model.block.block import Block
from slipstream.model.fused import inject as injection

VOCABULARY = 100

_COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GPT2 = {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_BERT = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 6}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_LLAMA, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**_COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **_COMMON,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "max_position_embeddings": 128,
        },
    ),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            **_COMMON,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 2.0, "kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 48,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {**_COMMON, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
    ),
}
"""Model class, config class and options, by short name."""


def make(
    kind: str, model_class: str | None = None, *, seed: int = 0, gain: float = 2.0, **options: Any
) -> Any:
    """Make a random model in eval mode; its matrices have `gain` times the variance-preserving size."""
    name, config, defaults = KINDS[kind]
    torch.manual_seed(seed)
    model = getattr(transformers, model_class or name)(
        getattr(transformers, config)(**{**defaults, **options})
    )
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            if parameter.dim() > 1:
                parameter.normal_(0.0, gain / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def inject(model: nn.Module, **settings: Any) -> slipstream.InferenceEngine:
    """Build an engine from a copy of the model, in float32 with fused layers unless `settings` differ."""
    settings = {"dtype": torch.float32, "replace_with_kernel_inject": True, **settings}
    return slipstream.init_inference(copy.deepcopy(model), **settings)


@dataclass
class Pair:
    """An unmodified transformers model, and an engine built from a copy of it."""

    original: Any
    engine: Any


def pair(
    kind: str, model_class: str | None = None, *, settings: dict[str, Any] | None = None, **options: Any
) -> Pair:
    """Make an original and its engine, in which every layer is fused."""
    original = make(kind, model_class, **options)
    engine = inject(original, **(settings or {}))
    assert engine.report().level == "block", str(engine.report())
    return Pair(original, engine)


def prompt(rows: int = 3, length: int = 9, *, seed: int = 7, vocabulary: int = VOCABULARY) -> Tensor:
    """Return random token ids without special tokens."""
    return torch.randint(5, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    """Return a batch whose rows are padded on the left by 0, 2, 4 ... tokens, and its mask."""
    ids, mask = prompt(rows, length), torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return ids.masked_fill(mask == 0, 0), mask


@dataclass
class Roads:
    """How often the model ran on each road.

    Attributes:
        runner: Number of steps on the engine road.
        module: Number of forwards on the compatible road.
    """

    runner: int = 0
    module: int = 0

    @property
    def taken(self) -> str:
        """ "engine", "compatible", "both" or "none"."""
        names = {(True, False): "engine", (False, True): "compatible", (True, True): "both"}
        return names.get((self.runner > 0, self.module > 0), "none")


@contextmanager
def roads(engine: Any) -> Iterator[Roads]:
    """Count how often an engine takes each road within the context."""
    counts = Roads()
    logits, best = Session.logits, Session.best

    def counted_logits(self: Session, *args: Any) -> Tensor:
        counts.runner += self._runner is engine._built.runner
        return logits(self, *args)

    def counted_best(self: Session, *args: Any) -> Tensor:
        tokens = best(self, *args)
        counts.runner += tokens.shape[1] * (self._runner is engine._built.runner)
        return tokens

    def counted(chosen: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(self: Session, *args: Any) -> Tensor:
            before = counts.runner
            tokens = chosen(self, *args)
            if counts.runner == before:  # otherwise it called `logits`, which counted the steps
                counts.runner += tokens.shape[1] * (self._runner is engine._built.runner)
            return tokens

        return run

    model_class = type(engine.module)
    forward = model_class.forward

    # A patch and not a hook, which would count as a user's; transformers reads the signature.
    @functools.wraps(forward)
    def counted_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counts.module += self is engine.module
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "logits", counted_logits)
        patch.setattr(Session, "best", counted_best)
        patch.setattr(Session, "drawn", counted(Session.drawn))
        patch.setattr(Session, "penalised", counted(Session.penalised))
        patch.setattr(model_class, "forward", counted_forward)
        yield counts


def same_tokens(models: Pair, road: str, **options: Any) -> Tensor:
    """Generate with a model and its engine, which takes the given road; return the tokens, equal in both."""
    answers = []
    for model in (models.original, models.engine):
        torch.manual_seed(3)
        with roads(models.engine) as counts:
            answers.append(model.generate(**options))
    # The road of an encoder-decoder runs a copy of the runner, which has the encoder's states.
    assert (counts.module == 0) == (road == "engine")
    assert torch.equal(*answers)
    return answers[0]  # type: ignore[no-any-return]


@dataclass
class Ran:
    """The blocks that ran in forwards, in order, and the native calls that ran several of them.

    Attributes:
        blocks: All blocks, whether they ran one by one or together.
        calls: Number of blocks in each native call.
    """

    blocks: list[Block]
    calls: list[int]


@contextmanager
def blocks_that_run() -> Iterator[Ran]:
    """Record the blocks that forwards run within the context."""
    ran = Ran([], [])
    one, followed = Block.__call__, Block.follow

    def run_one(self: Block, *args: Any, **kwargs: Any) -> Tensor:
        ran.blocks.append(self)
        return one(self, *args, **kwargs)

    def run_course(self: Block, course: Any) -> Any:
        ran.blocks.append(self)
        return followed(self, course)

    def counting(several: Any) -> Any:
        def run_several(self: Any, blocks: Any, *args: Any) -> Any:
            out = several(self, blocks, *args)
            if out is not None:
                ran.blocks += blocks
                ran.calls.append(len(blocks))
            return out

        return run_several

    begin = injection.begin

    def begun(begins: Any, block: Block, *args: Any) -> Tensor | None:
        out = begin(begins, block, *args)
        ran.blocks += [] if out is None else [block]
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "__call__", run_one)
        patch.setattr(Block, "follow", run_course)
        patch.setattr(injection, "begin", begun)
        for kind, name in ((NativeStack, "encode"), (NativeStack, "extend"), (NativeText, "__call__")):
            patch.setattr(kind, name, counting(getattr(kind, name)))
        yield ran


def close(expected: Any, got: Any, *, atol: float = 1e-4, mask: Tensor | None = None) -> None:
    """Assert that two nested outputs have equal structure and close values, at the positions of `mask`."""
    assert type(expected) is type(got), f"{type(got).__name__} in place of {type(expected).__name__}"
    if isinstance(expected, Tensor):
        assert expected.shape == got.shape and expected.dtype == got.dtype
        if mask is not None and expected.shape[:2] == mask.shape:
            expected, got = expected[mask.bool()], got[mask.bool()]
        torch.testing.assert_close(got, expected, atol=atol, rtol=1e-4)
    elif isinstance(expected, dict):
        assert list(expected) == list(got)
        for key in expected:
            close(expected[key], got[key], atol=atol, mask=mask)
    elif isinstance(expected, tuple | list):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            close(one, other, atol=atol, mask=mask)
    elif isinstance(expected, transformers.Cache):
        assert expected.get_seq_length() == got.get_seq_length()
        for one, other in zip(expected.layers, got.layers, strict=True):
            close((one.keys, one.values), (other.keys, other.values), atol=atol)

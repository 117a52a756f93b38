"""A loaded model with its tokenizer: from a prompt to an answer that is streamed.

Shapes: S prompt, L prompt and answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import slipstream
from slipstream import ConfigError, InferenceEngine, TokenLimitError, UnsupportedError, WeightError
from slipstream.cli.options import Loading, Sampling
from slipstream.cli.terminal import busy, quietly, set_up
from slipstream.engine.open import open_model, resolve_place
from slipstream.errors import one_line
from slipstream.weights.packed_folder import is_packed_folder

__all__ = [
    "Answer",
    "Message",
    "Session",
    "check_original",
    "context_length",
    "load_original",
    "open_engine",
    "open_session",
]

Message = dict[str, str]
"""A message of a conversation: `role` and `content`."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class Answer:
    """What the model generated.

    Attributes:
        ids: `(L,)` int64, the prompt included.
        text: The answer only, without special tokens.
        tokens: Number of new tokens.
        seconds: Seconds from the call to the last token.
    """

    ids: Tensor
    text: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Session:
    """An engine and the tokenizer of its checkpoint."""

    engine: InferenceEngine
    tokenizer: Any

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def encode(self, messages: Sequence[Message]) -> Tensor:
        """Return a conversation's token ids, `(1, S)`; without a template, those of the last message only."""
        if not self.has_template:
            ids: Tensor = self.tokenizer(messages[-1]["content"], return_tensors="pt").input_ids
            return ids
        made: dict[str, Tensor] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return made["input_ids"]

    def answer(self, ids: Tensor, sampling: Sampling, show: Callable[[str], None]) -> Answer:
        """Generate an answer; `show` is called with each piece of text as soon as it is final.

        Args:
            ids: `(1, S)` int64.
            sampling: How tokens are chosen.
            show: Receives the pieces of `Answer.text` in order.

        Raises:
            TokenLimitError: Prompt and answer exceed the model's context length.
        """
        most = self.engine.inference_config.max_out_tokens
        options = sampling.to_options(room := most - ids.shape[1])
        if options["max_new_tokens"] > room:
            raise TokenLimitError(
                f"the prompt has {ids.shape[1]} tokens, and the model supports {most} including the answer; "
                + (f"give --max-new-tokens (-n) {room} at most" if room > 0 else "shorten it")
            )
        torch.manual_seed(sampling.seed)
        start = time.perf_counter()
        out = self.engine.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=_streamer(self.tokenizer, show), **options
        )[0]
        seconds = time.perf_counter() - start
        new = out[ids.shape[1] :]
        return Answer(out, self.tokenizer.decode(new, skip_special_tokens=True), len(new), seconds)


def _streamer(tokenizer: Any, show: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Printer(TextStreamer):  # type: ignore[misc, unused-ignore]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def open_session(loading: Loading) -> Session:
    """Load a model with its tokenizer, and build an engine for it.

    Raises:
        SlipstreamError: Any subclass.
    """
    engine, folder = open_engine(loading)
    return Session(engine, _tokenizer(folder))


def open_engine(loading: Loading) -> tuple[InferenceEngine, str]:
    """Load a model and build an engine for it; also return the folder (or hub id) that it came from.

    Raises:
        SlipstreamError: Any subclass.
    """
    set_up(loading.verbose)
    with busy("finding the model; a GGUF file is converted once"), quietly(loading.verbose):
        folder = resolve_place(loading.model)
    if is_packed_folder(Path(folder)):
        return _open_packed(folder, loading), folder
    with busy("loading the model"):
        model = open_model(folder, loading.dtype.dtype)
    if not hasattr(model, "generate"):
        raise UnsupportedError(
            f"{type(model).__name__} of {loading.model} generates no text; use a causal language model"
        )
    with busy("building the engine"):
        engine = slipstream.init_inference(
            model,
            dtype=loading.dtype.dtype,
            replace_with_kernel_inject=loading.inject,
            max_out_tokens=context_length(model.config),
        )
    return engine, folder


def _open_packed(folder: str, loading: Loading) -> InferenceEngine:
    """Build an engine for a folder of packed weights, which are memory-mapped."""
    from transformers import AutoConfig

    try:
        length = context_length(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError) as error:
        raise WeightError(f"{folder} has no config that can be read: {one_line(error)}") from error
    with busy("opening the packed weights"):
        return slipstream.init_inference(
            folder,
            dtype=loading.dtype.dtype,
            replace_with_kernel_inject=loading.inject,
            max_out_tokens=length,
        )


def check_original(loading: Loading) -> None:
    """Refuse, before anything is loaded, a comparison with an original that is not available.

    Raises:
        ConfigError: The model's folder holds packed weights.
    """
    if is_packed_folder(Path(loading.model).expanduser()):
        raise ConfigError(
            f"--compare runs the original too, but {loading.model} holds only packed weights; leave it out, "
            "or name the original"
        )


def load_original(loading: Loading, device: torch.device) -> Any:
    """Load the model as transformers runs it, in eval mode.

    Raises:
        SlipstreamError: Any subclass.
    """
    with busy("loading the original"):
        return open_model(resolve_place(loading.model), loading.dtype.dtype).to(device).eval()


def context_length(config: Any) -> int:
    """Return a model's context length by its config: the maximum of prompt and answer together."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(known) if known else 1024


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = one_line(error)
        if Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in _TOKENIZERS):
            why = f"it has none of {', '.join(_TOKENIZERS)}; copy the original's tokenizer files there"
        raise WeightError(f"no tokenizer could be loaded from {folder!r}: {why}") from error

"""A checkpoint of a few kilobytes with a tokenizer, and a way to run commands on it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner, Result

from slipstream.cli import app

WORDS = [
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "user",
    "system",
    "assistant",
    *(f"w{i}" for i in range(90)),
    "sky",
    "blue",
]
TEMPLATE = "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}<s> assistant"

Run = Callable[..., Result]


def write_checkpoint(folder: Path, *, template: str | None) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_(std=2.0)  # clear preferences: no two tokens are nearly as likely
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("chatty"), template=TEMPLATE)


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plain"), template=None)


@pytest.fixture
def run() -> Iterator[Run]:
    """Run a command as in a terminal; what it hushes is as before afterwards."""
    verbosity, level = transformers_logging.get_verbosity(), logging.getLogger("slipstream").level

    def call(*arguments: object, stdin: str | bytes | None = None) -> Result:
        with warnings.catch_warnings():
            return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    yield call
    transformers_logging.set_verbosity(verbosity)
    transformers_logging.enable_progress_bar()
    logging.getLogger("slipstream").setLevel(level)
    logging.getLogger("huggingface_hub").setLevel(logging.NOTSET)

"""A tiny tokenizer of single characters, made here so that nothing is downloaded."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.helpers.models import VOCABULARY

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
LETTERS = ["Ġ", *(chr(code) for code in range(33, 127))]


def letter_tokenizer(*, frame: bool = False) -> PreTrainedTokenizerFast:
    """Make a tokenizer of printable characters; with `frame`, it puts `<s>` and `</s>` around every text."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    assert len(vocabulary) == VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if frame:
        ends = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", ends
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        padding_side="right" if frame else "left",
        model_max_length=64,
    )

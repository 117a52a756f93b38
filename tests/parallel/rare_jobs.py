"""Ranks that share a model which takes more than tokens, and has linears that only this more comes to."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.model.selfcheck import inputs
from tests.architectures.tiny import tiny_model
from tests.families.sweep import NEW_TOKENS, VARIANTS, batch, label, peaked_model
from tests.parallel.jobs import answer_of, from_first, packs, split
from tests.parallel.share_jobs import share


def rare(name: str, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Answers to tokens alone, and to tokens and more, beside one process; and the rank's share.

    Args:
        name: A variant of a family, or a type of model that no family knows.
        size: Ranks.
        settings: Of the engine.
    """
    variant = next((variant for variant in VARIANTS if label(variant) == name), None)
    original: Any = tiny_model(name, "masked").eval() if variant is None else peaked_model(variant[1])
    engine = split(copy.deepcopy(original), size, **settings)
    reference = original
    if packs(settings):
        alone = {"dtype": torch.float32, **settings}
        reference = slipstream.init_inference(copy.deepcopy(original), **alone)
    pair = bool(original.config.is_encoder_decoder)
    words, _, mask = batch(64)
    tokens = {"input_ids": words, "attention_mask": mask}
    answer = {"decoder_input_ids": words[:, :7]} if pair else {}
    rows = torch.ones(3, 7).bool() if pair else mask.bool()
    errors, greedy, answers = [], [], []
    for more in ({}, *_more(name, words)):
        given = {**tokens, **more}
        with torch.no_grad():
            expected = from_first(size, lambda given=given: answer_of(reference(**given, **answer)))
            error = (expected - answer_of(engine(**given, **answer))).abs()[rows]
        errors.append(float(error.max()) / max(float(expected.abs().max()), 1.0))
        answers.append(expected[rows])
        if pair:
            options = {**given, "max_new_tokens": NEW_TOKENS, "do_sample": False}
            chosen = from_first(size, lambda options=options: reference.generate(**options))
            greedy.append(torch.equal(chosen, engine.generate(**options)))
    return {
        "errors": errors,
        "greedy": greedy,
        "heard": min(float((other - answers[0]).abs().max()) for other in answers[1:]),
        "share": share(engine, original, size, settings),
        "whole": [row.name for row in engine.report().split if row.how == "whole on every rank"],
        "text": str(engine.report()),
    }


def unheard_of(name: str, size: int) -> dict[str, Any]:
    """The same where nothing is known of what a model takes beside its tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_BESIDE", {})
        return rare(name, size, {})


def by_length(size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """BigBird, which puts another attention into its layers for short prompts, beside one process."""
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        block_size=4,
    )  # fmt: skip
    original: Any = transformers.BigBirdForMaskedLM(config).eval()
    engine = split(copy.deepcopy(original), size, **settings)
    errors = []
    for length in (48, 12):  # a model that read a short prompt stays as it is
        ids = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(1))
        answers = []
        for model in (original, engine):
            np.random.seed(0)  # which blocks are seen is drawn
            with torch.no_grad():
                answers.append(model(ids).logits)
        errors.append(float((answers[0] - answers[1]).abs().max()))
    return {"errors": errors, "share": share(engine, original, size, settings)}


def _more(name: str, words: Tensor) -> list[dict[str, Tensor]]:
    """Tokens that see all others, one in each row or more; or entities, of one word or of two."""
    if name == "luke":
        spans = torch.tensor([[[1, -1], [2, 3], [5, 6]]]).expand(len(words), -1, -1)
        entities = torch.arange(1, 4).expand(len(words), -1)
        return [{"entity_ids": entities, "entity_position_ids": spans}]
    first = torch.zeros_like(words)
    first[:, 0] = 1
    several = first.clone()
    several[1, 4:6] = 1
    return [{"global_attention_mask": first}, {"global_attention_mask": several}]


def gradient(size: int, settings: dict[str, Any]) -> float:
    """Largest error of the gradient of the inputs."""
    original = peaked_model(next(variant[1] for variant in VARIANTS if label(variant) == "llama"))
    engine = split(copy.deepcopy(original), size, **settings)
    ids = torch.tensor([[5, 6, 7, 8]])
    found = []
    for model in (original, engine.module):
        states = original.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=states).logits[..., 3].sum().backward()
        found.append(states.grad)
    return float((found[0] - found[1]).abs().max())


class _Encoder(nn.TransformerEncoderLayer):
    """Torch's own layer, which reads the tensors of its linears where it can run as one kernel."""

    def __init__(self) -> None:
        super().__init__(64, 4, 256, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class _Stack(nn.Module):
    """A model that nothing is known of, so that its layers cannot be tried out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Encoder() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def read_elsewhere(size: int) -> float:
    """Error of layers that read what their linears hold, in a model that cannot be run on random input."""
    torch.manual_seed(0)
    original = _Stack().eval()
    engine = split(copy.deepcopy(original), size)
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        return float((original(x) - engine(x)).abs().max())

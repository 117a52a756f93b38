"""Code of the caller's that takes part in `generate`: limits, criteria, processors and streamers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LogitsProcessor, MaxLengthCriteria, StoppingCriteria

import slipstream
from tests.helpers.models import Pair, close, inject, pair, prompt, roads

DRAWN = {"do_sample": True, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def llama() -> Pair:
    return pair("llama")


def agree(models: Pair, road: str = "engine", **options: Any) -> Tensor:
    torch.manual_seed(0)
    expected: Tensor = models.original.generate(**copy.deepcopy(options))  # whose prompt may be rewritten
    torch.manual_seed(0)
    with roads(models.engine) as counts:
        got = models.engine.generate(**options)
    assert counts.taken == road
    assert torch.equal(got, expected)
    return got


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["best", "drawn"])
@pytest.mark.parametrize("asked", [2, 30, None])
@pytest.mark.parametrize("most", [4, 12, 40])
def test_a_caller_s_length_takes_the_place_of_the_config_s(
    llama: Pair, most: int, asked: int | None, options: dict[str, Any]
) -> None:
    limits = [MaxLengthCriteria(most), MaxLengthCriteria(50)]
    length = {} if asked is None else {"max_new_tokens": asked}
    got = agree(llama, input_ids=prompt(2), stopping_criteria=limits, pad_token_id=0, **length, **options)
    assert got.shape[1] <= max(most, 10)


class Rewritten(StoppingCriteria):
    """Puts a token in the place of each last one."""

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Nobody is done."""
        ids[:, -1] = 9
        return torch.zeros(len(ids), dtype=torch.bool)


class RewrittenBefore(LogitsProcessor):
    """The same, before the next one is chosen."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        ids[:, -1] = 11
        return scores


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["best", "drawn"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "code", [{"stopping_criteria": [Rewritten()]}, {"logits_processor": [RewrittenBefore()]}]
)
def test_tokens_that_a_caller_s_code_rewrites_count(
    llama: Pair, code: dict[str, Any], rows: int, options: dict[str, Any]
) -> None:
    got = agree(llama, input_ids=prompt(rows), max_new_tokens=6, pad_token_id=0, **code, **options)
    assert (got[:, 9:-1] == (9 if "stopping_criteria" in code else 11)).all()


class Heard:
    """A streamer."""

    def put(self, value: Tensor) -> None:
        """Forget it."""

    def end(self) -> None:
        """Nothing is left to do."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2, "streamer": Heard()}, "cannot be used with beam search"),
        ({"bad_words_ids": [[100_000]]}, "vocabulary size"),
    ],
)
def test_what_transformers_refuses_is_refused(llama: Pair, options: dict[str, Any], said: str) -> None:
    for model in (llama.original, llama.engine):
        with pytest.raises(ValueError, match=said):
            model.generate(prompt(1), max_new_tokens=3, **options)


class Starred(transformers.LlamaForCausalLM):
    """Has a `generate` whose arguments have no names."""

    places = 0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hand them on, as they came."""
        self.places = len(args)
        return super().generate(*args, **kwargs)


class Counted(Starred):
    """The same, with names for some of them."""

    def generate(self, inputs: Any, *args: Any, extra: int = 0, **kwargs: Any) -> Any:
        """Hand them on."""
        return super().generate(inputs, *args, **{"max_new_tokens": extra or None, **kwargs})


@pytest.mark.parametrize("injected", [True, False])
@pytest.mark.parametrize("kind", [Starred, Counted])
def test_a_generate_of_the_models_own_may_take_any_arguments_by_position(
    llama: Pair, kind: type[Starred], injected: bool
) -> None:
    original = kind(llama.original.config).eval()
    original.load_state_dict(llama.original.state_dict())
    engine = inject(original, replace_with_kernel_inject=injected)
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    extra = {"extra": 4} if kind is Counted else {}
    for args in ((prompt(),), (prompt(), config)):
        expected = original.generate(*args, **extra)
        assert torch.equal(engine.generate(*args, **extra), expected)
        assert engine.module.places == original.places == len(args)
    assert torch.equal(engine.generate(inputs=prompt(), generation_config=config, **extra), expected)
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        engine.generate(prompt(), inputs=prompt())
    with pytest.raises(TypeError, match="positional arguments, and 20 were given"):
        engine.generate(*[prompt()] * 20)


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": 2.5}, {"max_length": 11.5}, {"max_new_tokens": 3.0}], ids=str
)
def test_a_number_of_tokens_with_a_fraction_is_taken_as_transformers_takes_it(
    llama: Pair, limit: dict[str, float]
) -> None:
    whole = all(number.is_integer() for number in limit.values())
    got = agree(llama, "engine" if whole else "compatible", input_ids=prompt(2), pad_token_id=0, **limit)
    assert got.shape[1] == 12


class _Summing(nn.Module):
    """Keeps its state in a container of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)

    def forward(self, ids: Tensor, state: Any) -> Tensor:
        hidden = self.table(ids).sum(1)
        entries = state[0] if isinstance(state, tuple) else state
        if isinstance(entries, dict):
            hidden = entries["sum"] = hidden + entries.get("sum", 0)
        else:
            entries.append(hidden)
            hidden = torch.stack(list(entries)).sum(0)
        return self.head(hidden)


@pytest.mark.parametrize("make", [dict, list, lambda: ([],)], ids=["dictionary", "list", "list in a tuple"])
def test_a_container_that_a_model_writes_into_is_the_callers(make: Callable[[], Any]) -> None:
    model = _Summing().eval()
    engine = slipstream.init_inference(copy.deepcopy(model), dtype=torch.float32)
    ids, own, other = torch.arange(12).reshape(2, 6), make(), make()
    with torch.no_grad():
        for part in ids.split(2, dim=1):
            close(model(part, own), engine(part, other))
    assert len(other) == len(own) and len(other) > 0


def test_a_shallow_copy_runs_the_same_model(llama: Pair) -> None:
    twin = copy.copy(llama.engine)
    assert twin.module is llama.engine.module and type(twin) is type(llama.engine)
    close(llama.engine(prompt()).logits, twin(prompt()).logits)

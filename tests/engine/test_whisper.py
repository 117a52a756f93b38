"""Whisper's own `generate`, which calls transformers' for each segment: the tokens are the original's."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.families import FAMILIES
from tests.engine.test_listening import pair as tiny_pair
from tests.engine.test_listening import steps, written
from tests.families.sweep import peaked_model
from tests.helpers.models import Pair, inject

_ROWS = 3


@functools.cache
def pair() -> Pair:
    """A tiny Whisper of several languages whose last sixty tokens are timestamps."""
    tiny = FAMILIES["whisper"].tiny[0]
    original: Any = peaked_model(replace(tiny, options={**tiny.options, "vocab_size": 260}))
    settings = {
        "no_timestamps_token_id": 199,
        "lang_to_id": {"<|en|>": 150, "<|de|>": 151},
        "task_to_id": {"transcribe": 160, "translate": 161},
        "is_multilingual": True,
        "decoder_start_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 3,
        "suppress_tokens": [5, 6, 7],
        "begin_suppress_tokens": [8, 3],
        "max_initial_timestamp_index": 5,
        "prev_sot_token_id": 170,
        "alignment_heads": [[0, 1], [1, 2]],
        "max_length": None,
    }
    for name, value in settings.items():
        setattr(original.generation_config, name, value)
    return Pair(original, inject(original))


def _heard(*, long: bool) -> dict[str, Tensor]:
    """A segment, or two and a half of them, of which one row's end is silence."""
    generator = torch.Generator().manual_seed(0)
    if not long:
        return {"input_features": torch.randn(_ROWS, 8, 40, generator=generator)}
    mask = torch.ones(_ROWS, 100, dtype=torch.long)
    mask[1, 70:] = 0
    return {"input_features": torch.randn(_ROWS, 8, 100, generator=generator), "attention_mask": mask}


def _tokens(model: Any, options: dict[str, Any], *, long: bool) -> Tensor:
    torch.manual_seed(3)
    more = {"return_timestamps": True} if long else {}
    found = model.generate(**_heard(long=long), **{"max_new_tokens": 9, **copy.deepcopy(options), **more})
    tokens: Tensor = found if isinstance(found, Tensor) else found["sequences"]
    return tokens


_SERVED: dict[str, dict[str, Any]] = {
    "a language to find": {},
    "a language and a task": {"language": "en", "task": "translate"},
    "timestamps": {"return_timestamps": True, "language": "de"},
    "segments": {"return_timestamps": True, "return_segments": True, "language": "en"},
    "a prompt": {"prompt_ids": torch.tensor([170, 20, 21]), "language": "en"},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 3, "language": "en"},
    "several of each": {"do_sample": True, "num_return_sequences": 2, "language": "en"},
}
_LEFT: dict[str, dict[str, Any]] = {
    "a record": {"return_dict_in_generate": True, "output_scores": True},
    "another temperature where it fails": {
        "temperature": (0.0, 0.4, 1.0),
        "logprob_threshold": -0.5,
        "compression_ratio_threshold": 1.1,
        "return_timestamps": True,
        "language": "en",
    },
}


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("case", _SERVED)
def test_the_road_hears_what_the_original_hears(case: str, long: bool) -> None:
    two = pair()
    assert two.engine.why_compatible() is None
    expected = _tokens(two.original, _SERVED[case], long=long)
    with steps() as taken:
        assert torch.equal(expected, _tokens(two.engine, _SERVED[case], long=long))
    assert taken


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("case", _LEFT)
def test_what_the_road_cannot_honour_runs_transformers_loop(case: str, long: bool) -> None:
    two = pair()
    expected = _tokens(two.original, _LEFT[case], long=long)
    with steps() as taken:
        assert torch.equal(expected, _tokens(two.engine, _LEFT[case], long=long))
    assert not taken


def test_encoder_outputs_of_the_users_own_are_heard() -> None:
    two = pair()
    with torch.no_grad():
        heard = two.original.get_encoder()(_heard(long=False)["input_features"])
    options = {"max_new_tokens": 5, "language": "en", "encoder_outputs": heard}
    expected, got = (model.generate(**copy.deepcopy(options)) for model in (two.original, two.engine))
    assert torch.equal(expected, got)


def test_more_tokens_than_there_are_positions_are_refused_as_by_the_original() -> None:
    two = pair()
    for model in (two.original, two.engine):
        with pytest.raises(ValueError, match="max_target_positions"):
            model.generate(**_heard(long=False), language="en", max_new_tokens=64)


def test_padding_within_the_decoders_prompt_has_the_originals_positions() -> None:
    two = tiny_pair("m2m_100")
    entry = {"input_ids": torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(2))}
    options = {"do_sample": False, "decoder_input_ids": torch.tensor([[2, 0, 5], [2, 7, 7], [2, 0, 0]])}
    expected = written(two.original, options, entry)
    with steps() as taken:
        assert torch.equal(expected, written(two.engine, options, entry))
    assert not taken


@pytest.mark.parametrize("task", [None, "translate"])
def test_a_decoder_assists_the_whole_model(task: str | None) -> None:
    original = pair().original
    torch.manual_seed(1)
    assistant = transformers.WhisperForCausalLM(copy.deepcopy(original.config)).eval()
    heard = {name: value[:1] for name, value in _heard(long=False).items()}
    asked = {"max_new_tokens": 7, "language": "de", "task": task}
    expected = original.generate(**heard, **asked, assistant_model=copy.deepcopy(assistant))
    assert torch.equal(original.generate(**heard, **asked, assistant_model=inject(assistant)), expected)
    assert torch.equal(pair().engine.generate(**heard, **asked, assistant_model=assistant), expected)


def test_beams_do_not_stream() -> None:
    for model in (pair().original, pair().engine):
        with pytest.raises(ValueError, match="streamer"):
            model.generate(**_heard(long=False), num_beams=2, max_new_tokens=4, streamer=_Streamer())


class _Streamer:
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


def test_no_length_is_the_default_one() -> None:
    expected, got = (
        model.generate(**_heard(long=False), language="en", max_length=None)
        for model in (pair().original, pair().engine)
    )
    assert torch.equal(expected, got)

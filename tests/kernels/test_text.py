"""An encoder of text in one native call says what its tables, layers and pooler say one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import slipstream
from slipstream.errors import DeviceError
from slipstream.kernels.cpu.library import EMULATED, ISAS, refuse
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.kernels.cpu.text import NativeText, refuse_text
from slipstream.model.fused.padding import pack
from slipstream.ops.linear import Beside, Weight
from slipstream.ops.text import TextFrame, TextRows
from tests.helpers.libraries import library
from tests.helpers.models import make
from tests.kernels.test_stack import refuse_to_run

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of the largest value; in 16 bits the rows that enter are rounded once more or less than torch's."""

# Its engine has to run layers natively.
pytestmark = pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))

WORDS, PLACES, NARROW = 50, 140, 24


class Text:
    """The layers of a tiny BERT between random tables and matrices."""

    def __init__(self, isa: str, dtype: torch.dtype, *, narrow: bool = False, types: bool = True) -> None:
        self.engine = slipstream.init_inference(
            make("bert", "BertModel"), dtype=dtype, replace_with_kernel_inject=True
        )
        encoder = self.engine.module._slipstream_whole.encoder
        self.stack = NativeStack(encoder.blocks, library(isa), refuse_to_run)
        self.stack.most_tokens = 10_000
        self.blocks = self.stack.blocks
        hidden = self.blocks[0].spec.hidden
        self.generator = torch.Generator().manual_seed(5)
        width = NARROW if narrow else hidden

        def some(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.generator).to(dtype)

        def weight(outputs: int, inputs: int) -> Weight:
            matrix = some(outputs, inputs) / inputs**0.5
            return Weight("plain", (outputs, inputs), (matrix,), lambda planes: planes[0], some(outputs))

        self.frame = TextFrame(
            words=some(WORDS, width),
            types=some(3, width) if types else None,
            places=some(PLACES, width),
            norm_weight=some(width),
            norm_bias=some(width),
            eps=1e-5,
            project_in=weight(hidden, width) if narrow else None,
            pooler=weight(17, hidden),
        )

    def rows(self, batch: int, length: int, **more: Any) -> TextRows:
        ids = torch.randint(0, WORDS, (batch * length,), generator=self.generator)
        packed = pack(None, batch, length, specs=()).packed
        return TextRows(ids, None, None, 0, length, None, packed, **more)

    def run(self, rows: TextRows) -> tuple[Tensor, Tensor | None]:
        text = self.stack.text(self.frame)
        assert text is not None
        answer = text(self.blocks, rows, ())
        assert answer is not None
        return answer

    def expected(self, rows: TextRows) -> tuple[Tensor, Tensor]:
        """By torch, but for the layers, which other tests compare."""
        frame = self.frame
        tokens = torch.arange(rows.ids.shape[0])
        places = rows.first + tokens % rows.period if rows.places is None else rows.places
        x = frame.words[rows.ids]
        if frame.types is not None:
            x = x + frame.types[torch.zeros_like(rows.ids) if rows.types is None else rows.types]
        x = x + frame.places[places]
        x = F.layer_norm(x, x.shape[-1:], frame.norm_weight, frame.norm_bias, frame.eps)
        if frame.project_in is not None:
            x = F.linear(x, frame.project_in.planes[0], frame.project_in.bias)
        left = self.stack.encode(self.blocks, x, rows.packed, {})
        assert left is not None and frame.pooler is not None
        pooled = rows.packed.query_starts[:-1].long() if rows.pooled is None else rows.pooled
        first = left[pooled.clamp(min=0)] * (pooled >= 0).to(left.dtype)[:, None]
        return left, F.linear(first, frame.pooler.planes[0], frame.pooler.bias).tanh()

    def compare(self, rows: TextRows, dtype: torch.dtype) -> None:
        for expected, got in zip(self.expected(rows), self.run(rows), strict=True):
            assert got is not None and got.dtype == dtype and got.shape == expected.shape
            error = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
            assert float(error) <= TOLERANCE[dtype]


@pytest.mark.parametrize("narrow", [False, True], ids=["as wide", "narrower"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_the_whole_is_its_parts(isa: str, dtype: torch.dtype, narrow: bool) -> None:
    text = Text(isa, dtype, narrow=narrow)
    text.compare(text.rows(1, 1), dtype)
    text.compare(text.rows(3, 7), dtype)
    rows = text.rows(2, 9)
    text.compare(replace(rows, first=4), dtype)
    types, places = (torch.randint(0, most, (18,), generator=text.generator) for most in (3, PLACES))
    text.compare(replace(rows, types=types, places=places), dtype)
    text.compare(replace(rows, pooled=torch.tensor([-1, 12])), dtype)


def test_more_tokens_than_are_run_together() -> None:
    text = Text("baseline", torch.float32, types=False)
    text.compare(text.rows(9, 130), torch.float32)  # the places of a sequence go on where a part ends
    wide = Text("baseline", torch.float32, narrow=True)
    wide.compare(wide.rows(9, 130), torch.float32)


@pytest.mark.parametrize("lengths", [[130] * 9, [400, 20, 90, 300, 7, 200, 150, 33], [100, 700]], ids=str)
def test_threads_that_run_sequences_of_their_own_say_what_one_says(lengths: list[int]) -> None:
    text = Text("baseline", torch.float32)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = text.rows(1, int(ends[-1]))
    places = torch.randint(0, PLACES, rows.ids.shape, generator=text.generator)
    lens = torch.tensor(lengths, dtype=torch.int32)
    rows = replace(rows, places=places, packed=replace(rows.packed, query_starts=ends.int(), kv_lens=lens))
    threads = torch.get_num_threads()
    try:
        answers = []
        for count in (1, 2):
            torch.set_num_threads(count)
            answers.append(text.run(rows)[0])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-5)


BAD: dict[str, Callable[[TextRows], TextRows]] = {
    "an id that no row has": lambda rows: replace(rows, ids=torch.full_like(rows.ids, WORDS)),
    "an id below zero": lambda rows: replace(rows, ids=rows.ids - WORDS),
    "a type that no row has": lambda rows: replace(rows, types=torch.full_like(rows.ids, 3)),
    "a place that no row has": lambda rows: replace(rows, places=torch.full_like(rows.ids, PLACES)),
    "more places than rows": lambda rows: replace(rows, first=PLACES - 4),
    "a token to pool that is none": lambda rows: replace(rows, pooled=torch.tensor([0, 10])),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_points_outside_is_refused_before_memory_is_touched(bad: str) -> None:
    text = Text("baseline", torch.float32)
    with pytest.raises(DeviceError, match="outside"):
        text.run(BAD[bad](text.rows(2, 5)))


def test_what_is_not_read_says_why() -> None:
    frame = Text("baseline", torch.float32).frame
    assert refuse_text(frame) is None and frame.pooler is not None
    assert "float64" in str(refuse_text(replace(frame, words=frame.words.double())))
    assert "strides" in str(refuse_text(replace(frame, places=frame.places.t())))
    beside = Beside(torch.zeros(1, 32), torch.zeros(17, 1))
    assert "adapter" in str(refuse_text(replace(frame, pooler=replace(frame.pooler, beside=beside))))
    odd = replace(frame.pooler, planes=(torch.zeros(34, 64)[::2, ::2],))
    assert "pooler: " in str(refuse_text(replace(frame, pooler=odd)))
    assert isinstance(Text("baseline", torch.float32).stack.text(frame), NativeText)

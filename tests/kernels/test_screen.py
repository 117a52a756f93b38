"""A step that reads a sketch of the vocabulary projection finds the token that reading all of it finds."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import slipstream
from slipstream.errors import DeviceError
from slipstream.formats import FORMATS
from slipstream.kernels.cpu import abi_model
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu import screen as screens_module
from slipstream.kernels.cpu.library import EMULATED, ISAS, Library, load
from slipstream.kernels.cpu.screen import Screens
from slipstream.kernels.cpu.sketch import Basis, Making, Sketched, learn, share_of
from slipstream.ops.linear import Weight
from tests.kernels.test_model import BEST, Sessions

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)
SKETCH = FORMATS["int4"]
TOKENS, WIDTH = 3001, 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections as small as those of tests count."""
    monkeypatch.setattr(screens_module, "_LEAST_WEIGHTS", 1)
    # So narrow rows have half as many directions, and their sketch takes no less than they.
    monkeypatch.setattr(screens_module, "_break_even", lambda *_: 0.6)


def model_of(*, is_walk: bool = True, bias: bool = False) -> LlamaForCausalLM:
    """A model whose layers add nothing: what enters the projection is a token's own normed embedding.

    With `is_walk` the projection knows each of them, so that tokens follow each other in one circle; else all
    tokens score nearly the same, and no sketch can tell them apart.
    """
    generator = torch.Generator().manual_seed(3)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    embedding = torch.randn(TOKENS, WIDTH, generator=generator)
    embedding[:, 7] *= 9  # as some channels of trained models
    embedding[:, 11] += 5
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        rows = embedding / embedding.square().mean(1, keepdim=True).sqrt()
        walk = (torch.arange(TOKENS) - 1) % TOKENS
        near = torch.randn(WIDTH, generator=generator) + torch.randn(rows.shape, generator=generator) / 1000
        model.lm_head.weight.copy_(rows[walk] / 8 if is_walk else near)
        if bias:
            model.lm_head.bias = torch.nn.Parameter(torch.randn(TOKENS, generator=generator))
    return model


def engine_of(
    model: LlamaForCausalLM, dtype: torch.dtype = torch.float32, head: str = "none", **more: Any
) -> slipstream.InferenceEngine:
    quant = {} if head == "none" else {"quant": {"weight": {"format": "int8"}, "head": head}}
    return slipstream.init_inference(model, dtype=dtype, replace_with_kernel_inject=True, **quant, **more)


def screens_of(engine: slipstream.InferenceEngine) -> Screens:
    runner: Any = engine._built.runner
    assert runner.whole.screens is not None
    return runner.whole.screens  # type: ignore[no-any-return]


def head_of(engine: slipstream.InferenceEngine) -> Weight:
    runner: Any = engine._built.runner
    return runner.frame.matrices()["head"]  # type: ignore[no-any-return]


def generated(engine: slipstream.InferenceEngine, first: int, count: int = 150) -> list[int]:
    ids = engine.generate(torch.tensor([[first]]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return ids[0, 1:].tolist()  # type: ignore[no-any-return]


def values_of(head: Weight, basis: Basis, library: Library) -> Tensor:
    made = Sketched(head, basis, SKETCH, library)
    made.make(0, head.shape[0])
    return made.values()


class Screened:
    """Steps of one token whose model has a screen already, by one instruction set."""

    def __init__(self, engine: slipstream.InferenceEngine, isa: str = BEST) -> None:
        self.runs = Sessions(engine, isa)
        library = load(isa)
        assert library is not None
        head, self.shares = head_of(engine), list[float]()
        rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))
        basis = learn(head, rows, SKETCH, library)
        assert basis is not None
        self.basis, self.screens = basis, Screens(SKETCH, library)
        making = Making(head, basis, SKETCH, library)
        assert not making.goes_on(1e9)
        self.screens.screen = making.screen()
        assert self.screens.screen is not None
        self.screens.judge = lambda shares: self.shares.extend(shares.tolist())  # type: ignore[method-assign]
        self.runs.model = replace(self.runs.model, screens=self.screens)
        self.begin()

    def begin(self) -> None:
        self.runs.session = self.runs.begin()
        self.best(0)  # the first call of a generation reads all

    def best(self, token: int) -> tuple[int, int]:
        """By the screen, and of all logits."""
        step = self.runs.step([(0, 5, 1)], torch.tensor([token]))
        best, logits = self.runs.session.best(step), self.runs.session.logits(step)
        assert best is not None and logits is not None
        return int(best[0, 0]), int(logits[0].argmax())


@pytest.mark.parametrize("isa", [*ISAS, EMULATED])
@pytest.mark.parametrize("is_walk", [True, False], ids=["walk", "near"])
@torch.no_grad()
def test_suppressed_tokens_are_not_found(isa: str, is_walk: bool) -> None:
    if load(isa) is None:
        pytest.skip(f"this machine has no {isa}")
    screened = Screened(engine_of(model_of(is_walk=is_walk), torch.float32, "none"), isa)
    session = screened.runs.session
    for token in range(16):
        step = screened.runs.step([(0, 5, 1)], torch.tensor([token]))
        logits = session.logits(step)
        assert logits is not None
        # The best ones, and those around the first of them.
        suppressed = torch.cat([logits[0].topk(40).indices, torch.arange(32)]).unique()
        session.suppress(suppressed)
        best = session.best(step)
        assert best is not None
        assert best.item() == logits.index_fill(1, suppressed, -torch.inf).argmax()
        session.suppress(None)
    assert len(screened.shares) == 16


@pytest.mark.parametrize(("dtype", "head"), [
    (torch.float32, "none"), (torch.bfloat16, "none"), (torch.float16, "none"),
    (torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.bfloat16, "bf13"), (torch.bfloat16, "fp8"),
    (torch.float16, "fp8"), (torch.bfloat16, "int4"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_walk", [True, False], ids=["walk", "near"])
@pytest.mark.parametrize("isa", [*ISAS, EMULATED])
@torch.no_grad()
def test_the_token_is_that_of_all_scores(isa: str, is_walk: bool, dtype: torch.dtype, head: str) -> None:
    if load(isa) is None:
        pytest.skip(f"this machine has no {isa}")
    model = model_of(is_walk=is_walk, bias=head != "none")
    # Rows that score as badly as any in the sketch: what its tokens lack.
    dense = model.lm_head.weight.clone()
    library = load(isa)
    assert library is not None
    lone = plain(dense)
    basis = learn(lone, torch.randn(64, WIDTH), SKETCH, library)
    assert basis is not None
    error = dense - values_of(lone, basis, library)[:, :WIDTH]
    model.model.embed_tokens.weight[:40] = error[:40] / basis.weights.square()
    model.model.embed_tokens.weight[40] = 0.0
    model.model.embed_tokens.weight[41] *= 1e4
    screened = Screened(engine_of(model, dtype, head), isa)
    for token in range(64):
        best, expected = screened.best(token)
        assert best == expected
    assert len(screened.shares) == 64 and min(screened.shares) > 0
    if is_walk:  # rows that the projection knows
        assert sum(screened.shares[42:]) / 22 < 0.2


@pytest.mark.parametrize("isa", [*ISAS, EMULATED])
@torch.no_grad()
def test_the_bound_holds_for_any_row(isa: str) -> None:
    library = load(isa)
    if library is None:
        pytest.skip(f"this machine has no {isa}")
    dense = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1)) * torch.rand(512, 1)
    head = plain(dense)
    basis = learn(head, torch.randn(64, WIDTH) + 3, SKETCH, library)
    assert basis is not None
    dense[3], dense[4], dense[5] = 0.0, dense[4] * 1e-9, dense[5] * 1e7
    made = Sketched(head, basis, SKETCH, library)
    made.make(0, 300)
    made.make(300, 212)
    values = made.values()
    worst = (dense - values[:, :WIDTH]) / basis.weights.square()
    worst -= worst @ basis.directions.T @ basis.directions
    rows = torch.cat([torch.randn(64, WIDTH) + 3, torch.eye(WIDTH), worst])
    extended, length = basis.extended(rows)
    off = (rows.double() @ dense.double().T - extended.double() @ values.double().T).abs()
    bound = length[:, None].double() * made.errors.double()
    rounding = 1e-6 * extended.norm(dim=1)[:, None] * values.norm(dim=1)
    assert bool((off <= bound + rounding).all())
    # The worst row of each token comes close to it: the bound says no more than it must.
    assert float((off / bound)[128:].diagonal()[6:].median()) > 0.4


def plain(dense: Tensor) -> Weight:
    return Weight("plain", tuple(dense.shape), (dense,), lambda *_: dense)


def some_basis(dense: Tensor) -> Basis:
    library = load(BEST)
    assert library is not None
    basis = learn(plain(dense), torch.randn(64, WIDTH), SKETCH, library)
    assert basis is not None
    return basis


@pytest.mark.parametrize("isa", [*ISAS, EMULATED])
def test_rows_that_are_no_numbers_are_always_computed(isa: str) -> None:
    library = load(isa)
    if library is None:
        pytest.skip(f"this machine has no {isa}")
    dense = torch.randn(100, WIDTH)
    basis = some_basis(dense)
    dense[17, 3], dense[40, 5] = torch.nan, torch.inf
    made = Sketched(plain(dense), basis, SKETCH, library)
    made.make(0, 100)
    assert made.errors.isinf().nonzero().flatten().tolist() == [17, 40]
    assert bool(made.values().isfinite().all()) and made.longest < 100


@pytest.mark.parametrize("isa", [*ISAS, EMULATED])
def test_runs_of_rows_are_sketched_as_one_matrix(isa: str) -> None:
    library = load(isa)
    if library is None:
        pytest.skip(f"this machine has no {isa}")
    dense = torch.randn(100, WIDTH).bfloat16()
    basis = some_basis(dense.float())
    runs = Weight("plain", (100, WIDTH), (dense[:33].clone(), dense[33:].clone()), lambda *_: dense)
    both = [Sketched(head, basis, SKETCH, library) for head in (plain(dense), runs)]
    for made in both:
        made.make(0, 50)
        made.make(50, 50)
    assert all(torch.equal(a, b) for a, b in zip(both[0].planes, both[1].planes, strict=True))
    assert torch.equal(both[0].errors, both[1].errors)


@pytest.mark.parametrize(("first", "count"), [(-1, 4), (0, 101), (100, 1), (90, 11), (0, -1)])
def test_tokens_that_are_not_there_are_not_sketched(first: int, count: int) -> None:
    library = load(BEST)
    assert library is not None
    dense = torch.randn(100, WIDTH)
    made = Sketched(plain(dense), some_basis(dense), SKETCH, library)
    with pytest.raises((DeviceError, RuntimeError)):
        made.make(first, count)


@pytest.mark.parametrize(
    "change",
    [
        {"directions": None},
        {"weights": None},
        {"errors": None},
        {"lengths": None},
        {"errors": 2},
        {"first": (1 << 63) - 1},
    ],
    ids=str,
)
def test_a_call_without_its_parts_is_refused(change: dict[str, Any]) -> None:
    library = load(BEST)
    assert library is not None
    dense = torch.randn(100, WIDTH)
    basis, room = some_basis(dense), torch.zeros(200)
    made = Sketched(plain(dense), basis, SKETCH, library)
    parts = {"directions": basis.directions, "weights": basis.weights, "errors": room, "lengths": room[100:]}
    call = abi_model.SketchCall(
        head=made._head,
        sketch=made.matrix,
        stretch=1.0,
        along=1.0,
        **({name: part.data_ptr() for name, part in parts.items()} | {"first": 0, "count": 100} | change),
    )
    with pytest.raises(DeviceError, match="refuses"):
        library.run("sketch", call)


def test_the_first_of_equal_scores_is_the_best() -> None:
    model = model_of()
    with torch.no_grad():
        for token, other in ((100, 2900), (1500, 3), (40, 41)):
            model.lm_head.weight[other] = model.lm_head.weight[token + 1]
    screened = Screened(engine_of(model))
    assert [screened.best(token) for token in (100, 1500, 40)] == [(101, 101), (3, 3), (41, 41)]


@torch.no_grad()
def test_what_is_no_number_is_the_best_as_in_torch() -> None:
    model = model_of()
    screened = Screened(engine_of(model))
    model.model.embed_tokens.weight[9, 3] = torch.nan
    model.model.embed_tokens.weight[10, 3] = torch.inf
    for token in (9, 10, 11):
        best, expected = screened.best(token)
        assert best == expected


@pytest.mark.parametrize("scale", [0.25, 30.0])
def test_scaled_logits(scale: float) -> None:
    engine = engine_of(model_of())
    runner: Any = engine._built.runner
    runner.frame.spec = replace(runner.frame.spec, logit_scale=scale)
    screened = Screened(engine)
    for token in range(20):
        best, expected = screened.best(token)
        assert best == expected == token + 1
    assert max(screened.shares) < 0.5


@pytest.mark.parametrize(("scale", "softcap"), [(-1.0, None), (1.0, 30.0)])
def test_logits_that_may_change_the_order_are_all_computed(scale: float, softcap: float | None) -> None:
    engine = engine_of(model_of())
    runner: Any = engine._built.runner
    runner.frame.spec = replace(runner.frame.spec, logit_scale=scale, logit_softcap=softcap)
    screened = Screened(engine)
    assert screened.best(4)[0] == screened.best(4)[1]
    assert not screened.shares


@pytest.mark.parametrize("head", ["none", "int8", "bf13"])
def test_generations_learn_a_screen_and_say_the_same(head: str) -> None:
    engines = [
        engine_of(model_of(), torch.bfloat16, head, screen_vocabulary=wanted) for wanted in (True, False)
    ]
    runner: Any = engines[1]._built.runner
    assert runner.whole.screens is None
    screens = screens_of(engines[0])
    first = [generated(engine, 5) for engine in engines]
    assert first[0] == first[1] == list(range(6, 156))
    shares: list[float] = []
    judge = screens.judge
    screens.judge = lambda found: (shares.extend(found.tolist()), judge(found))[1]  # type: ignore[method-assign]
    assert screens.screen is not None
    assert generated(engines[0], 1000) == generated(engines[1], 1000) == list(range(1001, 1151))
    assert len(shares) == 149 and sum(shares) / len(shares) < 0.1


def test_a_small_projection_and_a_narrow_one_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load(BEST)
    assert library is not None
    screens = Screens(SKETCH, library)

    def begins(tokens: int, width: int, dtype: torch.dtype, head: str = "plain") -> bool:
        planes = (torch.empty(tokens, width, dtype=dtype),)
        return screens.begin(Weight(head, (tokens, width), planes, int), 1.0, 0.0, at_end=True) is not None

    monkeypatch.undo()
    assert begins(49152, 576, torch.bfloat16) and begins(49152, 576, torch.int8)
    assert begins(16384, 256, torch.bfloat16) and not begins(16384, 224, torch.bfloat16)
    assert not begins(50257, 16, torch.bfloat16)  # no whole group
    assert not begins(99152, 64, torch.int8)  # the sketch of 64 inputs and 32 directions takes as much


def test_where_nothing_is_spared_nothing_is_made() -> None:
    engine = engine_of(model_of(is_walk=False))
    screens = screens_of(engine)
    for first in range(1, 7):
        generated(engine, first)
    assert screens.screen is None and screens._wait == 4 * screens_module._FIRST_WAIT
    assert screens._making is None


def test_a_screen_that_spares_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens_module, "_WORTH", 2.0)
    engine, plain = engine_of(model_of(is_walk=False)), engine_of(model_of(is_walk=False))
    screens, made = screens_of(engine), []
    judge = screens.judge
    screens.judge = lambda found: (made.append(screens.screen), judge(found))[1]  # type: ignore[method-assign]
    for first in range(1, 5):
        assert generated(engine, first) == generated(plain, first)
    assert made and made[0] is not None
    assert screens.screen is None and screens._wait >= screens_module._FIRST_WAIT


@pytest.mark.parametrize("how", ["in place", "by data", "replaced", "reloaded", "bias"])
@torch.no_grad()
def test_a_projection_that_was_written_to_is_read_anew(how: str, tmp_path: Path) -> None:
    engine = engine_of(model_of(bias=how == "bias"))
    generated(engine, 5)
    screens = screens_of(engine)
    made = screens.screen
    assert made is not None
    other = model_of(bias=how == "bias")
    other.lm_head.weight.copy_(other.lm_head.weight.roll(7, 0))
    head: Any = engine.module.lm_head
    if how == "in place":
        head.weight.copy_(other.lm_head.weight)
    elif how == "by data":
        head.weight.data[:] = other.lm_head.weight
    elif how == "replaced":
        head.weight = torch.nn.Parameter(other.lm_head.weight.clone(), requires_grad=False)
    elif how == "reloaded":
        other.save_pretrained(tmp_path)
        engine.load_checkpoint(tmp_path)
    else:
        head.bias[2000] += 1e4
    expected = [2000] * 40 if how == "bias" else [(20 + 8 * i) % TOKENS for i in range(1, 41)]
    assert generated(engine, 20, 40) == expected
    assert screens.screen is not made


def test_numbers_that_are_missing_are_not_learned_from() -> None:
    for part in ("lm_head", "model.embed_tokens"):
        engine = engine_of(model_of())
        with torch.no_grad():
            engine.module.get_submodule(part).weight[40, 9] = torch.inf  # type: ignore[index]
        for first in (5, 6, 7):
            generated(engine, first)
        assert screens_of(engine).screen is None


def test_two_generations_at_once_share_a_screen() -> None:
    engine = engine_of(model_of())
    found: dict[int, list[int]] = {}

    def run(first: int) -> None:
        for _ in range(3):
            found[first] = generated(engine, first, 100)

    threads = [threading.Thread(target=run, args=(first,)) for first in (1, 700, 1400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert screens_of(engine).screen is not None
    assert found == {first: list(range(first + 1, first + 101)) for first in found} and len(found) == 3


def test_a_copied_engine_learns_its_own_screen() -> None:
    engine = engine_of(model_of())
    generated(engine, 5)
    twin = copy.deepcopy(engine)
    assert screens_of(engine).screen is not None and screens_of(twin).screen is None
    assert generated(twin, 9) == list(range(10, 160)) and screens_of(twin).screen is not None
    assert generated(engine, 9) == list(range(10, 160))


def test_calls_within_inference_mode_and_without_may_take_turns() -> None:
    engine = engine_of(model_of())
    for first in range(1, 5):
        with torch.inference_mode(first % 2 == 0):
            assert generated(engine, first, 40) == list(range(first + 1, first + 41))
    assert screens_of(engine).screen is not None


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("errors", None, "null"),
        ("weights", None, "null"),
        ("directions", None, "null"),
        ("num_directions", 31, "shape"),
        ("num_directions", -1, "shape"),
    ],
)
def test_a_screen_of_another_shape_is_refused(name: str, value: Any, what: str) -> None:
    screened = Screened(engine_of(model_of()))
    assert screened.screens.screen is not None
    struct = screened.screens.screen.struct
    setattr(struct, name, value)
    with pytest.raises(DeviceError, match="refuses"):
        screened.best(3)


def test_several_rows_and_drawn_tokens_read_all() -> None:
    screened = Screened(engine_of(model_of()))
    step = screened.runs.step([(0, 5, 1), (1, 3, 1)])
    best, logits = screened.runs.session.best(step), screened.runs.session.logits(step)
    assert best is not None and logits is not None and torch.equal(best[:, 0], logits.argmax(-1))
    assert not screened.shares


def test_a_trial_says_what_steps_will_compute() -> None:
    library = load(BEST)
    assert library is not None
    shares = []
    for is_walk in (True, False):
        model = model_of(is_walk=is_walk)
        head = head_of(engine_of(model))
        rows = model.model.norm(model.model.embed_tokens.weight[1000:1064]).detach()
        basis = learn(head, rows, SKETCH, library)
        assert basis is not None
        tokens = (rows @ model.lm_head.weight.T).argmax(-1)
        shares.append(share_of(head, basis, rows, tokens, SKETCH, library))
    assert shares[0] < 0.1 and shares[1] > 0.5

"""The library's threads: callers at once get right answers, and nobody works while nothing is asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import transformers

import slipstream
from slipstream.kernels.cpu import draw
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import Library, load
from slipstream.kernels.cpu.linear import native_linear
from slipstream.ops.linear import Weight
from tests.kernels.test_model import sessions
from tests.kernels.test_stack import PREFILL

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


@pytest.fixture
def library() -> Library:
    found = load("baseline")
    assert found is not None
    return found


def weight(seed: int) -> Weight:
    matrix = torch.randn(700, 300, generator=torch.Generator().manual_seed(seed))
    return Weight("plain", (700, 300), (matrix,), lambda *_: matrix)


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_callers_at_once_get_their_own_answers(library: Library) -> None:
    wrong: list[float] = []

    def call(seed: int) -> None:
        own = weight(seed)
        for rows in (1, 2, 3, 5) * 20:
            x = torch.randn(rows, 300, generator=torch.Generator().manual_seed(rows))
            error = float((native_linear(x, own, library) - x @ own.dense().t()).abs().max())
            if not error <= 1e-3:
                wrong.append(error)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_call_beside_another_has_the_scratch_that_one_thread_needs() -> None:
    """An encoder takes shorter parts where two threads have one each than where one thread has them all."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12, "vocab_size": 60}
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes)).eval()
    encoder = slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    ids, found = torch.randint(1, 60, (32, 32)), []

    def encode(_: object = None) -> None:
        with torch.no_grad():
            found.append(encoder(ids).last_hidden_state)

    encode()
    runs = sessions("llama")
    runs.both(PREFILL)
    runs.session.best(runs.step([(0, 7, 1), (1, 1, 1)]), 3, (), encode)
    assert len(found) == 3
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])


def test_calls_that_were_announced_get_the_same_answers(library: Library) -> None:
    x, own = torch.randn(3, 300), weight(1)
    expected = native_linear(x, own, library)
    parked = threading.Event()
    for turn in range(300):
        library.rouse()
        if turn % 3 == 0:
            parked.wait(0.0005)  # nobody waits that long
        assert torch.equal(native_linear(x, own, library), expected)


def test_more_threads_than_processors_are_no_more(library: Library) -> None:
    torch.set_num_threads(64)
    x, own = torch.randn(2, 300), weight(1)
    torch.testing.assert_close(native_linear(x, own, library), x @ own.dense().t())


def test_nobody_works_while_nothing_is_asked(library: Library) -> None:
    x, own = torch.randn(1, 300), weight(1)
    for _ in range(50):
        native_linear(x, own, library)
    library.rouse()  # no call comes
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_has_threads_of_its_own(library: Library) -> None:
    x, own = torch.randn(1, 300), weight(1)
    expected = native_linear(x, own, library)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native_linear(x, own, library), expected) else 1)
    deadline = time.monotonic() + 30
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if found[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert found == (child, 0)


FORKS = """
import os
import torch
from slipstream.kernels.cpu.library import rest_torch

torch.set_num_threads(2)
x = torch.ones(400_000)
x.add_(1)
rest_torch()
x.add_(1)
child = os.fork()
if child == 0:
    rest_torch()
    os._exit(0 if float(x.add_(1).sum()) == 1_600_000 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_does_not_wait_for_threads_that_torch_had_in_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_waits_for_what_other_threads_hold_for_a_moment() -> None:
    """In a child nobody would ever give it back: `draw`'s lock, and those of threads that are ending."""

    class Ending:
        def omp_pause_resource_all(self, kind: int) -> None:
            hold()

    held, done = threading.Semaphore(0), []

    def hold() -> None:
        held.release()
        time.sleep(0.3)
        done.append(1)

    def draw_holds() -> None:
        with draw._lock:
            hold()

    with pytest.MonkeyPatch.context() as patch:
        native._openmp()  # registers what happens at a fork
        patch.setattr(native, "_openmp", Ending)
        for work in (native.rest_torch, draw_holds):
            done.clear()
            holder = threading.Thread(target=work)
            holder.start()
            held.acquire()
            child = os.fork()
            if child == 0:
                os._exit(0 if done and draw._lock.acquire(blocking=False) else 1)
            assert os.waitpid(child, 0) == (child, 0)
            holder.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("count", [1, 2])
def test_a_child_ends_no_threads_if_its_parent_had_others(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Ending:
        def omp_pause_resource_all(self, kind: int) -> None:
            ended.append(kind)

    if native._openmp() is None:
        pytest.skip("torch's OpenMP cannot end its threads")
    monkeypatch.setattr(native, "_openmp", Ending)
    monkeypatch.setattr(threading, "active_count", lambda: count)
    child = os.fork()
    if child == 0:
        native.rest_torch()
        os._exit(0 if bool(ended) is (count == 1) else 1)
    assert os.waitpid(child, 0) == (child, 0)
    native.rest_torch()
    assert ended, "the parent ends threads as before"

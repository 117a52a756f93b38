"""Under torchrun, as users start it: two processes answer as one, and one that dies ends the other."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

SCRIPT = """
import os, signal, sys, time, torch, slipstream
from tests.helpers.models import make
torch.set_num_threads(1)
rank, mode = int(os.environ["RANK"]), sys.argv[1]
model = make("llama")
ids = torch.tensor([[5, 6, 7, 8]])
expected = model.generate(ids, max_new_tokens=6, do_sample=False)
engine = slipstream.init_inference(
    model, dtype=torch.float32, replace_with_kernel_inject=True,
    tensor_parallel={"tp_size": 2, "step_timeout": 3 if "hangs" in mode else 35},
)
odd = 0 if mode == "first hangs" else 1
class Dies:
    def __call__(self, ids, scores):
        if rank == odd and ids.shape[1] > 6 and mode != "lives":
            open(os.path.join(os.path.dirname(__file__), "stopped"), "w").close()
            if mode == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return scores
from transformers import LogitsProcessorList
got = engine.generate(ids, max_new_tokens=6, do_sample=False, logits_processor=LogitsProcessorList([Dies()]))
print("SAME" if torch.equal(expected, got) else "DIFFERENT", flush=True)
"""

LEAVES = """
import atexit, os, pathlib, sys

@atexit.register  # the first, and so the last that runs
def count():
    names = [task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
    os.write(1, b"THREADS %d\\n" % sum("gloo_runloop" in name for name in names))

import torch, slipstream, torch.distributed as dist
from tests.helpers.models import make
torch.set_num_threads(1)
if sys.argv[1] == "began the world":
    dist.init_process_group("gloo")
engine = slipstream.init_inference(
    make("llama"), dtype=torch.float32, replace_with_kernel_inject=True, tensor_parallel={"tp_size": 2}
)
engine.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, do_sample=False)
if sys.argv[1] == "began the world":
    dist.destroy_process_group()
"""

LENT = """
import sys, torch, torch.distributed as dist
from slipstream import InferenceConfig
from slipstream.parallel import open_mesh
from slipstream.parallel.collectives import all_sum
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = open_mesh(InferenceConfig(tensor_parallel={"tp_group": dist.new_group([0, 1])}))
x = torch.zeros(4)
all_sum(x, mesh.tp)
# From here on another thread has the interpreter only while this one waits.
sys.setswitchinterval(1000)
all_sum(x, mesh.tp)
"""


def launch(folder: Path, mode: str, *more: str, text: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    script = folder / "ranks.py"
    script.write_text(text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *more]
    # The script lies elsewhere, and imports these tests.
    places = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *start, str(script), mode],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_two_processes_of_torchrun_answer_as_one(tmp_path: Path) -> None:
    done = launch(tmp_path, "lives")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("SAME") == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted under /proc")
@pytest.mark.parametrize(("what", "threads"), [("began nothing", 0), ("began the world", 2)])
def test_no_thread_of_a_group_is_left_when_the_interpreter_ends(
    tmp_path: Path, what: str, threads: int
) -> None:
    # One that is still letting go of a tensor by then would end the process with SIGABRT. The two are of the
    # world, on which nothing is computed: torch's own functions hold it where they were imported after it.
    done = launch(tmp_path, what, text=LEAVES)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"THREADS {threads}"] * 2


def test_threads_of_a_user_s_group_have_a_moment_at_the_end(tmp_path: Path) -> None:
    done = launch(tmp_path, "", text=LENT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
@pytest.mark.parametrize(("mode", "seconds"), [("dies", 60), ("hangs", 30), ("first hangs", 30)])
def test_a_rank_that_dies_or_hangs_ends_the_other_with_an_error(
    tmp_path: Path, mode: str, seconds: int
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    # Two processes without a launcher, which would end the other by itself, made by the server that the pool
    # of ranks starts, too, and that has imported everything.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.jobs"])
    ranks = [context.Process(target=_alone, args=(rank, tmp_path, script, mode)) for rank in range(2)]
    for process in ranks:
        process.start()
    stopped, odd = tmp_path / "stopped", 0 if mode == "first hangs" else 1
    patience = time.monotonic() + 150
    while not stopped.exists() and time.monotonic() < patience:
        time.sleep(0.1)
    start = time.monotonic()
    ranks[1 - odd].join(seconds)
    assert time.monotonic() - start < seconds
    ranks[odd].kill()
    ranks[odd].join(10)
    assert ranks[1 - odd].exitcode not in (0, None)
    errors = (tmp_path / f"errors{1 - odd}").read_text()
    assert f"DeviceError: rank {1 - odd} lost the ranks that it shares the model with (0, 1)" in errors
    assert "no answer from rank 1" in errors or odd == 0  # only the first rank can tell


def _alone(rank: int, folder: Path, script: Path, mode: str) -> None:
    """One of two processes that nobody watches over."""
    os.environ["RANK"] = str(rank)
    os.dup2(os.open(folder / f"errors{rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sys.argv = [str(script), mode]
    runpy.run_path(str(script), run_name="__main__")

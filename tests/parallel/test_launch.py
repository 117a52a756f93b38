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
import os, signal, sys, torch, slipstream
from tests.helpers.models import make
torch.set_num_threads(1)
rank, dies = int(os.environ["RANK"]), sys.argv[1] == "dies"
model = make("llama")
ids = torch.tensor([[5, 6, 7, 8]])
expected = model.generate(ids, max_new_tokens=6, do_sample=False)
engine = slipstream.init_inference(
    model, dtype=torch.float32, tensor_parallel={"tp_size": 2}, replace_with_kernel_inject=True
)
class Dies:
    def __call__(self, ids, scores):
        if dies and rank == 1 and ids.shape[1] > 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores
from transformers import LogitsProcessorList
got = engine.generate(ids, max_new_tokens=6, do_sample=False, logits_processor=LogitsProcessorList([Dies()]))
print("SAME" if torch.equal(expected, got) else "DIFFERENT", flush=True)
"""


def launch(folder: Path, mode: str, *more: str) -> subprocess.CompletedProcess[str]:
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
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


@pytest.mark.skipif(sys.platform == "win32", reason="a process is killed by a signal")
def test_a_rank_that_dies_ends_the_other_with_an_error(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    # Two processes without a launcher, which would end the other by itself, made by the server that the pool
    # of ranks starts, too, and that has imported everything.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.jobs"])
    ranks = [context.Process(target=_alone, args=(rank, str(tmp_path), str(script))) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[1].join(150)
    start = time.monotonic()
    ranks[0].join(60)
    assert time.monotonic() - start < 60
    assert ranks[1].exitcode == -9
    assert ranks[0].exitcode not in (0, None)
    errors = (tmp_path / "errors0").read_text()
    assert "DeviceError: rank 0 lost the ranks that it shares the model with (0, 1)" in errors


def _alone(rank: int, folder: str, script: str) -> None:
    """One of two processes that nobody watches over."""
    os.environ["RANK"] = str(rank)
    os.dup2(os.open(f"{folder}/errors{rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sys.argv = [script, "dies"]
    runpy.run_path(script, run_name="__main__")

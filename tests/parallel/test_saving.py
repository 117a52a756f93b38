"""What several ranks save, any number of them loads; what they cannot do with a whole model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.pool import Failed, Pool


def test_what_two_ranks_save_loads_on_one_three_and_four(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run("tests.parallel.saving_jobs:save", str(tmp_path), 2, ranks=2)
    assert saved == [None, None], saved
    for size in (1, 3, 4):
        for answer in pool.run("tests.parallel.saving_jobs:load", str(tmp_path), size, ranks=size):
            assert answer == {"checkpoint": True, "described": True, "hollow": True, "packed": True}, answer


@pytest.mark.parametrize("what", ["load_adapter", "packed", "zero"])
def test_what_ranks_do_not_do_is_refused_on_all_of_them(pool: Pool, tmp_path: Path, what: str) -> None:
    for answer in pool.run("tests.parallel.saving_jobs:refused", str(tmp_path), what, ranks=2):
        assert isinstance(answer, Failed) and answer.kind == "UnsupportedError", answer
        assert "2 ranks" in answer.message

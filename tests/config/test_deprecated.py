"""Fields that moved: mapped, mirrored, warned about once, and refused beside their replacement."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest

from slipstream.config import InferenceConfig, MoEConfig, TensorParallelConfig, resolve
from slipstream.config.deprecated import DEPRECATED, Deprecated
from slipstream.errors import ConfigError

GROUP = object()
VALUES: dict[str, Any] = {
    "replace_method": "auto",
    "mp_size": 2,
    "mpu": GROUP,
    "ep_size": 2,
    "ep_group": GROUP,
    "ep_mp_group": GROUP,
    "moe_experts": [8],
    "moe_type": "residual",
}
MOVED = [entry for entry in DEPRECATED if entry.section]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def by_name(entry: Deprecated) -> str:
    return entry.name


def test_the_table_has_the_fields_that_moved() -> None:
    assert sorted(entry.name for entry in DEPRECATED) == sorted(VALUES)


@pytest.mark.parametrize("entry", DEPRECATED, ids=by_name)
def test_a_deprecated_field_warns_and_names_its_replacement(entry: Deprecated) -> None:
    with pytest.warns(FutureWarning, match=f"{entry.name} is deprecated.*removed in") as caught:
        InferenceConfig(**{entry.name: VALUES[entry.name]})
    assert entry.replacement in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("entry", DEPRECATED, ids=by_name)
def test_it_warns_once(entry: Deprecated) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            InferenceConfig(**{entry.name: VALUES[entry.name]})
    assert [warning.category for warning in caught].count(FutureWarning) == 1


@pytest.mark.parametrize("entry", MOVED, ids=by_name)
def test_it_acts_in_its_new_place_and_reads_as_what_stands_there(entry: Deprecated) -> None:
    with pytest.warns(FutureWarning):
        config = InferenceConfig(**{entry.name: VALUES[entry.name]})
    assert getattr(getattr(config, entry.section), entry.field) == VALUES[entry.name]
    new = InferenceConfig(**{entry.section: {entry.field: VALUES[entry.name]}})
    assert getattr(new, entry.name) == VALUES[entry.name]
    assert new == config


@pytest.mark.parametrize("entry", MOVED, ids=by_name)
def test_old_and_new_together_are_refused_even_when_they_agree(entry: Deprecated) -> None:
    value = VALUES[entry.name]
    new = {entry.section: {entry.field: value}}
    for values in ({**new, entry.name: value}, {entry.name: value, **new}):
        with pytest.raises(ConfigError, match="refused") as error:
            InferenceConfig(**values)
        assert f"{entry.name}=" in str(error.value)
        assert f"{entry.replacement}=" in str(error.value)
    with pytest.raises(ConfigError, match="refused"):
        resolve(new, {entry.name: value})
    with pytest.raises(ConfigError, match="refused"):
        resolve({entry.name: value}, new)


@pytest.mark.parametrize("entry", DEPRECATED, ids=by_name)
def test_the_same_old_field_twice_is_fine(entry: Deprecated) -> None:
    values = {entry.name: VALUES[entry.name]}
    with pytest.warns(FutureWarning):
        assert getattr(resolve(values, values), entry.name) == VALUES[entry.name]


def test_a_section_beside_an_old_field_keeps_its_other_fields() -> None:
    with pytest.warns(FutureWarning):
        config = InferenceConfig(mp_size=2, tp={"tp_grain_size": 32}, ep_size=2, moe=MoEConfig(num_experts=4))
    assert config.tensor_parallel == TensorParallelConfig(tp_size=2, tp_grain_size=32)
    assert (config.moe.ep_size, config.moe.moe_experts) == (2, [4])


def test_experts_may_be_one_number() -> None:
    with pytest.warns(FutureWarning):
        assert InferenceConfig(moe_experts=8).moe.moe_experts == [8]
    assert InferenceConfig(moe={"num_experts": 8}).moe.moe_experts == [8]


@pytest.mark.parametrize("value", [[], 0, True, ["a"], [0], "8", None])
def test_experts_are_positive_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match="moe_experts"):
        InferenceConfig(moe_experts=value)


def test_the_only_replace_method_is_auto() -> None:
    with pytest.raises(ConfigError, match="replace_method='manual' must be 'auto'"):
        InferenceConfig(replace_method="manual")


def test_a_wrong_value_is_reported_under_the_name_that_was_written() -> None:
    with pytest.raises(ConfigError, match=r"mp_size \(now tensor_parallel\.tp_size\)=0 must be at least 1"):
        InferenceConfig(mp_size=0)


def test_a_warning_turned_into_an_error_stays_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(FutureWarning):
                InferenceConfig(mp_size=2)


def test_a_script_sees_the_warning_once_and_at_its_own_line(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from slipstream.config import resolve\nfor size in (2, 2, 4):\n    resolve({'mp_size': size}, {})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stderr.count("mp_size is deprecated") == 1
    assert "script.py:3: FutureWarning" in done.stderr

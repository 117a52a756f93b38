"""What a configuration says of weights finds its format, or a message with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.formats import FORMATS, VARIANTS, format_of, rounding_inputs


@pytest.mark.parametrize("name", [name for name in FORMATS | VARIANTS if name != "plain"])
def test_a_name_is_enough(name: str) -> None:
    assert format_of(name).name == name
    assert (FORMATS | VARIANTS)[name] is format_of(name)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"num_bits": 8}, "int8"),
        ({"num_bits": 6}, "fp6"),
        ({"num_bits": 4}, "int4"),
        ({"num_bits": 8, "q_type": "symmetric"}, "int8"),
        ({"num_bits": 4, "q_type": "asymmetric"}, "int4"),
        ({"num_bits": 4, "q_type": "symmetric"}, "int4-g32-sym"),
        ({"num_bits": 4, "q_groups": 18, "width": 576}, "int4"),
        ({"num_bits": 4, "q_groups": 9, "width": 576}, "int4-g64"),
        ({"num_bits": 4, "q_groups": 16, "width": 2048, "q_type": "symmetric"}, "int4-g128-sym"),
        ({"name": "int4", "num_bits": 4, "q_groups": 16, "width": 2048}, "int4-g128"),
        ({"name": "int4-g32-sym", "num_bits": 4}, "int4-g32-sym"),
    ],
    ids=str,
)
def test_bits_groups_and_type_find_a_format(asked: dict[str, Any], expected: str) -> None:
    assert format_of(**{"name": None, **asked}).name == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_bits": 5}, "no weight format has 5 bits; num_bits is 4, 6 or 8"),
        ({"num_bits": 8, "q_type": "asymmetric"}, "int8, which has no zero point.*int4"),
        ({"num_bits": 6, "q_type": "asymmetric"}, "fp6, which has no zero point"),
        (
            {"num_bits": 8, "q_groups": 4, "width": 576},
            "q_groups=4 does not go with int8, which has one scale",
        ),
        ({"name": "fp8", "q_groups": 2}, "q_groups=2 does not go with fp8"),
        (
            {"num_bits": 4, "q_groups": 7, "width": 576},
            r"groups of 82.* in rows of 576 inputs.*use 9, 18 or 1",
        ),
        ({"num_bits": 4, "q_groups": 2, "width": 576}, "groups of 288"),
        ({"num_bits": 4, "q_groups": 2, "width": 50}, "groups of 25 in rows of 50.*leave it at 1"),
        ({"num_bits": 4, "q_groups": 2}, "config lacks"),
    ],
    ids=str,
)
def test_what_does_not_exist_is_refused_with_the_way_out(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        format_of(**{"name": None, **asked})


def test_rows_are_rounded_in_as_many_groups_as_are_named() -> None:
    assert rounding_inputs(FORMATS["int8"], groups=48, width=96).name == "int8-a8-g48"
    assert rounding_inputs(FORMATS["int8"], groups=5).name == "int8-a8-g5"  # no width is known
    for groups, way_out in ((64, "use 48 or 1"), (10**12, "use 96 or 1"), (5, "use 4 or 1")):
        with pytest.raises(ConfigError, match=f"q_groups={groups} does not divide rows of 96 .*; {way_out}"):
            rounding_inputs(FORMATS["int8"], groups=groups, width=96)
    with pytest.raises(ConfigError, match="rows of 97 .*; leave it at 1"):
        rounding_inputs(FORMATS["int8"], groups=5, width=97)

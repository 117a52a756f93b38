"""What ranks compare of their configurations."""

from __future__ import annotations

from slipstream.parallel.agree import _text


def test_the_order_of_a_dictionary_does_not_count() -> None:
    one = {"sliding": {"theta": 1.0, "type": "default"}, "full": {"theta": 2.0}}
    other = {"full": {"theta": 2.0}, "sliding": {"type": "default", "theta": 1.0}}
    assert _text(one) == _text(other)
    assert _text(one) != _text({**one, "full": {"theta": 3.0}})

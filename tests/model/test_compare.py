"""The self-check's comparison: what it lets pass, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from slipstream.errors import InjectionError
from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import RecordedCall, call_alone, compare, record_calls

CALLS = [
    RecordedCall((torch.randn(2, n, 4, generator=torch.Generator().manual_seed(n)),), {}, None)
    for n in (6, 1)
]
TOKENS = 14


def _off(rows: int, by: float = 1.0) -> Callable[[Tensor], Tensor]:
    """The identity, but for the first rows of the first call."""

    def run(hidden: Tensor) -> Tensor:
        out = hidden.clone()
        if hidden.shape[1] > 1:
            out.view(-1, 4)[:rows] += by
        return out

    return run


def _identity(hidden: Tensor) -> Tensor:
    return hidden


def test_one_wrong_token_is_refused() -> None:
    with pytest.raises(InjectionError, match="off by 1"):
        compare("layer", CALLS, _identity, _off(1), torch.empty(0, dtype=torch.float32))


def test_tokens_that_rounding_decides_may_differ_up_to_their_share() -> None:
    allowed = int(0.4 * TOKENS)
    assert (
        compare("layer", CALLS, _identity, _off(allowed), torch.empty(0, dtype=torch.bfloat16), ties=0.4)
        == 0.0
    )
    with pytest.raises(InjectionError):
        compare("layer", CALLS, _identity, _off(allowed + 1), torch.empty(0, dtype=torch.bfloat16), ties=0.4)


def test_a_share_of_ties_does_not_excuse_what_is_not_finite() -> None:
    with pytest.raises(InjectionError):
        compare(
            "layer", CALLS, _identity, _off(1, float("nan")), torch.empty(0, dtype=torch.bfloat16), ties=0.4
        )


def test_a_recorded_answer_stands_for_the_original() -> None:
    calls = [replace(call, output=(call.args[0] + 1,)) for call in CALLS]
    assert compare("layer", calls, None, lambda hidden: hidden + 1, torch.empty(0)) == 0.0
    with pytest.raises(InjectionError, match="off by 1"):
        compare("layer", calls, None, _identity, torch.empty(0))


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"), [(0.3, 0.4, True), (0.4, 0.3, True), (0.5, 0.3, False)]
)
def test_in_lower_precision_the_one_nearer_to_float32_is_right(
    ours: float, theirs: float, passes: bool
) -> None:
    """Errors of both signs: the two differ by more than the bound, as where activations are squared."""
    like = torch.empty(0, dtype=torch.bfloat16)

    def check() -> float:
        return compare(
            "layer", CALLS, _off(TOKENS, -theirs), _off(TOKENS, ours), like, exact=lambda: _identity
        )

    if passes:
        assert check() == pytest.approx(ours + theirs, abs=0.05)
    else:
        with pytest.raises(InjectionError, match="off by 0.8"):
            check()


def test_a_model_that_overflows_by_itself_is_told_so() -> None:
    with pytest.raises(InjectionError, match="original layer returns NaN or infinity in float16"):
        compare("layer", CALLS, _off(1, float("inf")), _identity, torch.empty(0, dtype=torch.float16))


def test_a_recorded_call_is_what_the_forward_was_given_and_answered_between_hooks() -> None:
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, output: output.mul_(2))
    found = Found("0", layer, 0, "", None, None, "")
    tables = (layer._forward_hooks, layer._forward_pre_hooks)
    before = [dict(table) for table in tables]
    alone = call_alone(found, 4)
    within = record_calls(nn.Sequential(layer), [found], [{"input": torch.zeros(2, 3, 4)}])["0"]
    assert len(alone) == len(within) == 1 and before == [dict(table) for table in tables]
    for call in (*alone, *within):
        torch.testing.assert_close(call.output, layer.forward(call.args[0]))

"""Tokens that may not be chosen at some lengths of a sequence, whatever their scores.

Shapes: K suppressed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FOREVER", "Rule", "Suppression"]

FOREVER = 1 << 62
"""A length that no sequence reaches."""


@dataclass(frozen=True)
class Rule:
    """A rule that forbids, or exclusively allows, some tokens at a range of lengths.

    Attributes:
        tokens: Token ids; ids outside of the vocabulary are ignored.
        begin: The first sequence length, in tokens so far, at which the rule applies.
        end: The first length at which the rule no longer applies.
        only: If true, only these tokens may be chosen, overriding earlier rules; if false, they may not be.
    """

    tokens: tuple[int, ...]
    begin: int = 0
    end: int = FOREVER
    only: bool = False


class Suppression:
    """The tokens that rules, applied one after another, suppress at each length.

    Attributes:
        is_total: Whether there is a length at which all tokens are suppressed.
    """

    def __init__(self, rules: Sequence[Rule], vocabulary: int, device: torch.device) -> None:
        """Compute the suppressed tokens for each length at which they change.

        Args:
            rules: The rules in order.
            vocabulary: V.
            device: Device of the returned tensors.
        """
        changes = {0} | {length for rule in rules for length in (rule.begin, rule.end) if length > 0}
        self._begins = sorted(changes - {FOREVER})
        self._tokens = [_suppressed(rules, begin, vocabulary).to(device) for begin in self._begins]
        self.is_total = any(tokens.numel() == vocabulary for tokens in self._tokens)

    def at(self, length: int) -> tuple[Tensor | None, int]:
        """Return the tokens that may not follow a sequence of a given length.

        Args:
            length: The number of tokens so far.

        Returns:
            Ids `(K,)` int64 in ascending order, the same tensor while nothing changes, or None if there are
            none; and the next length at which this may change.
        """
        part = sum(begin <= length for begin in self._begins)
        tokens = self._tokens[part - 1]
        end = self._begins[part] if part < len(self._begins) else FOREVER
        return (tokens if tokens.numel() else None), end


def _suppressed(rules: Sequence[Rule], length: int, vocabulary: int) -> Tensor:
    """Return the ids `(K,)` int64, in ascending order, that may not be chosen at a length."""
    suppressed = torch.zeros(vocabulary, dtype=torch.bool, device="cpu")
    for rule in rules:
        if rule.begin <= length < rule.end:
            suppressed = torch.ones_like(suppressed) if rule.only else suppressed
            known = [token for token in rule.tokens if 0 <= token < vocabulary]
            suppressed[torch.tensor(known, dtype=torch.int64, device="cpu")] = not rule.only
    return suppressed.nonzero().flatten()

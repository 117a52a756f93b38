"""Tokens that may not be chosen at some lengths of a sequence, whatever they score.

Shapes: K tokens that are suppressed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FOREVER", "Rule", "Suppression"]

FOREVER = 1 << 62
"""A length that no sequence has."""


@dataclass(frozen=True)
class Rule:
    """Some tokens, and the lengths at which they are concerned.

    Attributes:
        tokens: Those outside of the vocabulary are ignored.
        begin: The first length, of the tokens so far.
        end: The first one that is none any more.
        only: No others may be chosen, whatever earlier rules say; else none of them may.
    """

    tokens: tuple[int, ...]
    begin: int = 0
    end: int = FOREVER
    only: bool = False


class Suppression:
    """What some rules, one after another, leave to be chosen.

    Attributes:
        is_total: There is a length at which nothing is left.
    """

    def __init__(self, rules: Sequence[Rule], vocabulary: int, device: torch.device) -> None:
        """Work out each length at which something changes.

        Args:
            rules: In order.
            vocabulary: V.
            device: Where tokens are wanted.
        """
        changes = {0} | {length for rule in rules for length in (rule.begin, rule.end) if length > 0}
        self._begins = sorted(changes - {FOREVER})
        self._tokens = [_suppressed(rules, begin, vocabulary).to(device) for begin in self._begins]
        self.is_total = any(tokens.numel() == vocabulary for tokens in self._tokens)

    def at(self, length: int) -> tuple[Tensor | None, int]:
        """What may not follow so many tokens.

        Args:
            length: Of the sequence so far.

        Returns:
            Rising ids `(K,)` int64, the same tensor while nothing changes, or None for none; and the next
            length at which this may be otherwise.
        """
        part = sum(begin <= length for begin in self._begins)
        tokens = self._tokens[part - 1]
        end = self._begins[part] if part < len(self._begins) else FOREVER
        return (tokens if tokens.numel() else None), end


def _suppressed(rules: Sequence[Rule], length: int, vocabulary: int) -> Tensor:
    """The ids `(K,)` int64 that may not be chosen at a length, rising."""
    out = torch.zeros(vocabulary, dtype=torch.bool, device="cpu")
    for rule in rules:
        if rule.begin <= length < rule.end:
            out = torch.ones_like(out) if rule.only else out
            known = [token for token in rule.tokens if 0 <= token < vocabulary]
            out[torch.tensor(known, dtype=torch.int64, device="cpu")] = not rule.only
    return out.nonzero().flatten()

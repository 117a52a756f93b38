"""Decides which tokens run in the next step: prompts first, in chunks, then one token per sequence.

Plain Python, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Chunk", "Schedule"]


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence that run in the next step.

    Attributes:
        row: The sequence's row in the batch.
        start: Position of the first token.
        count: Number of tokens.
        is_last: The sequence has no known token after these, so the last token's logits are needed.
    """

    row: int
    start: int
    count: int
    is_last: bool


@dataclass
class _Sequence:
    known: int
    done: int = 0


@dataclass
class Schedule:
    """The state of a batch: how many tokens of each sequence are known, and how many have run.

    Attributes:
        token_budget: Maximum number of tokens per step; a longer prompt runs in chunks.
    """

    token_budget: int
    _sequences: dict[int, _Sequence] = field(default_factory=dict)

    def add(self, row: int, tokens: int, done: int = 0) -> None:
        """Admit a sequence with `tokens` known tokens, of which the first `done` have run."""
        self._sequences[row] = _Sequence(tokens, done)

    def append(self, rows: Sequence[int], count: int = 1) -> None:
        """Add `count` known tokens to each of these sequences; all but the last of them have run."""
        for row in rows:
            self._sequences[row].known += count
            self._sequences[row].done += count - 1

    def hold(self, row: int, known: int, same: int) -> None:
        """Set a sequence's known tokens, of which the first `same` are as before; the last has not run."""
        sequence = self._sequences[row]
        sequence.known, sequence.done = known, min(sequence.done, same, known - 1)

    def finish(self, row: int) -> None:
        """Remove a sequence."""
        del self._sequences[row]

    @property
    def rows(self) -> list[int]:
        """Rows of the sequences that are running."""
        return list(self._sequences)

    @property
    def behind(self) -> int:
        """How many known tokens have not run."""
        return sum(s.known - s.done for s in self._sequences.values())

    @property
    def is_behind(self) -> bool:
        """Whether some sequence has a token that has not run."""
        return any(s.known > s.done for s in self._sequences.values())

    def decode(self) -> list[int]:
        """Begin a step of one token per running sequence and return their rows; empty if not possible."""
        sequences = self._sequences.values()
        if len(sequences) > self.token_budget or any(s.known - s.done != 1 for s in sequences):
            return []
        for sequence in sequences:
            sequence.done += 1
        return list(self._sequences)

    def next(self, but: int = 0) -> list[Chunk]:
        """Begin the next step: as many known tokens as the budget allows, in the order of the sequences.

        A long prompt is not cut before its last token: alone, that would be computed like a new token, which
        differs where steps of a state space are bounded in prompts only.

        Args:
            but: The number of each sequence's last tokens that the step must not have.
        """
        chunks: list[Chunk] = []
        left = self.token_budget
        for row, sequence in self._sequences.items():
            rest = sequence.known - sequence.done - but
            count = min(left, rest)
            if rest > 1 and (count == 1 or (count > 2 and rest - count == 1)):
                count -= 1 if chunks or count > 1 else 0
            if count > 0:
                chunks.append(Chunk(row, sequence.done, count, sequence.done + count == sequence.known))
                sequence.done += count
                left -= count
        return chunks

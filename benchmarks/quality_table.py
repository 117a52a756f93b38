"""The table of `results/quality.json` for docs/formats.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["render"]

_HEAD = (
    "| format | size (MB) | perplexity | change | KL divergence | same best token | encoder cosine |\n"
    "|---|---:|---:|---:|---:|---:|---:|\n"
)


def render(results: Mapping[str, Any]) -> str:
    """Render one row for each format, as Markdown."""
    return _HEAD + "".join(
        f"| {row['format']} | {row['bytes'] / 1e6:.0f} | {row['perplexity']:.2f} "
        f"| {row['perplexity_change_percent']:+.2f} % | {row['kl_divergence']:.4f} "
        f"| {row['same_best_token_percent']:.1f} % | {row['encoder_cosine']:.4f} |\n"
        for row in results["rows"]
    )

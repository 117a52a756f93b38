"""Ranks that share one model: their groups, the part of the model that each holds, and their collectives."""

from __future__ import annotations

from slipstream.parallel.mesh import ALONE, Axis, Mesh, open_mesh
from slipstream.parallel.shard import Share, Slice, Turns, loads_of, share_of, spread

__all__ = ["ALONE", "Axis", "Mesh", "Share", "Slice", "Turns", "loads_of", "open_mesh", "share_of", "spread"]

"""Streams layers that do not fit: each is loaded into a bay before it runs, and the next ones are prefetched.

A layer's tensors are views of its bay, at addresses that never change; they hold its values only between
`Lease.__enter__` and `Lease.__exit__`. The prefetch order is learned from the order in which layers ran.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.devices import Device
from slipstream.errors import DeviceError, UnsupportedError
from slipstream.model.streaming.bays import Bay, Extent, Spill, Stored, in_host_memory, lay_out, open_bays

__all__ = ["Lease", "Locate", "Offload", "Schedule", "Streamer"]

Locate = Callable[[Tensor], tuple[int, int] | None]
"""Finds the file in which a contiguous tensor is stored already: descriptor and first byte, or None."""

Put = Callable[[Sequence[Tensor]], None]
"""Receives the views of a bay that replace a layer's tensors."""


@dataclass(frozen=True)
class Offload:
    """The configuration of the streamer.

    Attributes:
        to: Where layers are stored: host memory ("cpu") or files ("nvme").
        folder: Folder for new files; None for the system's temporary folder.
        buffers: Number of bays.
        pinned: Host memory is page-locked.
        least: Tensors with fewer elements stay on the device.
    """

    to: Literal["cpu", "nvme"]
    folder: Path | None
    buffers: int
    pinned: bool
    least: int


@dataclass(frozen=True)
class _View:
    """Layout of a tensor in a bay; `swapped` means that the last two axes are swapped in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    swapped: bool

    def of(self, memory: Tensor, offset: int) -> Tensor:
        """Return the view that begins at byte `offset` of a bay."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        tensor = memory[offset : offset + size].view(self.dtype).view(self.shape)
        return tensor.mT if self.swapped else tensor


class Lease(AbstractContextManager[None]):
    """Context in which a layer's tensors hold their values; reentrant, also from several threads."""

    def __init__(self, streamer: Streamer, layer: int) -> None:
        """Make the lease of one layer."""
        self._streamer, self._layer = streamer, layer

    def __enter__(self) -> None:
        """Load the layer or wait until it is loaded, and keep it in its bay."""
        self._streamer.schedule.acquire(self._layer)

    def __exit__(self, *_: object) -> None:
        """Release the layer; kernels that were launched before may still read it."""
        self._streamer.schedule.release(self._layer)


class Streamer:
    """Takes over layers one by one, and streams them after `start`.

    Attributes:
        schedule: Assignment of layers to bays.
        device: Device on which the layers run.
        offload: The configuration.
    """

    def __init__(self, device: Device, offload: Offload, locate: Locate) -> None:
        """Start without layers.

        Args:
            device: Device on which the layers run.
            offload: The configuration.
            locate: Finds tensors that a file stores in the needed form; those are not written again, unless
                the configured folder is on another disk.
        """
        self.device, self.offload, self.schedule = device, offload, Schedule()
        self._locate = locate
        self._spill: Spill | None = None
        self._put: list[tuple[tuple[_View, ...], Put]] = []
        weakref.finalize(self, self.schedule.close).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Streamer:
        """Refuse: bays cannot be shared with a copy.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "an engine with streamed layers cannot be copied; build another one from the checkpoint"
        )

    def describe(self) -> str:
        """Return the description for the report."""
        layers, bays = self.schedule.layers, self.schedule.bays
        size, room = sum(one.size for one in layers), sum(bay.memory.numel() for bay in bays)
        where = "host memory" if any(one.host is not None for one in layers) else "files"
        made = "" if self._spill is None else f" ({self._spill.size / 1e6:.1f} MB of it in a temporary file)"
        return (
            f"{len(layers)} layers of {size / 1e6:.1f} MB in total are streamed from {where}{made} through "
            f"{len(bays)} buffers of {room / 1e6:.1f} MB"
        )

    def keep(self, tensors: Sequence[Tensor], put: Put) -> Lease:
        """Take over a layer's tensors.

        Args:
            tensors: The tensors with their values; no reference to them is kept.
            put: Called by `start` with the views of a bay that replace them, in order.

        Raises:
            WeightError: They cannot be written to the configured folder.
        """
        views, flat = [], []
        for tensor in tensors:
            swapped = tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
            plain = (tensor.mT if swapped else tensor).detach().contiguous()
            views.append(_View(tuple(plain.shape), plain.dtype, swapped))
            flat.append(plain)
        if self.offload.to == "cpu" and self.device.name != "cpu":
            stored = in_host_memory(flat, pinned=self.offload.pinned)
        else:
            stored = lay_out([self._place(tensor) for tensor in flat])
        self._put.append((tuple(views), put))
        self.schedule.layers.append(stored)
        return Lease(self, len(self._put) - 1)

    def _place(self, tensor: Tensor) -> Extent:
        """Return the extent of a tensor in a file that stores it already, or write it to the spill file."""
        folder = self.offload.folder
        found = self._locate(tensor) if tensor.device.type == "cpu" else None
        if found is not None and (folder is None or os.fstat(found[0]).st_dev == folder.stat().st_dev):
            return Extent(*found, tensor.nbytes)
        if self._spill is None:
            self._spill = Spill(folder)
        return self._spill.write(tensor)

    def start(self) -> None:
        """Open the bays; from now on leases can be entered.

        Raises:
            DeviceError: There is no room for the bays.
        """
        layers = self.schedule.layers
        count = max(1, min(self.offload.buffers, len(layers)))
        # At least a byte: a layer whose matrices all stay on the device has nothing to stream.
        sizes = [max([1, *(one.size for one in layers[place::count])]) for place in range(count)]
        bays = open_bays(sizes, self.device, pinned=self.offload.pinned)
        for index, (views, put) in enumerate(self._put):
            offsets = layers[index].offsets
            memory = bays[index % count].memory
            put([view.of(memory, at) for view, at in zip(views, offsets, strict=True)])
        self._put.clear()
        self.schedule.open(bays)


class Schedule:
    """Loads layers into bays and prefetches the next ones; layer n uses bay n modulo the number of bays.

    Attributes:
        layers: The stored layers.
        bays: The bays.
    """

    def __init__(self) -> None:
        """Start without layers and bays."""
        self.layers: list[Stored] = []
        self.bays: list[Bay] = []
        self._follower: dict[int, int] = {}
        self._last = 0
        self._closed = False
        self.begin()
        _SCHEDULES.add(self)

    def begin(self) -> None:
        """Begin with empty bays and no threads, also in a forked child, which has none of its parent's."""
        self._changed = threading.Condition()
        self._fills = threading.Lock()  # one load at a time: loads share a disk and the staging memory
        self._reader: threading.Thread | None = None
        for bay in self.bays:
            bay.layer, bay.filling, bay.users = None, False, 0

    def open(self, bays: Sequence[Bay]) -> None:
        """Set the bays; at first, layers are assumed to run in order."""
        self.bays = list(bays)
        self._follower = {index: (index + 1) % len(self.layers) for index in range(len(self.layers))}

    def close(self) -> None:
        """Let the prefetching thread end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def acquire(self, layer: int) -> None:
        """Load a layer into its bay, or wait until it is loaded, and keep it there until `release`.

        Raises:
            DeviceError: The layer cannot be read.
        """
        bay = self.bays[layer % len(self.bays)]
        with self._changed:
            if self._last != layer:
                self._follower[self._last] = layer
                self._last = layer
            while bay.layer != layer or bay.filling:
                if bay.filling or bay.users:
                    self._changed.wait()
                else:
                    self._fill(bay, layer)
            bay.users += 1
        kept = False
        try:
            with self._changed:
                self._read_ahead()
            bay.lane.arrive()
            kept = True
        finally:
            if not kept:  # interrupted by a signal: the caller would never release it
                self._leave(bay)

    def release(self, layer: int) -> None:
        """Release a layer, so that its bay can be reused."""
        bay = self.bays[layer % len(self.bays)]
        try:
            bay.lane.leave()
        finally:
            self._leave(bay)

    def _leave(self, bay: Bay) -> None:
        with self._changed:
            bay.users = max(bay.users - 1, 0)  # 0: it forked while it computed with the layer
            self._changed.notify_all()

    def _fill(self, bay: Bay, layer: int) -> None:
        """Load a layer into a free bay; called with the lock held, which is released during the load."""
        bay.layer, bay.filling = layer, True
        self._changed.release()
        done = False
        try:
            with self._fills:
                bay.fill(self.layers[layer])
            done = True
        finally:
            self._changed.acquire()
            bay.filling = False
            bay.layer = layer if done else None
            self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Start the prefetching thread if there are several bays and it is not running, and wake it."""
        if len(self.bays) > 1 and (self._reader is None or not self._reader.is_alive()):
            self._reader = threading.Thread(target=self._keep_reading, name="slipstream-stream", daemon=True)
            self._reader.start()
        self._changed.notify_all()

    def _keep_reading(self) -> None:
        with self._changed:
            while not self._closed:
                pending = self._next()
                if pending is None:
                    self._changed.wait()
                    continue
                try:
                    self._fill(*pending)
                except DeviceError:  # `acquire` will read the layer again and raise the error
                    self._changed.wait()

    def _next(self) -> tuple[Bay, int] | None:
        """The next layer in order that is not loaded and whose bay is free, with its bay; or None."""
        layer = self._last
        for _ in range(len(self.bays) - 1):
            layer = self._follower[layer]
            bay = self.bays[layer % len(self.bays)]
            if bay.layer != layer and not bay.filling and not bay.users:
                return bay, layer
        return None


_SCHEDULES: weakref.WeakSet[Schedule] = weakref.WeakSet()


def _begin_child() -> None:
    for schedule in list(_SCHEDULES):
        schedule.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)

"""Streams layers that do not fit: each is brought into a bay before it runs, and the next ones meanwhile.

A layer's tensors are views of its bay, at addresses that never change; they have its values only between
`Lease.__enter__` and `Lease.__exit__`. Which layers come next is learned from the order in which they ran.
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
"""Where a contiguous tensor lies in a file already: descriptor and first byte."""

Put = Callable[[Sequence[Tensor]], None]
"""Takes the views of a bay that a layer's tensors have become."""


@dataclass(frozen=True)
class Offload:
    """What the configuration asks of the streamer.

    Attributes:
        to: Host memory, or files.
        folder: Where files are made; None where the system keeps temporary ones.
        buffers: Bays.
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
    """A tensor as it lies in a bay: its memory, read with the last two axes swapped where `swapped`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    swapped: bool

    def of(self, memory: Tensor, offset: int) -> Tensor:
        """The view that begins at a byte of a bay."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        tensor = memory[offset : offset + size].view(self.dtype).view(self.shape)
        return tensor.mT if self.swapped else tensor


class Lease(AbstractContextManager[None]):
    """Within, a layer's tensors have their values. Can be entered again, and by several threads."""

    def __init__(self, streamer: Streamer, layer: int) -> None:
        """Of one layer."""
        self._streamer, self._layer = streamer, layer

    def __enter__(self) -> None:
        """Wait until the layer is there, and keep it."""
        self._streamer.schedule.acquire(self._layer)

    def __exit__(self, *_: object) -> None:
        """Let it go; what was launched before may still read it."""
        self._streamer.schedule.release(self._layer)


class Streamer:
    """Takes layers over one by one, and streams them once all are there.

    Attributes:
        schedule: Who is in which bay.
        device: Where they are computed with.
        offload: What was asked for.
    """

    def __init__(self, device: Device, offload: Offload, locate: Locate) -> None:
        """Take nothing yet.

        Args:
            device: Where the layers are computed with.
            offload: What was asked for.
            locate: Finds tensors that lie in a file as they are needed; those are not written again, unless
                another disk was asked for.
        """
        self.device, self.offload, self.schedule = device, offload, Schedule()
        self._locate = locate
        self._spill: Spill | None = None
        self._put: list[tuple[tuple[_View, ...], Put]] = []
        weakref.finalize(self, self.schedule.close).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Streamer:
        """Refuse: bays are not shared.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "an engine whose layers are streamed cannot be copied; build another one from the checkpoint"
        )

    def describe(self) -> str:
        """What the report says."""
        layers, bays = self.schedule.layers, self.schedule.bays
        size, room = sum(one.size for one in layers), sum(bay.memory.numel() for bay in bays)
        where = "host memory" if any(one.host is not None for one in layers) else "files"
        made = "" if self._spill is None else f" ({self._spill.size / 1e6:.1f} MB of it written for this)"
        return (
            f"{len(layers)} layers of {size / 1e6:.1f} MB together are streamed from {where}{made} through "
            f"{len(bays)} buffers of {room / 1e6:.1f} MB"
        )

    def keep(self, tensors: Sequence[Tensor], put: Put) -> Lease:
        """Take a layer's tensors over.

        Args:
            tensors: As they are; nothing of them is held afterwards.
            put: Called with their views of a bay, in order, when `start` makes them.

        Raises:
            WeightError: They cannot be written where they are to lie.
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
        """Where a tensor lies in a file, or is written to."""
        folder = self.offload.folder
        found = self._locate(tensor) if tensor.device.type == "cpu" else None
        if found is not None and (folder is None or os.fstat(found[0]).st_dev == folder.stat().st_dev):
            return Extent(*found, tensor.nbytes)
        if self._spill is None:
            self._spill = Spill(folder)
        return self._spill.write(tensor)

    def start(self) -> None:
        """Make the bays; from now on leases can be taken.

        Raises:
            DeviceError: There is no room for them.
        """
        layers = self.schedule.layers
        count = max(1, min(self.offload.buffers, len(layers)))
        sizes = [max((one.size for one in layers[place::count]), default=1) for place in range(count)]
        bays = open_bays(sizes, self.device, pinned=self.offload.pinned)
        for index, (views, put) in enumerate(self._put):
            offsets = layers[index].offsets
            memory = bays[index % count].memory
            put([view.of(memory, at) for view, at in zip(views, offsets, strict=True)])
        self._put.clear()
        self.schedule.open(bays)


class Schedule:
    """Who is in which bay: layer n in bay n modulo their number, as long as nobody needs the bay otherwise.

    Attributes:
        layers: Where they lie.
        bays: Where they are brought.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.layers: list[Stored] = []
        self.bays: list[Bay] = []
        self._changed = threading.Condition()
        self._fills = threading.Lock()  # one at a time: they share a disk, and memory on the way
        self._follower: dict[int, int] = {}
        self._last = 0
        self._reader: threading.Thread | None = None
        self._closed = False

    def open(self, bays: Sequence[Bay]) -> None:
        """Begin."""
        self.bays = list(bays)
        self._follower = {index: (index + 1) % len(self.layers) for index in range(len(self.layers))}

    def close(self) -> None:
        """Let the thread that reads ahead end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def acquire(self, layer: int) -> None:
        """Wait until a layer is in its bay, or bring it, and keep it there.

        Raises:
            DeviceError: It cannot be read.
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
            if not kept:  # as a signal comes: nobody would release it
                self._leave(bay)

    def release(self, layer: int) -> None:
        """Let it go."""
        bay = self.bays[layer % len(self.bays)]
        try:
            bay.lane.leave()
        finally:
            self._leave(bay)

    def _leave(self, bay: Bay) -> None:
        with self._changed:
            bay.users -= 1
            self._changed.notify_all()

    def _fill(self, bay: Bay, layer: int) -> None:
        """Bring a layer into a bay that is free; the lock is held, and let go meanwhile."""
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
        """See to it that somebody reads what comes next, where there is a bay for it."""
        if len(self.bays) > 1 and (self._reader is None or not self._reader.is_alive()):
            self._reader = threading.Thread(target=self._keep_reading, name="slipstream-stream", daemon=True)
            self._reader.start()
        self._changed.notify_all()

    def _keep_reading(self) -> None:
        with self._changed:
            while not self._closed:
                found = self._next()
                if found is None:
                    self._changed.wait()
                    continue
                try:
                    self._fill(*found)
                except DeviceError:  # whoever needs the layer reads it again, and hears of it
                    self._changed.wait()

    def _next(self) -> tuple[Bay, int] | None:
        """The nearest layer that is not there and whose bay is free."""
        layer = self._last
        for _ in range(len(self.bays) - 1):
            layer = self._follower[layer]
            bay = self.bays[layer % len(self.bays)]
            if bay.layer != layer and not bay.filling and not bay.users:
                return bay, layer
        return None

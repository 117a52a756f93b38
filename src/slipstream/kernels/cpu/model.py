"""A whole causal language model in one native call: embedding, blocks, final norm, head and next token.

Shapes: T packed tokens, R rows that need logits, C hidden, V vocabulary.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi, abi_model
from slipstream.kernels.cpu.abi import address
from slipstream.kernels.cpu.angles import KeptAngles
from slipstream.kernels.cpu.blocks import Prepared
from slipstream.kernels.cpu.caches import pages_of_layers, serves_caches, step_over
from slipstream.kernels.cpu.draw import Drawing, check
from slipstream.kernels.cpu.frames import FrameLike, refuse_frame, struct_of_frame
from slipstream.kernels.cpu.leases import Turns
from slipstream.kernels.cpu.library import rest_torch
from slipstream.kernels.cpu.paged_attention import serves
from slipstream.kernels.cpu.progress import reporting
from slipstream.kernels.cpu.screen import Screens
from slipstream.kernels.cpu.sketch import SketchFormat
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.ops.kv_cache import Caches
from slipstream.ops.noise import RowNoise
from slipstream.ops.penalty import RowPenalty
from slipstream.ops.step import Step

__all__ = ["NativeModel", "NativeSession", "bind_model"]


def bind_model(frame: FrameLike, stack: Any, sketch: SketchFormat | None = None) -> NativeModel | None:
    """Return the runner of whole steps of a model, or None if its parts must run one by one.

    Args:
        frame: The embedding, positions, final norm and head around the layers.
        stack: Runs the layers.
        sketch: Format of the sketch of the vocabulary projection that greedy steps of single sequences read
            first; None if they read the whole projection.
    """
    if not isinstance(stack, NativeStack):
        return None
    return NativeModel(frame, stack, screens=None if sketch is None else Screens(sketch, stack.library))


@dataclass(frozen=True)
class NativeModel:
    """Starts generations whose steps are native calls.

    Attributes:
        frame: The embedding, positions, final norm and head around the layers.
        stack: Runs the layers.
        angles: Rotary tables that the generations share.
        screens: The shared screen of the vocabulary projection; None if every step reads all of the latter.
    """

    frame: FrameLike
    stack: NativeStack
    angles: KeptAngles = field(default_factory=KeptAngles, compare=False)
    screens: Screens | None = field(default=None, compare=False)

    def begin(self, caches: Caches, longest: int) -> NativeSession | None:
        """Prepare the steps of one generation, or return None if the library cannot run them.

        Args:
            caches: What each layer keeps.
            longest: Maximum number of positions that the generation may reach.
        """
        prepared = self.stack.ready()
        if prepared is None or refuse_frame(self.frame) or not serves_caches(self.stack.blocks, caches):
            return None
        return NativeSession(self, prepared, caches, longest)


class NativeSession:
    """The steps of one generation.

    The address of every tensor is read once, when the session begins, and the tensors are kept alive until it
    ends: if the model is moved, cast or reloaded meanwhile, that takes effect from the next generation on.
    """

    def __init__(self, model: NativeModel, prepared: Prepared, caches: Caches, longest: int) -> None:
        """Fill in the parts of the call that do not change from step to step."""
        frame, matrices, norms = model.frame, model.frame.matrices(), model.frame.norms()
        self._frame, self._stack, self._prepared, self._longest = frame, model.stack, prepared, longest
        self._library, self._caches, self._kept_angles = model.stack.library, tuple(caches), model.angles
        self._struct, self._memory = struct_of_frame(frame)
        self._vocabulary = int(self._struct.head.outputs)
        tables = (frame.pos_table, frame.type_row, frame.logit_bias)
        count = len(prepared.weights)
        self._call = abi_model.ModelCall(frame=ctypes.pointer(self._struct))
        stack = self._call.stack
        stack.blocks = ctypes.cast(prepared.blocks, ctypes.POINTER(abi.Block))
        stack.num_blocks = count
        stack.caches, stack.cache_dtype = pages_of_layers(model.stack.blocks, caches)
        stack.num_tables = len(prepared.ropes)
        norm_tensors = (t for v in norms.values() for t in (v.weight, v.bias))
        matrix_tensors = (t for w in matrices.values() for t in (*w.planes, w.bias))
        tensors = [t for t in (*tables, *norm_tensors, *matrix_tensors) if t is not None]
        # Detached views keep the memory alive even if the tensors themselves get other storage.
        self._kept = [t.detach() for t in (*prepared.tensors, *tensors)]
        self._turns = Turns.of(model.stack.blocks)
        if self._turns is not None:
            self._turns.point(stack)
        scale, softcap = self._struct.logit_scale, self._struct.softcap
        screens = model.screens if self._turns is None else None
        self._screening = (
            None
            if screens is None
            else screens.begin(
                matrices["head"], scale, softcap, at_end=matrices.keys().isdisjoint({"project_out", "join.0"})
            )
        )
        self._rows = 0
        self._tables: Any = None
        self._angles: list[tuple[Tensor, ...]] = []
        self._step: tuple[Tensor, ...] = ()
        self._served = False
        self._ends: tuple[tuple[int, ...], Any] | None = None
        self._suppressed: Tensor | None = None

    def logits(self, step: Step) -> Tensor | None:
        """Run one step and return its logits.

        Args:
            step: Its tensors may be static buffers.

        Returns:
            `(R, V)` float32; None if other implementations are faster, or the library cannot read the step.

        Raises:
            DeviceError: The step points outside of the cache, the vocabulary or the positions.
        """
        if not self._takes(step):
            return None
        out = torch.empty(step.logit_rows.shape[0], self._vocabulary, dtype=torch.float32, device="cpu")
        call = self._call
        call.best, call.draw, call.logits, call.steps = None, None, out.data_ptr(), 1
        rest_torch()
        self._run()
        return out

    def suppress(self, tokens: Tensor | None) -> None:
        """Exclude some tokens from the choice in all further steps.

        Args:
            tokens: Ascending ids `(K,)` int64, contiguous, below V; None to exclude none.
        """
        self._suppressed, call = tokens, self._call
        call.suppressed, call.num_suppressed = address(tokens), 0 if tokens is None else len(tokens)

    def best(
        self,
        step: Step,
        steps: int = 1,
        ends: Sequence[int] = (),
        on_tokens: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Run one greedy step and, if it has one token per sequence, the steps that follow it.

        Args:
            step: Not modified; its block table must have room for the tokens that follow.
            steps: Maximum number of steps.
            ends: Stop tokens: no further step is run once one of them is the best token of any sequence.
            on_tokens: Called with the tokens `(R,)` of each step but the last as soon as they are known. If
                blocks hold their matrices on lease, only one step is run: `on_tokens` may start another
                generation, which would wait for a matrix that the running call has leased.

        Returns:
            The first token of the highest logit per row, `(R, steps run)` int64; or None as in `logits`.

        Raises:
            DeviceError: As `logits`. What `on_tokens` raises is raised, too, once the steps have ended.
        """
        return self._tokens(step, steps, ends, on_tokens, None)

    def drawn(
        self,
        step: Step,
        numbers: Tensor,
        noise: RowNoise,
        steps: int = 1,
        ends: Sequence[int] = (),
        on_tokens: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Run one step and those that follow it like `best`, but sample the tokens.

        Args:
            step: As in `best`.
            numbers: The sampling parameters, from `ops.draw.Warp.numbers`.
            noise: For the step's rows; torch's generator ends up as if only the steps run had drawn.
            steps: Maximum number of steps.
            ends: As in `best`.
            on_tokens: As in `best`.

        Raises:
            DeviceError: As `best`.
            RequestError: The logits of a row are NaN or infinite.
        """
        return self._tokens(step, steps, ends, on_tokens, lambda most: Drawing(numbers, noise, most))

    def penalised(
        self,
        step: Step,
        penalty: RowPenalty,
        numbers: Tensor,
        noise: RowNoise | None,
        steps: int = 1,
        ends: Sequence[int] = (),
        on_tokens: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Run steps like `drawn`, or like `best` without noise, with a repetition penalty on the scores.

        Args:
            step: As in `best`.
            penalty: For the step's rows; the tokens of each step are added to it.
            numbers: The sampling parameters, from `ops.draw.Warp.numbers`; applied to the penalised scores.
            noise: As in `drawn`; None to take the best tokens.
            steps: Maximum number of steps.
            ends: As in `best`.
            on_tokens: As in `best`.

        Raises:
            DeviceError: As `best`.
            RequestError: As `drawn`.
        """
        return self._tokens(step, steps, ends, on_tokens, lambda most: Drawing(numbers, noise, most, penalty))

    def _tokens(
        self,
        step: Step,
        steps: int,
        ends: Sequence[int],
        on_tokens: Callable[[Tensor], None] | None,
        draws: Callable[[int], Drawing] | None,
    ) -> Tensor | None:
        """Run up to `steps` steps; take the best tokens, or sample with the `Drawing` that `draws` makes."""
        if on_tokens is not None and self._turns is not None:
            steps = 1
        if not self._takes(step, steps - 1):
            return None
        drawing = None if draws is None else draws(steps)
        steps = steps if drawing is None else drawing.steps
        out = torch.empty(step.logit_rows.shape[0], steps, dtype=torch.int64, device="cpu")
        done, call = ctypes.c_int64(1), self._call
        if self._ends is None or self._ends[0] != ends:
            self._ends = (tuple(ends), (ctypes.c_int64 * len(ends))(*ends))
        call.best, call.logits, call.steps = out.data_ptr(), None, steps
        call.draw = None if drawing is None else ctypes.pointer(drawing.struct)
        call.ends, call.num_ends = ctypes.addressof(self._ends[1]), len(ends)
        call.done = ctypes.addressof(done)
        screening = self._screening if drawing is None and call.rows == 1 else None
        recorded = None if screening is None else screening.point(call, steps)
        start = time.perf_counter()
        rest_torch()
        try:
            with nullcontext() if on_tokens is None or steps == 1 else reporting(call, out, on_tokens):
                self._run()
        finally:
            call.screen, call.entered, call.looked = None, None, None
            if drawing is not None:
                drawing.end(done.value)
        tokens = out if done.value == steps else out[:, : done.value]
        if screening is not None and recorded is not None:
            screening.end(recorded, tokens[0], time.perf_counter() - start)
        if drawing is not None:
            check(tokens[:, -1])
        return tokens

    def _run(self) -> None:
        self._library.run("model", self._call)
        if self._turns is not None:
            self._turns.check()

    def _takes(self, step: Step, more: int = 0) -> bool:
        """Point the call to a step and its rotary tables; return whether the library can run it."""
        if not 0 < step.token_ids.shape[0] <= self._stack.most_tokens or not self._point(step):
            return False
        if self._struct.embed_end and int(step.token_ids.max()) >= self._struct.embed_end:
            return False
        return self._turn(step, more)

    def _point(self, step: Step) -> bool:
        """Point the call to a step's tensors, if not yet done; return whether the library reads them."""
        longs = (step.token_ids, step.positions, step.logit_rows)
        tensors = (*longs, step.query_starts, step.kv_lens, step.block_table, step.slots)
        if len(tensors) == len(self._step) and all(a is b for a, b in zip(tensors, self._step, strict=True)):
            return self._served
        self._step = tensors
        self._served = (
            serves(step)
            and all(t.dtype == torch.int64 and t.is_contiguous() for t in longs)
            and step.token_ids.shape == step.positions.shape == step.slots.shape
            and step.logit_rows.numel() > 0
        )
        if self._served:
            call = self._call
            call.stack.step = step_over(self._stack.blocks, self._caches, step)
            call.token_ids, call.positions, call.logit_rows = (t.data_ptr() for t in longs)
            call.rows = step.logit_rows.shape[0]
        return self._served

    def _turn(self, step: Step, more: int) -> bool:
        """Make the rotary tables cover a step and `more` further steps; return whether they can."""
        ropes, last = self._prepared.ropes, step.max_kv_len + step.beyond + more
        if not ropes:
            return True
        if self._frame.angles_share_a_length:
            tables = self._frame.angles(step.positions, ropes)
            self._take([tuple(t.float().contiguous() for t in tables[rope]) for rope in ropes])
            return more == 0
        if last > self._rows:
            made, self._rows = self._kept_angles.of(self._frame, ropes, last, self._longest)
            self._take(made)
        self._call.stack.positions = self._call.positions
        return True

    def _take(self, angles: list[tuple[Tensor, ...]]) -> None:
        self._angles = angles
        self._tables = (abi.Table * len(angles))(
            *(abi.Table(c.data_ptr(), s.data_ptr(), *c.shape) for c, s in angles)
        )
        self._call.stack.tables = self._tables

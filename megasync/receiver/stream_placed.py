"""A publication placed for the streaming apply: blocks in host memory, two slots in HBM, one step decoded beside the other.

The mask of a step is decoded into one slot while the step before is XORed from the other; nothing else is in HBM, and no
cache of the engine is touched. A write digests the words as the XOR kernel leaves them. Which words are touched is known only
then, so by default nothing is read before the write (``Placed.blind``). Comes between ``stream_plan`` and apply. Must not
import apply.

What bounds it, by the times of the kernels of a 1.46 GB step on an H200 (``launch/bench/results/trace-stream.json.gz``): nvCOMP
takes 1.2 ms alone and 1.5 ms beside the XOR, the XOR 0.8 and 1.4 ms. Memory would allow 0.7 ms for both (a mask written and read,
32 bytes read and written for each changed byte), so they share something else, and the XOR is hidden but not free.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from megasync.errors import LiveMismatchError
from megasync.kernels.walk import dense_sums_, dense_xor_
from megasync.kernels.walk_plan import WalkPlan
from megasync.receiver.backend import Placed
from megasync.receiver.scatter_layout import DeviceLayout, packs_of
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.stream_decode import PLACES, BlockDecoder
from megasync.receiver.stream_plan import Step, idle, kernels_of, on_device
from megasync.receiver.stream_room import Room, RoomPool
from megasync.receiver.stream_slots import Slots
from megasync.receiver.sums import Sums
from megasync.schema import names_of

_Lanes = dict[tuple[int, int], torch.Tensor]
"""Sums by word size and pack: int64 ``[num_tensors, 4]`` on the device."""


class StreamPlaced(Placed):
    """See the module docstring.

    Args:
        layout: The rank.
        steps: In order.
        room: Their blocks.
        pool: Gets the room back when this is dropped.
        decoder: Decodes them.
        slots: The backend's.
        queue: Where XOR and digests go.
        num_changed: Words that it changes.
        blind: Whether the proof of the base is left to what is read back.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        steps: Sequence[Step],
        room: Room,
        pool: RoomPool,
        decoder: BlockDecoder,
        slots: Slots,
        queue: WorkQueue,
        *,
        num_changed: int,
        blind: bool,
    ) -> None:
        self.layout, self.steps, self.room = layout, tuple(steps), room
        self.decoder, self.slots, self.queue = decoder, slots, queue
        self.num_changed, self.blind = num_changed, blind
        self.nbytes = sum(int(b.nbytes.sum()) for s in steps for b in (*s.batches.values(), s.stored))
        self._done: list[tuple[int, int]] = []
        self._begun: tuple[int, int] | None = None
        self._finalizer = weakref.finalize(self, _release, queue, slots, pool, room)

    def prove(self) -> tuple[Sums, Sums]:
        """See ``Placed.prove``; decodes everything, so it takes as long as the write."""
        self._done.clear()
        lanes = self._stream(write=False)
        before, after = self._sums(lanes, 2)
        return before, after

    def arm(self) -> None:
        """See ``Placed.arm``: kernels are loaded, and the first two steps decoded."""
        with self.queue.running():
            lanes, seen = self._new_lanes(), set[object]()
            for launch in (x for s in self.steps for x in s.launches):
                plan = launch.plans[0]
                if plan is not None and not seen.issuperset(kernels_of(plan)):
                    seen.update(kernels_of(plan))
                    dense_xor_(idle(plan), self.slots.masks[0], lanes[launch.word_nbytes, 0], after=True)
            try:
                for place, step in enumerate(self.steps[:PLACES]):
                    self.slots.fill(place, step, self.room, self.decoder)
                for place, step in enumerate(self.steps[:PLACES]):
                    self.slots.finish(place, step, self.decoder)
            except BaseException:
                self._give_up()
                raise
            self.queue.wait()

    def _give_up(self) -> None:
        """Take no notice of what is still in flight, whatever it decodes to."""
        for place in range(PLACES):
            with suppress(Exception):  # a device that failed says so again
                self.decoder.finish(place)

    def xor_(self) -> None:
        """See ``Placed.xor_``; digests on the way all the same."""
        self.write_()

    def read_back(self) -> Sums:
        """See ``Placed.read_back``; decodes everything once more."""
        return self._sums(self._stream(write=False), 1)[0]

    def write_(self) -> Sums:
        """See ``Placed.write_``: new words are digested on their way into the weights; copies and replicas are read after."""
        self._done.clear()
        return self._sums(self._stream(write=True), 1)[0]

    def undo_(self) -> None:
        """See ``Placed.undo_``: launches that were made are decoded again and XORed again, newest step first.

        A launch of which nobody knows whether it began counts as not made: what is read back afterwards says so if it was.
        """
        self._begun = None
        with self.queue.running():
            self._give_up()
            while self._done:
                number = self._done[-1][0]
                mine = {k for n, k in self._done if n == number}
                self.slots.fill(0, self.steps[number], self.room, self.decoder)
                self.slots.finish(0, self.steps[number], self.decoder)
                self._launch(0, number, self._tables(number), self._new_lanes(), write=True, undo=mine)
                del self._done[-len(mine) :]
            self.queue.wait()

    def _stream(self, *, write: bool) -> _Lanes:
        """Decode all steps, and XOR or only read each while the next one is decoded.

        The device has the next step's work before it ends the one before: a step is queued as soon as its slot is spoken
        for, and tables go up behind the XOR of the step before.
        """
        with self.queue.running(after_all=True):
            lanes = self._new_lanes()
            try:
                self._steps(lanes, write)
            except BaseException:
                self._give_up()
                raise
            self.queue.wait()
        return lanes

    def _steps(self, lanes: _Lanes, write: bool) -> None:
        """Queue all steps; those that ``arm`` has decoded are not decoded again."""
        steps, held = self.steps, self.slots.held
        tables = self._tables(0)
        for number, step in enumerate(steps):
            for ahead in range(0 if number == 0 else number + 1, min(number + 2, len(steps))):
                if held[ahead % PLACES] is not steps[ahead]:
                    self.slots.fill(ahead % PLACES, steps[ahead], self.room, self.decoder)
            if held[number % PLACES] is not step:
                self.slots.finish(number % PLACES, step, self.decoder)
            self._launch(number % PLACES, number, tables, lanes, write=write)
            tables = self._tables(number + 1) if number + 1 < len(steps) else []

    def _tables(self, number: int) -> list[list[WalkPlan | None]]:
        """The plans of a step's launches with their tables on the device, queued on the current stream."""
        return [[None if p is None else on_device(p) for p in x.plans] for x in self.steps[number].launches]

    def _launch(
        self,
        place: int,
        number: int,
        tables: Sequence[Sequence[WalkPlan | None]],
        lanes: _Lanes,
        *,
        write: bool,
        undo: set[int] | None = None,
    ) -> None:
        """XOR or read one step; replicas and copies are read afterwards through packs of their own."""
        mask = self.slots.use(place)
        for k, (launch, plans) in enumerate(zip(self.steps[number].launches, tables, strict=True)):
            if undo is not None and k not in undo:
                continue
            w, places = launch.word_nbytes, plans[0]
            if write and places is not None:
                self._begun = number, k
                dense_xor_(places, mask, lanes[w, 0], after=True)
                if undo is None:
                    self._done.append((number, k))
                self._begun = None
            for i, plan in enumerate(plans):
                if plan is not None and (i or not write) and undo is None:
                    dense_sums_(plan, mask, lanes[w, i])
        self.slots.release(place)

    def _new_lanes(self) -> _Lanes:
        return {
            (w, i): torch.zeros((len(x.ids), 4), dtype=torch.int64, device=self.layout.device)
            for w, x in self.layout.words.items()
            for i in range(len(packs_of(x)))
        }

    def _sums(self, lanes: _Lanes, num: int) -> list[Sums]:
        """Sums by tensor of the live words: as they are now, and where ``num`` is 2 as they will be after the XOR.

        Args:
            lanes: From ``_stream``: of a pass that wrote, places have the words as it left them in columns 0 and 1, and
                replicas and copies were read after it.
            num: 1 or 2.
        """
        with self.queue.running():
            device = {k: x if num == 1 else _was_and_is(x) for k, x in lanes.items()}
            host = {k: torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda) for k, x in device.items()}
            for k, x in device.items():
                host[k].copy_(x, non_blocking=True)
            self.queue.wait()
        parts: list[list[Sums]] = [[] for _ in range(num)]
        for w, words in self.layout.words.items():
            own = [words.ids]
            if words.replicas is not None:
                own.append(words.ids + len(self.layout.binding.schema.tensors))
            for i, ids in enumerate(own):
                columns = host[w, i].numpy().view(np.uint64)
                for n in range(num):
                    parts[n].append(_non_zero(ids, columns[:, 2 * n : 2 * n + 2]))
            packs = range(len(own), len(packs_of(words)))
            for copy, lead in zip(packs[::2], packs[1::2], strict=True):
                wrong = (host[w, copy] != host[w, lead]).any(dim=1).numpy()
                if wrong.any():
                    raise LiveMismatchError(
                        f"{names_of(self.layout.binding.schema, words.ids[wrong])}: words at the touched positions differ "
                        "between the engine's copies of them. Load the weights anew, or correct the adapter's list of copies"
                    )
        return [Sums.join(p) for p in parts]


def _was_and_is(lanes: torch.Tensor) -> torch.Tensor:
    """Sums of words as they were and as they will be, from those of words as they were and of the change."""
    return torch.cat((lanes[:, :2], lanes[:, :2] + lanes[:, 2:]), 1)


def _non_zero(ids: np.ndarray, lanes: np.ndarray) -> Sums:
    mine = (lanes[:, 0] != 0) | (lanes[:, 1] != 0)
    return Sums(ids[mine], np.ascontiguousarray(lanes[mine]))


def _release(queue: WorkQueue, slots: Slots, pool: RoomPool, room: Room) -> None:
    """Give the room back once nothing queued reads it."""
    try:
        queue.wait()
        if slots.stream is not None:
            slots.stream.synchronize()
    except Exception:
        return  # the device is lost, and the memory with it
    pool.give(room)

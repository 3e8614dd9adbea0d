"""A publication placed for the streaming apply: blocks in host memory, two slots in HBM, one step decoded beside the other.

The mask of a step is decoded into one slot while the step before is XORed from the other; nothing else is in HBM, and no
cache of the engine is touched. Old and new words are digested by the XOR kernel itself. Which words are touched is known only
then, so by default nothing is read before the write (``Placed.blind``). Comes between ``stream_plan`` and apply. Must not
import apply.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from megasync.errors import BaseMismatchError, FormatError
from megasync.kernels.walk import dense_sums_, dense_xor_
from megasync.receiver.backend import Placed
from megasync.receiver.scatter_layout import DeviceLayout, packs_of
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.stream_decode import PLACES, BlockDecoder
from megasync.receiver.stream_plan import Step, on_device
from megasync.receiver.stream_room import Room, RoomPool
from megasync.receiver.sums import Sums
from megasync.schema import names_of

_Lanes = dict[tuple[int, int], torch.Tensor]
"""Sums by word size and pack: int64 ``[num_tensors, 4]`` on the device."""


class Slots:
    """The two slots of a backend, and the stream that fills them.

    Attributes:
        masks: uint8 ``[nbytes]`` each.
        stream: Decodes; None on the CPU.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocate.

        *Memory*: ``2 * nbytes`` of the device, for good.
        """
        self.masks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(PLACES)]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._decoded = [torch.cuda.Event() for _ in range(PLACES)] if self.stream is not None else []
        self._read: list[torch.cuda.Event | None] = [None] * PLACES
        if self.stream is not None:
            torch.cuda.current_stream(device).synchronize()

    def fill(self, place: int, step: Step, room: Room, decoder: BlockDecoder) -> None:
        """Queue everything that makes a step's masks, once the slot's last reader is done."""
        mask = self.masks[place]
        if self.stream is None:
            self._copy(mask, step, room)
            decoder.queue(place, step, room, mask, None)
            return
        before = self._read[place]
        if before is not None:
            self.stream.wait_event(before)
        with torch.cuda.stream(self.stream):
            self._copy(mask, step, room)
        decoder.queue(place, step, room, mask, self.stream)
        self._decoded[place].record(self.stream)

    @staticmethod
    def _copy(mask: torch.Tensor, step: Step, room: Room) -> None:
        """Blocks that are no decoder's business: absent and `stored` ones."""
        for a, b in step.absent:
            mask[a:b].zero_()
        host = torch.from_numpy(room.view)
        for a, b, n in zip(
            step.stored.source.tolist(), step.stored.target.tolist(), step.stored.nbytes.tolist(), strict=True
        ):
            mask[b : b + n].copy_(host[a : a + n], non_blocking=True)

    def use(self, place: int) -> torch.Tensor:
        """The masks of a place, on the current stream, after they were decoded."""
        if self.stream is not None:
            torch.cuda.current_stream(self.masks[place].device).wait_event(self._decoded[place])
        return self.masks[place]

    def release(self, place: int) -> None:
        """The slot may be filled again once the current stream has come this far."""
        if self.stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.masks[place].device))
            self._read[place] = event


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
        return self._sums(lanes, after=False, written=False), self._sums(lanes, after=True, written=False)

    def xor_(self) -> None:
        """See ``Placed.xor_``; digests on the way all the same."""
        self.write_()

    def read_back(self) -> Sums:
        """See ``Placed.read_back``; decodes everything once more."""
        return self._sums(self._stream(write=False), after=False, written=False)

    def write_(self) -> Sums:
        """See ``Placed.write_``: new words are digested on their way into the weights; copies and replicas are read after."""
        self._done.clear()
        return self._sums(self._stream(write=True), after=True, written=True)

    def undo_(self) -> None:
        """See ``Placed.undo_``: launches that were made are decoded again and XORed again, newest step first.

        A launch of which nobody knows whether it began counts as not made: what is read back afterwards says so if it was.
        """
        self._begun = None
        with self.queue.running():
            for place in range(PLACES):
                with suppress(FormatError):  # what is in flight is given up, whatever it decodes to
                    self.decoder.finish(place)
            while self._done:
                number = self._done[-1][0]
                mine = {k for n, k in self._done if n == number}
                self.slots.fill(0, self.steps[number], self.room, self.decoder)
                self.decoder.finish(0)
                self._launch(0, number, self._new_lanes(), write=True, undo=mine)
                del self._done[-len(mine) :]
            self.queue.wait()

    def _stream(self, *, write: bool) -> _Lanes:
        """Decode all steps, and XOR or only read each while the next one is decoded."""
        with self.queue.running(after_all=True):
            lanes = self._new_lanes()
            for number, step in enumerate(self.steps):
                if number == 0:
                    self.slots.fill(0, step, self.room, self.decoder)
                if number + 1 < len(self.steps):
                    self.slots.fill((number + 1) % PLACES, self.steps[number + 1], self.room, self.decoder)
                self.decoder.finish(number % PLACES)
                self._launch(number % PLACES, number, lanes, write=write)
            self.queue.wait()
        return lanes

    def _launch(self, place: int, number: int, lanes: _Lanes, *, write: bool, undo: set[int] | None = None) -> None:
        """XOR or read one step; replicas and copies are read afterwards through packs of their own."""
        mask = self.slots.use(place)
        for k, launch in enumerate(self.steps[number].launches):
            if undo is not None and k not in undo:
                continue
            w, places = launch.word_nbytes, launch.plans[0]
            if write and places is not None:
                self._begun = number, k
                dense_xor_(on_device(places), mask, lanes[w, 0])
                if undo is None:
                    self._done.append((number, k))
                self._begun = None
            for i, plan in enumerate(launch.plans):
                if plan is not None and (i or not write) and undo is None:
                    dense_sums_(on_device(plan), mask, lanes[w, i])
        self.slots.release(place)

    def _new_lanes(self) -> _Lanes:
        return {
            (w, i): torch.zeros((len(x.ids), 4), dtype=torch.int64, device=self.layout.device)
            for w, x in self.layout.words.items()
            for i in range(len(packs_of(x)))
        }

    def _sums(self, lanes: _Lanes, *, after: bool, written: bool) -> Sums:
        """Sums by tensor of the live words as they were, or as they are after the XOR.

        Args:
            lanes: From ``_stream``. Replicas and copies were read once the places were written, where they were.
            after: Which of the two.
            written: Whether the pass wrote.
        """
        out: list[Sums] = []
        for w, words in self.layout.words.items():
            host = [lanes[w, i].cpu().numpy().view(np.uint64) for i in range(len(packs_of(words)))]
            out.append(_non_zero(words.ids, host[0][:, :2] + host[0][:, 2:] if after else host[0][:, :2]))
            first = 1 if words.replicas is None else 2
            if words.replicas is not None:
                new = after and not written
                columns = host[1][:, :2] + host[1][:, 2:] if new else host[1][:, :2]
                out.append(_non_zero(words.ids + len(self.layout.binding.schema.tensors), columns))
            for copy, lead in zip(host[first::2], host[first + 1 :: 2], strict=True):
                wrong = (copy != lead).any(axis=1)
                if wrong.any():
                    raise BaseMismatchError(
                        f"{names_of(self.layout.binding.schema, words.ids[wrong])}: words at the touched positions differ "
                        "between the engine's copies of them. Load the weights anew, or correct the adapter's list of copies"
                    )
        return Sums.join(out)


def _non_zero(ids: np.ndarray, lanes: np.ndarray) -> Sums:
    mine = lanes.any(axis=1)
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

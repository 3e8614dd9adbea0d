"""A publication placed for the scatter: planes in arenas, tables bound to live addresses, and the sums that prove them.

Everything is one launch for each record group of a word size. Reading (the touched-old check, the read-back) goes through
the same tables as writing. Comes between ``scatter_stage`` and apply. Must not import apply.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch

from megasync.errors import FormatError, LiveMismatchError
from megasync.kernels.scatter_plan import ScatterPlan
from megasync.receiver.backend import Placed
from megasync.receiver.scatter_arena import Arena, ArenaPool
from megasync.receiver.scatter_layout import DeviceLayout, WordLayout, packs_of
from megasync.receiver.scatter_passes import Passes, Progress
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.scatter_rows import Piece
from megasync.receiver.scatter_stage import Load
from megasync.receiver.scatter_tables import join_pieces
from megasync.receiver.scatter_units import Reading, Totals, Unit
from megasync.receiver.sums import Sums
from megasync.schema import names_of

_FAULTS, _DIFFER, _WRONG = range(3)
"""Flags: entries that break the format, copies that differ, sums of written words that are not those that were proven."""


class ScatterPlaced(Placed):
    """See the module docstring.

    Args:
        layout: The rank.
        load: What was staged.
        queue: Where the work goes.
        pool: Gets the arenas back when this is dropped.
        passes: By word size.
        resident: Copy the planes into HBM now; else they are read from pinned memory at every pass.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        load: Load,
        queue: WorkQueue,
        pool: ArenaPool,
        passes: dict[int, Passes],
        *,
        resident: bool,
    ) -> None:
        self.layout, self.queue = layout, queue
        self.num_changed = load.num_changed
        self._arenas = list(load.arenas.values())
        self._finalizer = weakref.finalize(self, _release, queue, pool, list(self._arenas))
        self._after: Sums | None = None
        self._armed = False
        with queue.running():
            touched = _touched(layout, load)
            self._primary = Totals(touched, layout.device)
            self._flags = torch.zeros(4, dtype=torch.int32, device=layout.device)
            self._host_flags = torch.zeros(4, dtype=torch.int32, pin_memory=layout.device.type == "cuda")
            self._units = [
                unit
                for key, pieces in load.pieces.items()
                if (unit := self._unit(layout.words[key[0]], pieces, load.arenas[key], passes[key[0]], resident))
            ]
            self._replica = None
            if any(u.replicas for u in self._units):
                self._replica = Totals(touched + len(layout.binding.schema.tensors), layout.device)
        tables = sum(r.plan.nbytes for u in self._units for r in (u.places, *u.others))
        lanes = sum(u.lanes.numel() * 8 for u in self._units)
        planes = sum(u.planes.entries.numel() + u.planes.dense.numel() for u in self._units)
        self.nbytes = planes + tables + lanes

    def _unit(
        self, words: WordLayout, pieces: Sequence[Piece], arena: Arena, passes: Passes, resident: bool
    ) -> Unit | None:
        packs = packs_of(words)
        plans = [join_pieces(pieces, i, p) for i, p in enumerate(packs)]
        if plans[0] is None:
            return None
        end = pieces[-1].end_entry, pieces[-1].end_dense
        counts = torch.from_numpy(plans[0].counts)
        planes = arena.on_device(counts, *end, passes.upload) if resident else arena.on_host(counts, *end)
        shape = sum(p is not None for p in plans), len(words.ids), 4
        lanes = torch.zeros(shape, dtype=torch.int64, device=self.layout.device)
        free = iter(lanes)
        readings = [None if p is None else self._reading(words, p, pieces, next(free)) for p in plans]
        first = 1 if words.replicas is None else 2
        copies = [(a, b) for a, b in zip(readings[first::2], readings[first + 1 :: 2], strict=True) if a and b]
        places = readings[0]
        assert places is not None
        replicas = readings[1] if first == 2 else None
        return Unit(words, passes, planes, lanes, places, replicas, copies, Progress())

    def _reading(self, words: WordLayout, plan: ScatterPlan, pieces: Sequence[Piece], lanes: torch.Tensor) -> Reading:
        device = self.layout.device
        seen = np.zeros(len(words.ids), dtype=bool)
        for p in pieces:
            seen[p.rows] = True
        rows = np.flatnonzero(seen)
        position = np.searchsorted(self._primary.ids, words.ids[rows])
        return Reading(plan, lanes, torch.from_numpy(position).to(device), torch.from_numpy(rows).to(device))

    def prove(self) -> tuple[Sums, Sums]:
        """See ``Placed.prove``; positions and values of all entries are checked once more where they are used."""
        with self.queue.running():
            self._read(gently=True)
            for unit in self._units:
                unit.before = unit.places.lanes[:, :2].clone()
                for reading in unit.counted:
                    reading.after = reading.lanes[:, :2] + reading.lanes[:, 2:]
                unit.progress.clear()
            before, self._after = self._totals()
        return before, self._after

    def arm(self) -> None:
        """See ``Placed.arm``: all kernels of the write are loaded, and sums cleared."""
        with self.queue.running():
            for unit in self._units:
                unit.passes.rehearse(unit.places.plan, unit.planes, unit.places.lanes)
                self._compare(unit)
            self._clear()
            self.queue.wait()
        self._armed = True

    def xor_(self) -> None:
        """See ``Placed.xor_``. *Stream*: that of the queue; nothing is waited for."""
        with self.queue.running(after_all=True):
            for unit in self._units:
                assert unit.before is not None, "prove() comes before xor_()"
                unit.passes.write(unit.places.plan, unit.planes, unit.progress)

    def read_back(self) -> Sums:
        """See ``Placed.read_back``; copies are compared too."""
        with self.queue.running():
            self._read()
            return self._totals()[0]

    def write_(self) -> Sums:
        """See ``Placed.write_``: the sums are of what the write itself found in each word and left there; replicas and
        copies are read afterwards. All is compared on the device with what was proven: where it agrees, four numbers come
        back to the host, and the sums of ``prove`` are what was found."""
        with self.queue.running(after_all=True):
            if not self._armed:
                self._clear()
            self._armed = False
            for unit in self._units:
                unit.passes.write(unit.places.plan, unit.planes, unit.progress, unit.places.lanes)
            for unit in self._units:
                self._read_others(unit)
                self._compare(unit)
            self._host_flags.copy_(self._flags, non_blocking=True)
            self.queue.wait(eager=True)
            wrong = self._host_flags.tolist()[_WRONG]
            self._check()
            if wrong or self._after is None:
                return self._totals()[0]
        return self._after

    def undo_(self) -> None:
        """See ``Placed.undo_``: what was launched is XORed again, newest first; a launch of which nobody knows whether it
        began is decided by what is live."""
        with self.queue.running():
            for unit in reversed(self._units):
                progress, begun = unit.progress, unit.progress.begun
                for step in reversed(list(progress.done)):
                    unit.passes.write(unit.places.plan, unit.planes, progress, steps=[step])
                if begun is not None and unit.before is not None and not self._is_old(unit):
                    progress.done.append(begun)
                    unit.passes.write(unit.places.plan, unit.planes, progress, steps=[begun])
                progress.clear()
            self.queue.wait()

    def _is_old(self, unit: Unit) -> bool:
        """Whether the live words of a unit are those that were proven."""
        assert unit.before is not None
        lanes = torch.zeros_like(unit.places.lanes)
        unit.passes.read(unit.places.plan, unit.planes, lanes, self._flags[:1])
        self.queue.wait()
        return bool(torch.equal(lanes[:, :2], unit.before))

    def _clear(self) -> None:
        self._flags.zero_()
        for unit in self._units:
            unit.lanes.zero_()

    def _read(self, *, gently: bool = False) -> None:
        """Sums of the live words, and of what the XOR makes of them."""
        self._clear()
        for unit in self._units:
            unit.passes.read(unit.places.plan, unit.planes, unit.places.lanes, self._flags[:1], gently=gently)
            self._read_others(unit, gently=gently)

    def _read_others(self, unit: Unit, *, gently: bool = False) -> None:
        """The same of replicas and copies, which are compared."""
        for reading in unit.others:
            unit.passes.read(reading.plan, unit.planes, reading.lanes, self._flags[:1], gently=gently)
        for copy, lead in unit.copies:
            self._flags[_DIFFER : _DIFFER + 1].add_((copy.lanes != lead.lanes).any())

    def _compare(self, unit: Unit) -> None:
        """Whether a unit's sums are those of the words as they were to be, into the flags."""
        for reading in unit.counted:
            assert reading.after is not None, "prove() comes before write_()"
            self._flags[_WRONG : _WRONG + 1].add_((reading.lanes[:, :2] != reading.after).any())

    def _totals(self) -> tuple[Sums, Sums]:
        """What was read, by tensor: live words, and what they are after the next XOR. Waits."""
        pairs = [(self._primary, "places")]
        if self._replica is not None:
            pairs.append((self._replica, "replicas"))
        for totals, name in pairs:
            totals.device.zero_()
            for unit in self._units:
                reading: Reading | None = getattr(unit, name)
                if reading is not None:
                    totals.device.index_add_(0, reading.position, reading.lanes.index_select(0, reading.touched))
            totals.host.copy_(totals.device, non_blocking=True)
        self._host_flags.copy_(self._flags, non_blocking=True)
        self.queue.wait()
        self._check()
        parts = [totals.sums() for totals, _ in pairs]
        before, after = (Sums.join(p[k] for p in parts) for k in (0, 1))
        return before, after

    def _check(self) -> None:
        """Refuse what the flags say."""
        faults, differ = self._host_flags.tolist()[: _DIFFER + 1]
        if faults:
            raise FormatError(f"{faults} staged entries break the format (position past the end, or value 0)")
        if differ:
            raise LiveMismatchError(self._differing())

    def _differing(self) -> str:
        ids = [
            u.words.ids[torch.nonzero((a.lanes != b.lanes).any(dim=1)).reshape(-1).cpu().numpy()]
            for u in self._units
            for a, b in u.copies
        ]
        names = names_of(self.layout.binding.schema, np.concatenate(ids))
        return (
            f"{names}: words at the touched positions differ between the engine's copies of them; nothing was touched. Load "
            "the weights anew, or correct the adapter's list of copies"
        )


def _touched(layout: DeviceLayout, load: Load) -> np.ndarray:
    """Tensors of which tiles were kept, int64, ascending."""
    seen = np.zeros(len(layout.row), dtype=bool)
    for (w, _), pieces in load.pieces.items():
        for p in pieces:
            seen[layout.words[w].ids[p.rows]] = True
    return np.flatnonzero(seen)


def _release(queue: WorkQueue, pool: ArenaPool, arenas: list[Arena]) -> None:
    """Give arenas back once nothing queued reads them."""
    try:
        queue.wait()
    except Exception:
        return  # the device is lost, and the arenas with it
    pool.give(arenas)

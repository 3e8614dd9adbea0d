"""A publication placed for the scatter: planes in arenas, tables bound to live addresses, and the sums that prove them.

Everything is one launch for each record group of a word size. Reading (the touched-old check, the read-back) goes through
the same tables as writing. Comes between ``scatter_stage`` and apply. Must not import apply.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megasync.errors import BaseMismatchError, FormatError
from megasync.kernels.planes import Planes
from megasync.kernels.scatter_plan import ScatterPlan
from megasync.receiver.backend import Placed
from megasync.receiver.scatter_arena import Arena, ArenaPool
from megasync.receiver.scatter_layout import DeviceLayout, WordLayout, packs_of
from megasync.receiver.scatter_passes import Passes, Progress
from megasync.receiver.scatter_queue import WorkQueue
from megasync.receiver.scatter_rows import Piece
from megasync.receiver.scatter_stage import Load
from megasync.receiver.scatter_tables import join_pieces
from megasync.receiver.sums import Sums
from megasync.schema import names_of


@dataclass
class _Reading:
    """Sums read through one pack.

    Attributes:
        plan: Tables.
        lanes: int64 ``[n, 4]`` on the device, a row a tensor of the pack.
        position: int64 ``[K]`` on the device, row of each touched tensor in the totals.
        touched: int64 ``[K]`` on the device, row of each touched tensor in ``lanes``.
    """

    plan: ScatterPlan
    lanes: torch.Tensor
    position: torch.Tensor
    touched: torch.Tensor


@dataclass
class _Unit:
    """One arena: its planes and its plans."""

    words: WordLayout
    passes: Passes
    planes: Planes
    places: _Reading
    replicas: _Reading | None
    copies: list[tuple[_Reading, _Reading]]
    progress: Progress
    proven: torch.Tensor | None = None


class _Totals:
    """Sums of touched tensors, on the device and in host memory."""

    def __init__(self, ids: np.ndarray, device: torch.device) -> None:
        self.ids = ids
        self.device = torch.zeros((len(ids), 4), dtype=torch.int64, device=device)
        self.host = torch.zeros((len(ids), 4), dtype=torch.int64, pin_memory=device.type == "cuda")

    def sums(self) -> tuple[Sums, Sums]:
        """Live words, and what they are after the next XOR."""
        lanes = self.host.numpy().view(np.uint64)
        return Sums(self.ids, lanes[:, :2].copy()), Sums(self.ids, lanes[:, :2] + lanes[:, 2:])


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
        with queue.running():
            touched = _touched(layout, load)
            self._primary = _Totals(touched, layout.device)
            self._replica = _Totals(touched + len(layout.binding.schema.tensors), layout.device)
            self._faults = torch.zeros(1, dtype=torch.int32, device=layout.device)
            self._differ = torch.zeros(1, dtype=torch.int32, device=layout.device)
            self._flags = torch.zeros(2, dtype=torch.int32, pin_memory=layout.device.type == "cuda")
            self._units = [
                unit
                for key, pieces in load.pieces.items()
                if (unit := self._unit(layout.words[key[0]], pieces, load.arenas[key], passes[key[0]], resident))
            ]
        self._has_replicas = any(u.replicas for u in self._units)
        self._has_copies = any(u.copies for u in self._units)
        tables = sum(r.plan.nbytes + r.lanes.numel() * 8 for u in self._units for r in _readings(u))
        planes = sum(u.planes.entries.numel() + u.planes.dense.numel() for u in self._units)
        self.nbytes = planes + tables

    def _unit(
        self, words: WordLayout, pieces: Sequence[Piece], arena: Arena, passes: Passes, resident: bool
    ) -> _Unit | None:
        packs = packs_of(words)
        plans = [join_pieces(pieces, i, p) for i, p in enumerate(packs)]
        if plans[0] is None:
            return None
        end = pieces[-1].end_entry, pieces[-1].end_dense
        counts = torch.from_numpy(plans[0].counts)
        planes = (arena.on_device if resident else arena.on_host)(counts, *end)
        readings = [None if p is None else self._reading(words, p, pieces) for p in plans]
        first = 1 if words.replicas is None else 2
        copies = [(a, b) for a, b in zip(readings[first::2], readings[first + 1 :: 2], strict=True) if a and b]
        places = readings[0]
        assert places is not None
        return _Unit(words, passes, planes, places, readings[1] if first == 2 else None, copies, Progress())

    def _reading(self, words: WordLayout, plan: ScatterPlan, pieces: Sequence[Piece]) -> _Reading:
        device = self.layout.device
        seen = np.zeros(len(words.ids), dtype=bool)
        for p in pieces:
            seen[p.rows] = True
        rows = np.flatnonzero(seen)
        position = np.searchsorted(self._primary.ids, words.ids[rows])
        lanes = torch.zeros((len(words.ids), 4), dtype=torch.int64, device=device)
        return _Reading(plan, lanes, torch.from_numpy(position).to(device), torch.from_numpy(rows).to(device))

    def prove(self) -> tuple[Sums, Sums]:
        """See ``Placed.prove``; positions and values of all entries are checked once more where they are used."""
        with self.queue.running():
            self._clear()
            for unit in self._units:
                self._read(unit)
                unit.proven = unit.places.lanes.clone()
                unit.progress.clear()
            self._fetch()
            self.queue.wait()
        return self._result()

    def xor_(self) -> None:
        """See ``Placed.xor_``. *Stream*: that of the queue; nothing is waited for."""
        with self.queue.running(after_all=True):
            for unit in self._units:
                assert unit.proven is not None, "prove() comes before xor_()"
                unit.passes.write(unit.places.plan, unit.planes, unit.progress)

    def read_back(self) -> Sums:
        """See ``Placed.read_back``; copies are compared too."""
        with self.queue.running():
            self._clear()
            for unit in self._units:
                self._read(unit)
            self._fetch()
            self.queue.wait()
        return self._result()[0]

    def write_(self) -> Sums:
        """See ``Placed.write_``: the sums are of what the write itself found in each word and left there; replicas and
        copies are read afterwards. All is queued together, and waited for once."""
        with self.queue.running(after_all=True):
            self._clear()
            for unit in self._units:
                assert unit.proven is not None, "prove() comes before write_()"
                unit.places.lanes.zero_()
                unit.passes.write(unit.places.plan, unit.planes, unit.progress, unit.places.lanes)
                self._read(unit, places=False)
            self._fetch()
            self.queue.wait()
        return self._result(written=True)[1]

    def undo_(self) -> None:
        """See ``Placed.undo_``: what was launched is XORed again, newest first; a launch of which nobody knows whether it
        began is decided by what is live."""
        with self.queue.running():
            for unit in reversed(self._units):
                progress, begun = unit.progress, unit.progress.begun
                for step in reversed(list(progress.done)):
                    unit.passes.write(unit.places.plan, unit.planes, progress, steps=[step])
                if begun is not None and unit.proven is not None and not self._is_old(unit):
                    progress.done.append(begun)
                    unit.passes.write(unit.places.plan, unit.planes, progress, steps=[begun])
                progress.clear()
            self.queue.wait()

    def _is_old(self, unit: _Unit) -> bool:
        """Whether the live words of a unit are those that were proven."""
        assert unit.proven is not None
        lanes = torch.zeros_like(unit.proven)
        unit.passes.read(unit.places.plan, unit.planes, lanes, self._faults)
        self.queue.wait()
        return bool(torch.equal(lanes[:, :2], unit.proven[:, :2]))

    def _clear(self) -> None:
        for x in (self._primary.device, self._replica.device, self._faults, self._differ):
            x.zero_()

    def _read(self, unit: _Unit, *, places: bool = True) -> None:
        """Add a unit's sums to the totals; places are already in their lanes where they were read along the write."""
        for reading, totals in ((unit.places, self._primary), (unit.replicas, self._replica)):
            if reading is None:
                continue
            if places or reading is not unit.places:
                reading.lanes.zero_()
                unit.passes.read(reading.plan, unit.planes, reading.lanes, self._faults)
            totals.device.index_add_(0, reading.position, reading.lanes.index_select(0, reading.touched))
        for copy, lead in unit.copies:
            for reading in (copy, lead):
                reading.lanes.zero_()
                unit.passes.read(reading.plan, unit.planes, reading.lanes, self._faults)
            self._differ += (copy.lanes != lead.lanes).any().to(torch.int32)

    def _fetch(self) -> None:
        """Queue the way of all totals to the host."""
        self._primary.host.copy_(self._primary.device, non_blocking=True)
        if self._has_replicas:
            self._replica.host.copy_(self._replica.device, non_blocking=True)
        self._flags[:1].copy_(self._faults, non_blocking=True)
        self._flags[1:].copy_(self._differ, non_blocking=True)

    def _result(self, *, written: bool = False) -> tuple[Sums, Sums]:
        """Sums of the live words as they were found, and after the XOR; replicas are only read, after a write as new."""
        faults, differ = self._flags.tolist()
        if faults:
            raise FormatError(f"{faults} staged entries break the format (position past the end, or value 0)")
        if differ:
            raise BaseMismatchError(self._differing())
        before, after = self._primary.sums()
        if not self._has_replicas:
            return before, after
        found, will_be = self._replica.sums()
        return Sums.join((before, found)), Sums.join((after, found if written else will_be))

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


def _readings(unit: _Unit) -> list[_Reading]:
    found = [unit.places, unit.replicas, *(r for pair in unit.copies for r in pair)]
    return [r for r in found if r is not None]


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

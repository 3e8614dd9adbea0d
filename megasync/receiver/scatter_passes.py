"""Passes of the scatter kernels over staged planes: read, or write, from HBM or from pinned memory.

A pass is cut in steps, and what was launched is written down, so that an undo knows how far a write came. From pinned memory
chunks of entries are copied up while those before them are worked on. A write digests the words that its own atomics return,
as they are after it, which costs a few hundredths of it; reading them all once more would cost six tenths (measured on an
H200). Comes between ``scatter_tables`` and ``scatter_placed``. Must import nothing above kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import sleep

import torch

from megasync.kernels import dispatch
from megasync.kernels.planes import Planes
from megasync.kernels.scatter import SUMS_ALL, SUMS_NEW, SUMS_NONE, launch_scatter, scatter_xor_, touched_sums_
from megasync.kernels.scatter_plan import ScatterLaunch, ScatterPlan
from megasync.kernels.scatter_stream import EntryRing, chunks_of


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a pass that is launched at once; without a launch it is the whole plan."""

    launch: ScatterLaunch | None = None
    begin: int = 0
    end: int = 0


@dataclass(slots=True)
class Progress:
    """How far a write came.

    Attributes:
        done: Steps that were launched, oldest first.
        begun: Step whose launch was called and did not return.
    """

    done: list[Step] = field(default_factory=list)
    begun: Step | None = None

    def clear(self) -> None:
        """Nothing is written."""
        self.done.clear()
        self.begun = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How live words are read beside an engine that decodes.

    Attributes:
        num_entries: Entries of a launch, at least a segment of 65,536: a launch should be short against a token.
        copied_nbytes: Bytes of a copy to the device.
        pause_s: Between them: about as long as a token, so that none is met by many.
    """

    num_entries: int = 1 << 20
    copied_nbytes: int = 8 << 20
    pause_s: float = 5e-3


class Passes:
    """Runs the kernels for the planes of one word size.

    Args:
        ring: Slots in HBM that pinned planes pass through; None where planes are on the device (or all on the CPU).
        pace: How copies and a read that are not part of a pause go; None for all at once.
    """

    def __init__(self, ring: EntryRing | None = None, pace: Pace | None = None) -> None:
        self.ring, self.pace = ring, pace

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy staged bytes, uint8 ``[n]``, to the device, at the pace that was given.

        *Stream*: the current one; nothing is waited for but the pauses.
        """
        if self.pace is None or target.device.type != "cuda":
            target.copy_(source, non_blocking=True)
            return
        step = self.pace.copied_nbytes
        for at in range(0, len(target), step):
            if at:
                sleep(self.pace.pause_s)
            target[at : at + step].copy_(source[at : at + step], non_blocking=True)

    def steps(self, plan: ScatterPlan) -> list[Step]:
        """The steps of a pass."""
        if self.ring is not None:
            return [Step(x, *c) for x in plan.launches for c in chunks_of(x, self.ring.chunk_entries)]
        if dispatch.uses_triton(plan.records.device):
            return [Step(x, 0, len(x.segments)) for x in plan.launches]
        return [Step()]

    def read(
        self, plan: ScatterPlan, planes: Planes, lanes: torch.Tensor, faults: torch.Tensor, *, gently: bool = False
    ) -> None:
        """Add the sums of the live words at the touched positions, and of new minus old, to ``lanes``, broken entries to
        ``faults``; ``gently`` beside an engine that decodes, at the pace that was given."""
        if gently and self.pace is not None and dispatch.uses_triton(plan.records.device):
            for launch in plan.launches:
                for begin, end in chunks_of(launch, self.pace.num_entries):
                    step = Step(launch, begin, end)
                    self._step(step, plan, planes, lanes, faults, write=False, sums=SUMS_ALL)
                    sleep(self.pace.pause_s)
            return
        if self.ring is None:
            touched_sums_(plan, planes, lanes, faults)
            return
        for step in self.steps(plan):
            self._step(step, plan, planes, lanes, faults, write=False, sums=SUMS_ALL)

    def write(
        self,
        plan: ScatterPlan,
        planes: Planes,
        progress: Progress,
        lanes: torch.Tensor | None = None,
        *,
        steps: list[Step] | None = None,
    ) -> None:
        """XOR the planes in.

        Args:
            plan: Tables.
            planes: Entries.
            progress: What was launched is added; taken away again where ``steps`` are given (an undo).
            lanes: Where given, sums of the words as the write itself left them are added to columns 0 and 1.
            steps: Only these.
        """
        undo = steps is not None
        sums = SUMS_NONE if lanes is None else SUMS_NEW
        for step in self.steps(plan) if steps is None else steps:
            progress.begun = step
            self._step(step, plan, planes, lanes, None, write=True, sums=sums)
            if undo:
                progress.done.remove(step)
            else:
                progress.done.append(step)
            progress.begun = None

    def rehearse(self, plan: ScatterPlan, planes: Planes, lanes: torch.Tensor) -> None:
        """Load what ``write`` with ``lanes`` will launch, so that nothing is compiled later; changes nothing."""
        for step in self.steps(plan):
            if step.launch is not None:
                self._step(step, plan, planes, lanes, None, write=True, sums=SUMS_NEW, rehearse=True)

    def _step(
        self,
        step: Step,
        plan: ScatterPlan,
        planes: Planes,
        lanes: torch.Tensor | None,
        faults: torch.Tensor | None,
        *,
        write: bool,
        sums: int,
        rehearse: bool = False,
    ) -> None:
        if step.launch is None:
            scatter_xor_(plan, planes, lanes, sums=sums)
            return
        launch, begin, end = step.launch, step.begin, step.end
        here, before, slot = planes, (0, 0), -1
        if self.ring is not None:
            spans = [(int(f[begin]), int(f[end])) for f in (launch.first_entry, launch.first_dense)]
            wanted = [(a, a if rehearse else b) for a, b in spans]
            here, slot, copied = self.ring.fill(planes, *wanted)
            torch.cuda.current_stream(plan.records.device).wait_event(copied)
            before = spans[0][0], spans[1][0]
        launch_scatter(
            launch,
            plan,
            here,
            lanes,
            faults,
            write=write,
            sums=sums,
            begin=begin,
            end=end,
            entries_before=before[0],
            dense_before=before[1],
            rehearse=rehearse,
        )
        if self.ring is not None:
            self.ring.release(slot)

"""Old and new weights of a model-like engine rank in one arena, and what every way from one to the other has in common.

The new weights are made by the scatter, which is proved first by digests read through another kernel and by undoing itself.
Before it: workload, gpu_rank. After it: peers_dense, bench_peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from launch.bench import gpu_rank
from launch.bench.gpu_rank import CHANGED
from launch.bench.rows import Row
from launch.bench.workload import Placed, Shape, engine_rank, slice_tiles
from megasync.kernels.planes import Planes, segments_of
from megasync.kernels.records import PackedRecords, pack_records
from megasync.kernels.scatter import new_lanes, scatter_xor_
from megasync.kernels.scatter_plan import ScatterPlan, Tiles, plan_scatter
from megasync.kernels.walk import audit_
from megasync.kernels.walk_plan import plan_audit

BLOCK_NBYTES = 1 << 20
"""The arena is a whole number of these, the frames of dense ways."""

_ALIGN = 256
_ARENA = "arena"


@dataclass
class Way:
    """One way from old weights to new ones.

    Attributes:
        name: What it is, for the table.
        work: Does it; may return before the device is done.
        moved_nbytes: Bytes that come to the device.
        weights_nbytes: Bytes of weights that are made new; None for all.
        more: Further columns.
    """

    name: str
    work: Callable[[], object]
    moved_nbytes: int
    weights_nbytes: int | None = None
    more: Row = field(default_factory=dict)


@dataclass
class Sized:
    """The tensors of one word size: their layout, and their changed words."""

    records: PackedRecords
    plan: ScatterPlan
    planes: Planes


class Change:
    """Weights, old and new.

    Args:
        shape: Sizes of the model.
        device: Where everything lives.
        tp: Ranks of the engine; one is held.
        density: Changed bytes / all bytes.

    Attributes:
        arena: uint8, the live weights, one storage after the other.
        old: What they are before.
        new: What they must be after.
        spans: Begin and end of each storage.
        nbytes: Bytes of weights, without padding.
    """

    def __init__(self, shape: Shape, device: str, *, tp: int = 4, density: float = CHANGED) -> None:
        placed, sizes = engine_rank(shape, tp, min(1, tp - 1))
        self.density, self.nbytes = density, sum(sizes.values())
        self.spans: list[tuple[int, int]] = []
        begins: dict[str, int] = {}
        end = 0
        for name, nbytes in sizes.items():
            begins[name] = end
            self.spans.append((end, end + nbytes))
            end += -(-nbytes // _ALIGN) * _ALIGN
        self.arena = torch.empty(-(-end // BLOCK_NBYTES) * BLOCK_NBYTES, dtype=torch.uint8, device=device)
        self.arena.view(torch.int64).random_()
        self.sizes = [made for w in (1, 2) if (made := self._sized(w, placed, begins))]
        self.old = self.arena.clone()
        self._prove()
        self.new = self.arena.clone()
        self.reset()

    def _sized(self, w: int, placed: list[Placed], begins: dict[str, int]) -> Sized | None:
        mine = [p for p in placed if p.spec.word_nbytes == w]
        if not mine:
            return None
        moved = [replace(p.record, storage=_ARENA, base=p.record.base + begins[p.record.storage] // w) for p in mine]
        lists: list = [[r] for r in moved]
        records = pack_records(w, [p.spec.shape for p in mine], lists, {_ARENA: self.arena})
        tiles = Tiles(*slice_tiles(mine))
        planes = gpu_rank.random_planes(segments_of(tiles.words)[2], w, self.density * w, one_byte=True)
        return Sized(records, plan_scatter(tiles, planes.counts.cpu().numpy(), records), planes)

    def _prove(self) -> None:
        """Leave the new weights in the arena.

        Raises:
            RuntimeError: Another kernel does not see what the scatter says that it did, or a second one does not undo it.
        """
        changed = [new_lanes(s.plan) for s in self.sizes]
        before = self._audit()
        for s, lanes in zip(self.sizes, changed, strict=True):
            scatter_xor_(s.plan, s.planes, lanes)
        after = self._audit()
        for s in self.sizes:
            scatter_xor_(s.plan, s.planes)
        seen = all(torch.equal(a[:, :2], b[:, :2] + c[:, 2:]) for a, b, c in zip(after, before, changed, strict=True))
        if not seen or not torch.equal(self.arena, self.old):
            raise RuntimeError("the scatter that makes the new weights is wrong")
        for s in self.sizes:
            scatter_xor_(s.plan, s.planes)

    def _audit(self) -> list[torch.Tensor]:
        lanes = [new_lanes(s.plan) for s in self.sizes]
        for s, x in zip(self.sizes, lanes, strict=True):
            audit_(plan_audit(s.records), x)
        return lanes

    def reset(self) -> None:
        """Bring the old weights back."""
        self.arena.copy_(self.old)

    def mask(self, begin: int, stop: int) -> torch.Tensor:
        """``old XOR new`` of a part of the arena."""
        return self.old[begin:stop] ^ self.new[begin:stop]


class Timer:
    """Times work on a device by the host's clock, from an idle device to an idle device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], object], reset: Callable[[], None], num: int) -> list[float]:
        """Seconds of ``num`` runs after one that does not count; ``reset`` runs before each, untimed."""
        out = []
        for _ in range(num + 1):
            reset()
            self._idle()
            started = time.perf_counter()
            work()
            self._idle()
            out.append(time.perf_counter() - started)
        return out[1:]

    def _idle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def finish(tensor: torch.Tensor) -> None:
    """Wait for a tensor's device."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where the tensor is on a GPU."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return out.copy_(tensor)

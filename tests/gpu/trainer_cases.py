"""Weights, ownership and comparisons of the trainer's device tests: on the CPU in tests/unit, on a GPU in tests/gpu."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import SnapshotPlace
from megasync.digest import XXH3_128
from megasync.frames import FrameRecord
from megasync.schema import Schema
from megasync.telemetry import Telemetry
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.copied_masker import CopiedMasker
from megasync.trainer.device_masker import DeviceMasker
from megasync.trainer.device_snapshot import DeviceSnapshot, one_queue
from megasync.trainer.exporter import Piece
from megasync.trainer.masker import HostMasker, Masker
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import make_plan
from megasync.trainer.plan_merge import describe, merge
from megasync.trainer.regions import Region, match_regions
from megasync.trainer.snapshot import SAME_SIZE, Snapshot
from megasync.trainer.start import Started
from megasync.types import Box, TensorSpec
from megasync.versions.encode import EncodedDelta

CPU = torch.device("cpu")

SPECS = [
    TensorSpec("embed", "BF16", (1003, 96)),  # an odd vocabulary
    TensorSpec("norm", "F32", (129,)),
    TensorSpec("scalar", "F64", ()),
    TensorSpec("empty", "F16", (0, 4)),
    TensorSpec("layers.0.bias", "F32", (64,), layer=0),
    TensorSpec("layers.0.o", "BF16", (384, 768), layer=0, cut="last"),
    TensorSpec("layers.0.packed", "U8", (3, 5, 64, 70), layer=0),
    TensorSpec("layers.0.qkv", "BF16", (768, 384), layer=0),
    TensorSpec("layers.0.ids", "I64", (70, 90), layer=0),
    TensorSpec("layers.1.w", "BF16", (1040, 520), layer=1),
    TensorSpec("layers.1.wide", "U8", (516, 700), layer=1),
]
CHUNK_OF = {"norm": 1, "layers.1.w": 1, "layers.1.wide": 1}
VOLATILE = {"layers.0.bias"}
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I64": torch.int64,
}


def random_bytes(t: torch.Tensor, seed: int) -> None:
    """Fill a contiguous tensor with random bytes."""
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (t.nbytes,), generator=g, dtype=torch.uint8)
    t.copy_(raw.view(t.dtype).view(t.shape))


@dataclass
class Rank:
    """One rank's live weights and what it owns.

    Attributes:
        schema: The run's schema.
        pieces: Local pieces.
        regions: Owned regions.
    """

    schema: Schema
    pieces: list[Piece]
    regions: list[Region]

    def change(self, density: float, seed: int, names: Iterable[str] | None = None) -> None:
        """Change about ``density`` of the words, at least one a piece, through the views."""
        rng = np.random.default_rng(seed)
        for piece in self.pieces:
            if not piece.data.numel() or (names is not None and piece.name not in names):
                continue
            words = piece.data.view(SAME_SIZE[piece.data.element_size()])
            num = max(1, int(words.numel() * density))
            at = np.unravel_index(rng.choice(words.numel(), num, replace=False), tuple(words.shape) or (1,))
            values = torch.from_numpy(rng.integers(1, 120, num)).to(words.dtype).to(words.device)
            if not words.dim():
                words ^= values[0]
                continue
            index = tuple(torch.from_numpy(a).to(words.device) for a in at)
            words[index] = words[index] ^ values

    def live(self) -> dict[str, np.ndarray]:
        """Copies of the pieces' words."""
        return {
            f"{p.name}{p.box.start}": p.data.cpu().contiguous().view(-1).view(torch.uint8).numpy().copy()
            for p in self.pieces
        }


def make_rank(device: torch.device = CPU, parts: int = 1, index: int = 0) -> Rank:
    """Weights of one of ``parts`` ranks that cut rows (``o``: columns), some of them strided views of larger storages."""
    held: list[list[tuple[str, Box]]] = [[] for _ in range(parts)]
    pieces = []
    for number, spec in enumerate(SPECS):
        axis = len(spec.shape) - 1 if spec.cut == "last" else 0
        for part in range(parts):
            start, stop = [0] * len(spec.shape), list(spec.shape)
            if spec.shape and spec.shape[axis] >= 100:
                start[axis], stop[axis] = spec.shape[axis] * part // parts, spec.shape[axis] * (part + 1) // parts
            box = Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))
            held[part].append((spec.name, box))
            if part != index:
                continue
            storage = torch.empty(box.extent, dtype=_DTYPES[spec.dtype])
            if spec.name == "layers.0.qkv":  # every other row of a fused weight
                storage = torch.empty((2 * box.extent[0], box.extent[1]), dtype=_DTYPES[spec.dtype])
            if spec.name == "layers.0.ids":  # stored transposed
                storage = torch.empty(box.extent[::-1], dtype=_DTYPES[spec.dtype])
            random_bytes(storage, 100 * index + number)
            data = storage.to(device)
            if spec.name == "layers.0.qkv":
                data = data[1::2]
            if spec.name == "layers.0.ids":
                data = data.T
            pieces.append(Piece(spec.name, box, data, spec.name in VOLATILE, CHUNK_OF.get(spec.name, 0)))
    classes: dict[bytes, list[int]] = {}
    for rank, boxes in enumerate(held):
        classes.setdefault(describe(SPECS, boxes), []).append(rank)
    schema, holdings = merge("run", [(ranks, d) for d, ranks in classes.items()])
    plan = make_plan(schema, holdings)
    return Rank(schema, pieces, match_regions(schema, plan, index, pieces))


def whole_rank(tensors: dict[str, torch.Tensor]) -> Rank:
    """A rank that holds and owns whole tensors."""
    exporter = TensorExporter(tensors)
    schema, holdings = exchange("run", exporter, None)
    plan = make_plan(schema, holdings)
    pieces = exporter.pieces()
    return Rank(schema, pieces, match_regions(schema, plan, 0, pieces))


def on_host(rank: Rank) -> tuple[Snapshot, Masker, Rank]:
    """A CPU copy of a rank's weights with the CPU path over it, seeded from them."""
    pieces = [replace(p, data=p.data.cpu().clone()) for p in rank.pieces]
    by_box = {(p.name, p.box): p.data for p in pieces}
    regions = []
    for region in rank.regions:
        name = rank.schema.tensors[region.tensor_id].name
        piece = next(p for p in pieces if p.name == name)
        data = by_box[name, piece.box] if piece.box.extent else by_box[name, piece.box].view(1)
        start = piece.box.start or (0,)
        at = tuple(slice(a - b, a - b + n) for a, b, n in zip(region.box.start, start, region.box.extent, strict=True))
        regions.append(replace(region, data=data[at]))
    copy = Rank(rank.schema, pieces, regions)
    snapshot = Snapshot(copy.schema, regions)
    snapshot.fill_live()
    return snapshot, HostMasker(copy.schema, snapshot), copy


def on_device(
    rank: Rank,
    device: torch.device = CPU,
    place: SnapshotPlace = SnapshotPlace.DEVICE,
    *,
    codec: str = "sparse",
    landing: int | None = None,
    telemetry: Telemetry | None = None,
) -> tuple[DeviceSnapshot, DeviceMasker | CopiedMasker]:
    """The device path over a rank's own weights, seeded from them: with kernels, or with copies where those would hold it up."""
    snapshot = DeviceSnapshot(rank.schema, rank.regions, place, device)
    snapshot.fill_live()
    if place is SnapshotPlace.HOST and one_queue():
        return snapshot, CopiedMasker(
            rank.schema, snapshot, device, codec=codec, algorithm=XXH3_128, telemetry=telemetry or Telemetry()
        )
    masker = DeviceMasker(
        rank.schema,
        snapshot,
        device,
        codec=codec,
        algorithm=XXH3_128,
        telemetry=telemetry or Telemetry(),
        num_threads=2,
        landing=landing,
    )
    return snapshot, masker


def check_late_chunks(rank: Rank, snapshot: Snapshot, masker: DeviceMasker | CopiedMasker) -> None:
    """Chunks that begin later are read then; frames do not show it. Closes the masker."""
    _, host, copy = on_host(rank)
    late = [n for n, c in CHUNK_OF.items() if c == 1]
    early = [s.name for s in SPECS if s.name not in late]
    rank.change(0.03, 1, early)
    masked = masker.begin(late=(1, 7))  # chunk 7 is held by this rank, but owned by others
    rank.change(0.03, 1, late)  # gathered during the next forward
    masker.start_chunk(1)
    masker.start_rest()
    masker.fence()
    copy.change(0.03, 1, early)
    copy.change(0.03, 1, late)
    assert_equal_deltas(masked.encode("sparse", XXH3_128), host.begin().encode("sparse", XXH3_128))
    assert_snapshot_is_live(snapshot)
    masker.close()


def assert_equal_deltas(found: EncodedDelta, wanted: EncodedDelta) -> None:
    """The same records, bytes and sums."""
    assert [_fields(r) for r in found.records] == [_fields(r) for r in wanted.records]
    assert found.parts == wanted.parts
    assert found.touched == wanted.touched


def _fields(r: FrameRecord) -> tuple[object, ...]:
    return (
        r.payload,
        r.offset,
        r.codec,
        r.word_nbytes,
        r.layer,
        r.num_changed,
        r.plane_nbytes,
        r.digest,
        r.tensor_ids.tolist(),
        r.tiles.tolist(),
    )


def assert_snapshot_is_live(snapshot: Snapshot) -> None:
    """Every region of a snapshot equals the live weights."""
    for i, region in enumerate(snapshot.regions):
        live = region.data.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(snapshot.words(i).view(np.uint8), live, err_msg=str(region.box))


def copies_of(snapshot: Snapshot) -> list[np.ndarray]:
    """The bytes of every region."""
    return [snapshot.words(i).copy() for i in range(len(snapshot.regions))]


def assert_same_bytes(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """Equal, region by region."""
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@dataclass
class MaskCallback(MegasyncCallback):
    """The callback over one of the mask stages, with weights on the CPU."""

    kind: type[Masker] = DeviceMasker

    def _make_masker(self, started: Started, algorithm: int) -> Masker:
        if self.kind is HostMasker:
            return HostMasker(started.schema, started.snapshot)
        assert self.kind in (DeviceMasker, CopiedMasker)
        return self.kind(  # type: ignore[call-arg]
            started.schema,
            started.snapshot,
            started.device,
            codec=self.config.codec,
            algorithm=algorithm,
            telemetry=self.telemetry,
            num_threads=1,
        )

"""The owners of a publication beside the trainer that is measured: their payloads, and what they tell the head writer.

Before it: serving, trainer_share. After it: trainer_process, bench_end_to_end.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from launch.bench.receiver_world import RUN
from launch.bench.serving import ServingRank, link_object
from launch.bench.trainer_share import Part, taken_tiles
from megasync.digest import XXH3_128
from megasync.frames import FrameRecord
from megasync.manifest import DIGEST_NBYTES, Manifest, payload_key
from megasync.types import Lanes
from megasync.versions.encode import EncodedDelta, describe


class Others:
    """The publication of all owners but the trainer: payload files for any number of versions, and what they tell.

    Args:
        rank: At version 0; its own sink takes the payloads.
        share: Of the trainer, which the others leave out.
        density: Changed bytes / all bytes.
    """

    def __init__(self, rank: ServingRank, share: dict[int, list[Part]], density: float) -> None:
        self._directory = rank.directory
        rank.world.taken = taken_tiles(rank.world.schema, share)
        self.draft: Manifest = rank.world.draft(density, seed=2)
        self._owners = [i for i, nbytes in enumerate(self.draft.payload_nbytes) if nbytes]
        before, after = rank.learn(self.draft)
        ids = self.draft.touched_ids.tolist()
        sums = {True: (after - before, before), False: (before - after, after)}
        self._told = [self._tell(ids, *sums[there]) for there in (True, False)]

    def _tell(self, ids: list[int], change: np.ndarray, olds: np.ndarray) -> list[bytes]:
        """Metadata of every owner; the first one has the digest sums of all."""
        by_owner: dict[int, list[FrameRecord]] = {owner: [] for owner in self._owners}
        for i in range(len(self.draft.frames)):
            record = self.draft.frames.record(i)
            by_owner[record.payload].append(replace(record, payload=0))
        told: list[bytes] = []
        for mine in by_owner.values():
            touched = {}
            if not told:
                rows = zip(ids, change.tolist(), olds.tolist(), strict=True)
                touched = {i: (Lanes(*new), Lanes(*old)) for i, new, old in rows}
            told.append(describe(EncodedDelta(tuple(mine), (), touched), DIGEST_NBYTES[XXH3_128]))
        return told

    def save(self, path: Path) -> Path:
        """Write what they tell, there and back."""
        path.write_bytes(msgspec.msgpack.encode(self._told))
        return path

    def place(self, directory: Path, num_versions: int, epoch: int) -> None:
        """Put their payloads in the sink that the trainer publishes to, after its own."""
        for version in range(1, num_versions + 1):
            for number, owner in enumerate(self._owners, 1):
                key = payload_key(RUN, version, epoch, number)
                link_object(self._directory, self.draft.payload_key(owner), directory, key)

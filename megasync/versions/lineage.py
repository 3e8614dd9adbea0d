"""What the head writer knows of the run: the head it holds and the state digests of the newest durable version.

Of a trainer only rank 0 of the gather group has one. Must not import trainer or receiver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megasync.digest import lanes_to_bytes, state_digest
from megasync.manifest import Head
from megasync.schema import Schema
from megasync.types import Lanes


def mix_table(schema: Schema) -> np.ndarray:
    """What ``state_digest`` adds to the digest sums of each tensor: u64 ``[num_tensors, 2]``."""
    mixed = b"".join(state_digest(t, Lanes()) for t in schema.tensors)
    return np.frombuffer(mixed, "<u8").reshape(-1, 2)


@dataclass(frozen=True)
class Lineage:
    """The newest version of a run, as its publisher knows it.

    Attributes:
        schema: The run's schema.
        head: The head held, with this publisher's fence.
        version: Version that the digest sums are of.
        digest: Digest of that version's manifest; empty before version 0.
        sums: u64 ``[num_tensors, 2]``, digest sums of every tensor.
        mix: From ``mix_table``.
    """

    schema: Schema
    head: Head
    version: int
    digest: bytes
    sums: np.ndarray
    mix: np.ndarray

    @property
    def states(self) -> np.ndarray:
        """Table of state digests, uint8 ``[num_tensors, 16]``."""
        table = np.ascontiguousarray(
            np.where(self.schema.empty[:, None], np.uint64(0), self.sums + self.mix), dtype="<u8"
        )
        return table.view(np.uint8).reshape(-1, 16)

    def after(self, change: np.ndarray) -> Lineage:
        """With the digest sums of a change added (u64 ``[num_tensors, 2]``, modulo 2^64)."""
        return replace(self, sums=self.sums + change)


def start_lineage(schema: Schema, head: Head, sums: np.ndarray) -> Lineage:
    """The lineage of a publisher that starts (again) at the head's version."""
    return Lineage(schema, head, head.version, head.digest, sums.astype("<u8"), mix_table(schema))


def sum_rows(ids: np.ndarray, rows: np.ndarray, num_tensors: int) -> np.ndarray:
    """Rows (u64 ``[K, 2]``) added up by tensor id modulo 2^64: u64 ``[num_tensors, 2]``."""
    total = np.zeros((num_tensors, 2), dtype=np.uint64)
    for lane in (0, 1):  # numpy adds numbers in place several times faster than rows
        np.add.at(total[:, lane], ids, rows[:, lane])
    return total


def rows_of(sums: dict[int, Lanes]) -> tuple[np.ndarray, np.ndarray]:
    """Ids (u32) and rows (u64 ``[K, 2]``) of digest sums by tensor id."""
    ids = sorted(sums)
    rows = b"".join(lanes_to_bytes(sums[i]) for i in ids)
    return np.array(ids, dtype="<u4"), np.frombuffer(rows, "<u8").reshape(-1, 2)

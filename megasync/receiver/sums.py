"""Digest sums by tensor: what proofs, read-backs and audits hand to one another.

The sums themselves are made by ``digest_sums``. Must import nothing above digest_sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megasync.digest_sums import CHUNK, sums_by_segment
from megasync.types import Lanes

__all__ = ["CHUNK", "Sums", "sums_by_segment"]


@dataclass(frozen=True, slots=True)
class Sums:
    """Digest sums of some tensors.

    Attributes:
        ids: int64 ``[K]``, tensor ids, in any order, one may come several times.
        lanes: uint64 ``[K, 2]``, both lanes modulo 2^64.
    """

    ids: np.ndarray
    lanes: np.ndarray

    @classmethod
    def join(cls, parts: Iterable[Sums]) -> Sums:
        """Several one after the other; ids may repeat. One alone is given back as it is."""
        found = list(parts)
        if len(found) == 1:
            return found[0]
        if not found:
            return cls(np.empty(0, np.int64), np.empty((0, 2), np.uint64))
        return cls(np.concatenate([p.ids for p in found]), np.concatenate([p.lanes for p in found]))

    def over(self, ids: np.ndarray) -> np.ndarray:
        """Totals of the tensors ``ids`` (ascending, uint64 ``[len(ids), 2]``); sums of other tensors are left out."""
        num = len(ids)
        if num and len(self.ids) >= num and np.array_equal(self.ids[:num], ids):
            # What a backend that sums by tensor gives: searching and adding 100,000 rows one by one takes longer than an
            # update writes.
            out = self.lanes[:num].copy()
            return out if len(self.ids) == num else out + Sums(self.ids[num:], self.lanes[num:]).over(ids)
        out = np.zeros((num, 2), dtype=np.uint64)
        if num and len(self.ids):
            at = np.minimum(np.searchsorted(ids, self.ids), num - 1)
            mine = ids[at] == self.ids
            np.add.at(out, at[mine], self.lanes[mine])
        return out

    def of(self, tensor_id: int) -> Lanes:
        """Total of one tensor."""
        a, b = self.over(np.array([tensor_id]))[0]
        return Lanes(int(a), int(b))

"""What a placed publication consists of on the device: planes and plans of each arena, and sums read through them.

Comes between ``scatter_tables`` and ``scatter_placed``. Must import nothing above ``scatter_passes``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megasync.kernels.planes import Planes
from megasync.kernels.scatter_plan import ScatterPlan
from megasync.receiver.scatter_layout import WordLayout
from megasync.receiver.scatter_passes import Passes, Progress
from megasync.receiver.sums import Sums


@dataclass
class Reading:
    """Sums read through one pack.

    Attributes:
        plan: Tables.
        lanes: int64 ``[n, 4]`` on the device, a row a tensor of the pack.
        position: int64 ``[K]`` on the device, row of each touched tensor in the totals.
        touched: int64 ``[K]`` on the device, row of each touched tensor in ``lanes``.
        after: int64 ``[n, 2]`` on the device, sums of the words as they will be, once they were proven.
    """

    plan: ScatterPlan
    lanes: torch.Tensor
    position: torch.Tensor
    touched: torch.Tensor
    after: torch.Tensor | None = None


@dataclass
class Unit:
    """One arena: its planes and its plans.

    Attributes:
        lanes: Those of all its readings in one piece, so that they are cleared at once.
        before: int64 ``[n, 2]`` on the device, sums of the words that were proven.
    """

    words: WordLayout
    passes: Passes
    planes: Planes
    lanes: torch.Tensor
    places: Reading
    replicas: Reading | None
    copies: list[tuple[Reading, Reading]]
    progress: Progress
    before: torch.Tensor | None = None

    @property
    def others(self) -> list[Reading]:
        """Replicas and copies."""
        found = [self.replicas, *(r for pair in self.copies for r in pair)]
        return [r for r in found if r is not None]

    @property
    def counted(self) -> list[Reading]:
        """What the sums of proofs are of: places and replicas."""
        return [r for r in (self.places, self.replicas) if r is not None]


class Totals:
    """Sums of touched tensors, on the device and in host memory; both hold nothing until they are written."""

    def __init__(self, ids: np.ndarray, device: torch.device) -> None:
        self.ids = ids
        self.device = torch.empty((len(ids), 4), dtype=torch.int64, device=device)
        self.host = torch.empty((len(ids), 4), dtype=torch.int64, pin_memory=device.type == "cuda")

    def sums(self) -> tuple[Sums, Sums]:
        """Live words, and what they are after the next XOR."""
        lanes = self.host.numpy().view(np.uint64)
        return Sums(self.ids, lanes[:, :2].copy()), Sums(self.ids, lanes[:, :2] + lanes[:, 2:])

"""How evenly an ownership plan spreads the bytes, for logs, the `plan` tool and benchmarks. Must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megasync.schema import Schema
from megasync.trainer.plan_holdings import Holdings, brief_ranks


@dataclass(frozen=True, slots=True)
class StageBalance:
    """The ranks that hold parts of the same layers (a pipeline stage).

    Attributes:
        ranks: uint32, ascending.
        layers: Layers they hold, ascending; -1 (no layer) left out.
        nbytes: Bytes that they own together.
        largest_nbytes: Bytes of the fullest of them.
    """

    ranks: np.ndarray
    layers: tuple[int, ...]
    nbytes: int
    largest_nbytes: int

    @property
    def mean_nbytes(self) -> float:
        """Bytes a rank."""
        return self.nbytes / len(self.ranks)


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """Balance of a plan.

    Attributes:
        rank_nbytes: int64 ``[ranks]``, bytes that each rank owns.
        stages: Ranks with equal layers together, in order of their first layer.
        optimum_nbytes: Bytes that the fullest rank of any plan owns at least, given who holds what.
        num_units: Units of the plan.
        num_sets: Holder sets that own anything.
    """

    rank_nbytes: np.ndarray
    stages: tuple[StageBalance, ...]
    optimum_nbytes: int
    num_units: int
    num_sets: int

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the fullest rank."""
        return int(self.rank_nbytes.max(initial=0))

    @property
    def over_mean_ratio(self) -> float:
        """Largest over mean; 1 where nothing is owned."""
        total = int(self.rank_nbytes.sum())
        return self.largest_nbytes * len(self.rank_nbytes) / total if total else 1.0

    @property
    def over_optimum_ratio(self) -> float:
        """Largest over what the holder sets allow; 1 where nothing is owned."""
        return self.largest_nbytes / self.optimum_nbytes if self.optimum_nbytes else 1.0

    def __str__(self) -> str:
        """The table, one line a stage."""
        lines = [
            f"{self.rank_nbytes.sum() / 1e9:.2f} GB over {len(self.rank_nbytes)} ranks, {self.num_units} units, "
            f"{self.num_sets} holder sets: largest {self.largest_nbytes / 1e6:.2f} MB, {self.over_mean_ratio:.4f} x mean, "
            f"{self.over_optimum_ratio:.4f} x what the holders allow",
            f"{'layers':>12} {'GB':>9} {'MB mean':>9} {'MB max':>9} {'ratio':>7}  ranks",
        ]
        for s in self.stages:
            ratio = s.largest_nbytes / s.mean_nbytes if s.nbytes else 1.0
            layers = brief_ranks(s.layers, 3) or "none"
            lines.append(
                f"{layers:>12} {s.nbytes / 1e9:9.2f} {s.mean_nbytes / 1e6:9.2f} {s.largest_nbytes / 1e6:9.2f} "
                f"{ratio:7.4f}  {brief_ranks(s.ranks, 4)}"
            )
        return "\n".join(lines)


def balance_report(schema: Schema, cells: Holdings, loads: np.ndarray, optimum: int, num_units: int) -> BalanceReport:
    """Make the report of a plan.

    Args:
        schema: The run's schema.
        cells: Who holds what.
        loads: int64 ``[ranks]``, bytes owned.
        optimum: See ``BalanceReport``.
        num_units: Units of the plan.

    Returns:
        The report.
    """
    layers, column = np.unique(schema.layers, return_inverse=True)
    pairs = np.unique(np.stack([cells.set_ids.astype(np.int64), column[cells.tensor_ids]]), axis=1)
    held = np.zeros((len(loads), len(layers)), dtype=bool)
    for set_id, layer in pairs.T:
        if layers[layer] >= 0:
            held[cells.sets[int(set_id)], layer] = True
    rows, stage = np.unique(held, axis=0, return_inverse=True)
    stage = stage.reshape(-1)
    stages: list[StageBalance] = []
    for i, row in enumerate(rows):
        ranks = np.flatnonzero(stage == i).astype(np.uint32)
        own = loads[ranks]
        stages.append(StageBalance(ranks, tuple(layers[row].tolist()), int(own.sum()), int(own.max())))
    stages.sort(key=lambda s: (s.layers or (-1,), int(s.ranks[0])))
    return BalanceReport(loads, tuple(stages), optimum, num_units, len(np.unique(cells.set_ids)))

"""What launch/gpu_megatron.py measured, as rows and a table; an error where a version of the follower differs.

Runs on rank 0 at the end. Imports nothing of megasync.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from launch.bench.places import result_file
from launch.bench.rows import Row, RowWriter, middle, table

if TYPE_CHECKING:
    from launch.gpu_megatron import GpuMegatron

_FACTS = ("density", "pause_s", "backend")


def report(
    config: GpuMegatron,
    ranks: int,
    weights_nbytes: int,
    steps: list[Row],
    found: dict[int, Row],
    outcomes: dict[int, Row],
) -> None:
    """Write the rows, print medians, and compare.

    Args:
        config: Of the run.
        ranks: Of the trainer.
        weights_nbytes: Bytes of the whole model.
        steps: Rows of timed steps.
        found: What the trainer's full gather says, by version.
        outcomes: What was published, by version.

    Raises:
        RuntimeError: Versions differ, or none was compared.
    """
    lines = (Path(config.folder) / "follower.jsonl").read_text().splitlines()
    live = {r["version"]: r for r in map(json.loads, lines)}
    where: Row = {"layout": config.case, "ranks": ranks, "tp": config.tp, "dp": ranks // config.tp}
    where |= {"overlap": config.overlap, "gather": config.gather.value, "place": config.snapshot.value}
    where |= {"max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""), "weights_nbytes": weights_nbytes}
    where |= {"tokens": config.rows * config.num_microbatches * config.seq_length}
    differing = []
    with RowWriter(result_file(config.out, "megatron-gpu.jsonl"), "megatron") as out:
        for i, row in enumerate(steps):
            out.add("step", nbytes_in=weights_nbytes, nbytes_out=0, sample=i, **row, **where)
        for version, row in sorted(found.items()):
            other, outcome = live.get(version, {}), outcomes[version]
            same = all(other.get(k) == row.get(k) for k in ("digest", "sha256"))
            differing += [] if same else [version]
            facts: Row = {"equal": same, "num_changed": outcome["num_changed"], **{k: other.get(k) for k in _FACTS}}
            nbytes = outcome["payload_nbytes"]
            out.add("version", nbytes_in=weights_nbytes, nbytes_out=nbytes, sample=version, **(row | facts | where))
    if steps:
        print(table(("case", "median ms", "p20", "p80"), medians(steps)), flush=True)
    print(f"{config.case}: {len(found) - len(differing)} of {len(found)} versions equal, {weights_nbytes / 1e9:.3f} GB")
    if differing or not found:
        raise RuntimeError(f"versions {differing} of the follower differ from the trainer's full gather")


def medians(steps: list[Row]) -> list[tuple[str, ...]]:
    """Median, 20th and 80th percentile of the steps that published and of those that did not, in ms."""
    out = []
    for publishes in (False, True):
        # The first block of either kind is left out: the first publications compile and grow.
        mine = [r["took"].seconds for r in steps if r["publishes"] is publishes and r["block"] > 1]
        if mine:
            p50, p20, p80 = middle(mine)
            out.append((f"step, publishing: {publishes}", *(f"{x * 1e3:.2f}" for x in (p50, p20, p80))))
    return out

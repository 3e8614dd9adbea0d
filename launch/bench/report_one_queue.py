"""The table of what a comparison costs the step that it is queued beside, with all streams in one hardware queue (P2).

Before it: bench_one_queue, through report_rows. After it: report_tables.
"""

from __future__ import annotations

from launch.bench.report_rows import Results, Stat, stat
from launch.bench.rows import Row

FILE = "one-queue-gpu"
_ALONE = "products alone"

TITLE = (
    "What comparing weights with a snapshot costs the step that it is queued beside, where `CUDA_DEVICE_MAX_CONNECTIONS=1` puts"
    " all streams of a GPU into one hardware queue: 450 matrix products stand for the step, an event is recorded on their stream"
    " behind the beginning, as every collective of a trainer records one, and a plain kernel stands for the mask (so it is the"
    " queueing that is compared, not the library). Copies down are what megasync does there with a snapshot in host"
    " memory; steps in pairs, with and without, by the clock:"
)
"""What stands above the table."""

HEADER = ("queued beside the step", "GB", "step alone, ms", "step, ms", "slower, %", "held after the last product, ms")


def lines(results: Results) -> list[list[str]]:
    """Lines of the table, by the columns of ``HEADER``; none where nothing was measured."""
    rows = results.files.get(FILE, [])
    cases = dict.fromkeys(r["case"] for r in rows if r["case"] != _ALONE)
    return [_line(case, rows) for case in cases]


def _line(case: str, rows: list[Row]) -> list[str]:
    mine = [r for r in rows if r["case"] == case]
    alone = stat([r for r in rows if r["case"] == _ALONE and r["beside"] == case], "seconds").scaled(1e3)
    beside, held = stat(mine, "seconds").scaled(1e3), stat(mine, "held_s").scaled(1e3)
    slower = f"{100 * (beside.p50 / alone.p50 - 1):.2f}"
    return [case, f"{mine[0]['nbytes_in'] / 1e9:.2f}", _spread(alone), _spread(beside), slower, f"{held.p50:.2f}"]


def _spread(found: Stat) -> str:
    return f"{found.p50:.1f} ({found.p20:.1f}-{found.p80:.1f})"

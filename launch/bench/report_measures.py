"""A figure with its floor and what must be said with it, and how parts of targets get theirs from the rows.

The case that counts is the one the library runs by default, never the best of the variants tried beside it. Floor and
figure are of the same file, so of the same run. Before it: report_rows. After it: report_apply, report_trainer,
report_cpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.bench.report_rows import NotMeasuredError, Results, Stat, stat
from launch.bench.rows import Row

SHARE_NBYTES = 445_000_000_000 // 64
"""Weights of one of 64 trainer ranks."""

TWO_SLOTS_LIMIT = 1.15
"""What P7 allows: the whole stream over the larger of its decoder alone and its XOR alone."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure.

    Attributes:
        value: Samples.
        floor: What physics allows, in the same unit; None where none was measured.
        row: One of the rows: device, versions and commit.
        said: Conditions, from the rows.
        short: Why the figure does not count for its target; empty where it does.
    """

    value: Stat
    floor: float | None
    row: Row
    said: str = ""
    short: str = ""


Measure = Callable[[Results], Measured]


def declared(target: str) -> Measure:
    """Rows of any file that say themselves what they are for.

    Columns: ``target_id``, ``value`` and perhaps ``floor`` in the unit of the part, ``said`` for conditions.
    """

    def measure(results: Results) -> Measured:
        rows = [r for of_file in results.files.values() for r in of_file if r.get("target_id") == target]
        if not rows:
            raise NotMeasuredError(f"no rows with target_id {target!r}: no benchmark in launch/bench has written any")
        floor = stat(rows, "floor").p50 if "floor" in rows[0] else None
        return Measured(stat(rows, "value"), floor, rows[0], str(rows[0].get("said", rows[0]["case"])))

    return measure


def first(*measures: Measure) -> Measure:
    """The first of several ways to measure the same that has rows; the reason of the first where none has."""

    def measure(results: Results) -> Measured:
        for each in measures:
            if found := value_of(each, results):
                return found
        return measures[0](results)

    return measure


def smaller(found: int, named: int) -> str:
    """Why weights of ``found`` bytes do not count for a target that names ``named``; empty where they do."""
    return "" if found > 0.95 * named else f"{found / 1e9:.3g} GB, the target names {named / 1e9:.3g}"


def value_of(measure: Measure, results: Results) -> Measured | None:
    """The figure, or None where its rows are not there."""
    try:
        return measure(results)
    except NotMeasuredError:
        return None

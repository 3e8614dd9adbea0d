"""A figure with its floor and what must be said with it, and how parts of targets get theirs from the rows.

The case that counts is the one the library runs by default, never the best of the variants tried beside it. Floor and
figure are of the same file, so of the same run. Before it: report_rows. After it: report_apply, report_trainer,
report_cpu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.bench.report_rows import NotMeasuredError, Results, Stat
from launch.bench.rows import Row

SHARE_NBYTES = 445_000_000_000 // 64
"""Weights of one of 64 trainer ranks."""


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


def not_measured(reason: str) -> Measure:
    """A part that no benchmark of the repository has rows for."""

    def measure(results: Results) -> Measured:
        raise NotMeasuredError(reason)

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

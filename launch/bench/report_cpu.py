"""Figures that need no GPU: ownership plan, both ends on one core, payload against its bound.

Before it: report_measures. After it: report_targets, report_series.
"""

from __future__ import annotations

from launch.bench.report_measures import Measure, Measured
from launch.bench.report_rows import Results, stat


def plan_case(column: str) -> Measure:
    """The ownership plan of the 445 GB model on one core (P9)."""

    def measure(results: Results) -> Measured:
        rows = results.take("plan-moe-445gb-cpu", "fp4-weights")
        r = rows[0]
        said = (
            f"{r['num_tensors']} tensors, {r['num_units']} units, {r['ranks']} ranks, "
            f"{stat(rows, 'cpu_s').p50:.2g} s of processor time at a load of {stat(rows, 'load_before').p50:.3g}"
        )
        return Measured(stat(rows, column), 1.0 if column.endswith("ratio") else None, r, said)

    return measure


def cpu_speed(case: str, *, density: float = 0.001, nbytes: float = 8e9) -> Measure:
    """GB of weights a second of processor time on one core (P10); comparing all weights once is what encoding must do."""

    def measure(results: Results) -> Measured:
        rows = results.take("cpu", case, density=density)
        wall = stat(rows, lambda r: r["nbytes_in"] / 1e9 / r["seconds"]).p50
        said = (
            f"{rows[0]['nbytes_in'] / 1e9:.2f} GB, {density:.3%} of bytes changed, all checks on, of processor time; "
            f"{wall:.3g} GB/s by the clock at a load of {stat(rows, 'load').p50:.3g}"
        )
        found = rows[0]["nbytes_in"]
        short = "" if found > 0.95 * nbytes else f"{found / 1e9:.2f} GB, the target names {nbytes / 1e9:.3g}"
        floor = _gb_a_second(results, "compare") if case == "encode" else None
        return Measured(stat(rows, lambda r: r["nbytes_in"] / 1e9 / r["cpu_s"]), floor, rows[0], said, short)

    return measure


def _gb_a_second(results: Results, case: str) -> float:
    return stat(results.take("cpu", case), lambda r: r["nbytes_in"] / 1e9 / r["cpu_s"]).p50

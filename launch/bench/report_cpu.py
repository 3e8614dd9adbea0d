"""Figures that need no GPU: ownership plan, both ends on one core, payload against its bound.

Before it: report_measures. After it: report_targets, report_series.
"""

from __future__ import annotations

from launch.bench.report_measures import Measure, Measured, smaller
from launch.bench.report_rows import NotMeasuredError, Results, stat
from launch.bench.rows import Row

LARGE_NBYTES = 256 << 20
"""What counts as one large tensor."""


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
        floor = _gb_a_second(results, "compare") if case == "encode" else None
        return Measured(
            stat(rows, lambda r: r["nbytes_in"] / 1e9 / r["cpu_s"]),
            floor,
            rows[0],
            said,
            smaller(rows[0]["nbytes_in"], round(nbytes)),
        )

    return measure


def _gb_a_second(results: Results, case: str) -> float:
    return stat(results.take("cpu", case), lambda r: r["nbytes_in"] / 1e9 / r["cpu_s"]).p50


def payload_over_bound(starts: str, nbytes: int) -> Measure:
    """All bytes that a receiver fetches over the order-0 bound, the worst of some cases (P4).

    Args:
        starts: What the names of the cases start with.
        nbytes: Weights that the target names.
    """

    def measure(results: Results) -> Measured:
        rows = [r for r in decisive(results) if r["case"].startswith(starts)]
        if not rows:
            raise NotMeasuredError(f"payload-cpu.jsonl has no rows of {starts!r} with a target")
        r = max(rows, key=lambda r: r["over_bound_ratio"])
        said = (
            f"{r['case']}: {r['nbytes_out'] / 1e6:.3f} MB with manifest, tables and digests, "
            f"{r['nbytes_out'] / r['nbytes_in']:.4%} of {r['nbytes_in'] / 1e9:.2f} GB, bound "
            f"{r['bound_nbytes'] / r['nbytes_in']:.4%}"
        )
        return Measured(stat([r], "over_bound_ratio"), 1.0, r, said, smaller(r["nbytes_in"], nbytes))

    return measure


def payload_over_peer(results: Results) -> Measured:
    """Fetched bytes over those of CPU Zstd-1 in frames of 1 MiB, the worst of the cases that have a target (P4)."""
    r = max(decisive(results), key=lambda r: r["nbytes_out"] / r["peer_nbytes"])
    return Measured(stat([r], lambda r: r["nbytes_out"] / r["peer_nbytes"]), None, r, f"closest on {r['case']}")


def decisive(results: Results) -> list[Row]:
    """Rows of the default codec on the masks and lists that P4 names."""
    return [r for r in results.take("payload-cpu", codec="sparse") if r["target"]]

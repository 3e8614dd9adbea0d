"""Figures of the receiver's kernels: scatter apply, BF16 lists, audit.

Before it: report_measures. After it: report_targets, report_series.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from launch.bench.report_measures import Measure, Measured
from launch.bench.report_rows import NotMeasuredError, Results, stat

ENTRIES = 94_600_000
"""Changed bytes of one TP4 rank's shard: 0.085 % of 111.25 GB."""


def apply_ms(case: str) -> Measure:
    """An apply of the model-like rank beside the scatter floor (P1, P1b)."""

    def measure(results: Results) -> Measured:
        rows = results.take("apply-gpu", case)
        floor = stat(results.take("apply-gpu", "P1 scatter floor"), "seconds").p50 * 1e3
        entries = rows[0]["nbytes_out"] // 4
        said = f"{entries / 1e6:.1f} M entries, {rows[0]['density']:.3%} of the bytes of a model-like TP4 rank"
        if stat(rows, "seconds").p50 * 1e3 < floor:
            said += ", below the floor since that reads ready-made addresses, 12 bytes an entry, and an apply 3 or 4"
        short = "" if entries > 0.95 * ENTRIES else f"{entries} entries, the target names {ENTRIES}"
        return Measured(stat(rows, "seconds").scaled(1e3), floor, rows[0], said, short)

    return measure


apply_in_hbm = apply_ms("P1 apply, entries in HBM")
apply_pinned = apply_ms("P1 apply, entries pinned, as chosen")


def touched_old(results: Results) -> Measured:
    """The touched-old check of staging: reads what an apply would write."""
    rows = results.take("apply-gpu", "touched-old check (stage)")
    return Measured(stat(rows, "seconds").scaled(1e3), None, rows[0])


def apply_proved(results: Results) -> Measured:
    """P1b: what the pause holds, with the share of staging said beside it."""
    found = apply_ms("P1b apply, sums, compare, read-back")(results)
    check = touched_old(results).value.p50
    said = f"{found.said}; the touched-old check ran in stage, {check:.3g} ms; one rank, so no exchange of votes"
    return Measured(found.value, found.floor, found.row, said, found.short)


def bf16_ms_per_gb(rate: float) -> Measure:
    """A BF16 list with a share of its elements changed (P6)."""

    def measure(results: Results) -> Measured:
        rows = results.take("apply-gpu", f"P6 bf16 {rate:.1%}, as chosen")
        nbytes = rows[0]["weights_nbytes"]
        floor = stat(results.take("apply-gpu", f"P6 floor, bf16 {rate:.1%} of elements"), "seconds").p50 * 1e12 / nbytes
        said = f"{rows[0]['nbytes_out'] // 4 / 1e6:.1f} M elements of {nbytes / 1e9:.2f} GB, kernel, digests off"
        return Measured(stat(rows, "seconds").scaled(1e12 / nbytes), floor, rows[0], said)

    return measure


def audit_class(results: Results, case: str) -> Measured:
    """Share of read bandwidth, in percent, that the audit reaches on one class of layout."""
    reads = results.cases("audit-gpu", "floor: read")
    rows = results.take("audit-gpu", case)
    each = [stat(results.take("audit-gpu", c), lambda r: r["seconds"] / r["nbytes_in"]).p50 for c in reads]
    if not each:
        raise NotMeasuredError(
            "audit-gpu.jsonl has no rows of reading at full speed (python -m launch.bench.bench_audit)"
        )
    share = stat(rows, lambda r: 100 * min(each) * r["nbytes_in"] / r["seconds"])
    return Measured(share, 100.0, rows[0], f"{rows[0]['nbytes_in'] / 1e9:.1f} GB, {case.removeprefix('P8 ')}")


def audit_share(kind: str, fits: Callable[[str], bool]) -> Measure:
    """The slowest class of layouts that fits (P8).

    Args:
        kind: What the classes are, for a message.
        fits: Whether a case is one of them.
    """

    def measure(results: Results) -> Measured:
        found = [audit_class(results, case) for case in audit_classes(results) if fits(case)]
        if not found:
            results.take("audit-gpu", f"P8 {kind}")
        return min(found, key=lambda f: f.value.p50)

    return measure


def num_digits(case: str) -> int:
    """Digits of the remap records of a class; 1 where a slice lies as it does in the checkpoint."""
    found = re.search(r"(\d+) digits", case)
    return int(found.group(1)) if found else 0


def audit_classes(results: Results) -> list[str]:
    """Cases of the audit as the library launches it, one a class of layout."""
    return [c for c in results.cases("audit-gpu", "P8 ") if c.endswith(", as chosen")]

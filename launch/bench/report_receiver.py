"""Figures of the receiver's real path on a model-like engine rank: staging, pause, two slots, tokens beside staging.

Before it: report_measures. After it: report_targets, report_series.
"""

from __future__ import annotations

from launch.bench import report_counters
from launch.bench.report_measures import Measure, Measured, smaller
from launch.bench.report_rows import Results, stat
from launch.bench.rows import Row

LIVE_NBYTES = 111_250_000_000
"""Live weights of one TP4 rank."""

CORES = 16
"""Cores that P5 names."""

FILE = "receiver-gpu"


def pause(results: Results) -> Measured:
    """P1b: the pause of an applier."""
    rows = results.take(FILE, "P1b pause: write, new-state digest, read-back, vote, resume")
    floor = stat(results.take(FILE, "P1 scatter floor"), "seconds").p50 * 1e3
    said = f"{_live(rows[0])} through Applier, touched-old check in stage, the other ranks of the engine vote at once"
    return Measured(stat(rows, "seconds").scaled(1e3), floor, rows[0], said, _short(rows[0]))


def staging(results: Results) -> Measured:
    """P5: fetch, checks, decode, bind, touched-old check, until the applier could pause."""
    rows = results.take(FILE, "P5 staging, as called")
    r = rows[0]
    said = (
        f"{_live(r)}, {r['num_frames']} frames of 64 owners at another TP, {r['nbytes_in'] / 1e6:.0f} MB fetched from "
        f"memory, {r['staged_share']:.3f} of the entries kept, {r['workers']} processes on {r['cores']} cores, all checks and the proof of the base on"
    )
    short = "" if r["cores"] <= CORES else f"{r['cores']} cores, the target names {CORES}"
    return Measured(stat(rows, "seconds"), None, r, said, short or _short(r))


def two_slots(results: Results) -> Measured:
    """P7: the stream over the larger of its decoder alone and its XOR alone."""
    alone = {k: stat(results.take(FILE, f"P7 {k} alone"), "seconds").p50 for k in ("decoder", "XOR")}
    rows = results.take(FILE, "P7 two slots, total")
    total = stat(rows, "seconds").p50
    ratio = stat(rows, lambda r: r["seconds"] / max(alone.values()))
    said = (
        f"{_live(rows[0])}, nvCOMP on the SMs, {total * 1e3:.1f} ms; decoder alone {alone['decoder'] * 1e3:.1f} ms, XOR "
        f"alone {alone['XOR'] * 1e3:.1f} ms, {rows[0]['num_steps']} steps{report_counters.said(results, ratio.p50)}"
    )
    return Measured(ratio, 1.0, rows[0], said, _short(rows[0]))


def slots_beyond(results: Results) -> Measured:
    """P7: device memory beyond the weights and two slots, in MB."""
    r = results.take(FILE, "P7 two slots, total")[0]
    said = f"{r['hbm_nbytes'] / 1e6:.0f} MB beyond the weights, slots {r['slots_nbytes'] / 1e6:.0f} MB"
    return Measured(stat([r], lambda r: (r["hbm_nbytes"] - r["slots_nbytes"]) / 1e6), None, r, said)


def token_slowdown(results: Results) -> Measured:
    """P12: the 99th percentile of token latency beside quiet staging, which is what an engine that serves has, in percent."""
    beside = results.take(FILE, "P12 token beside staging, quiet")
    alone = results.take(FILE, "P12 token alone")
    r, before = beside[0], alone[0]["p99_s"]
    said = (
        f"p99 of {len(beside)} tokens {r['p99_s'] * 1e3:.3f} ms, {before * 1e3:.3f} ms of {len(alone)} alone, by turns; decoder "
        f"in a CUDA graph; worker processes: {r['processes']}, which stage one version after the other, {r['stage_s']:.2f} s each; HBM added "
        f"{r['hbm_nbytes'] / 1e6:.0f} MB"
    )
    return Measured(stat(beside[:1], lambda x: 100 * (x["p99_s"] / before - 1)), 0.0, r, said)


def case_ms(case: str) -> Measure:
    """A case of the receiver, with its floor where its rows have one."""

    def measure(results: Results) -> Measured:
        rows = results.take(FILE, case)
        floor = rows[0]["floor_s"] * 1e3 if "floor_s" in rows[0] else None
        return Measured(stat(rows, "seconds").scaled(1e3), floor, rows[0])

    return measure


def _live(row: Row) -> str:
    return f"{row['live_nbytes'] / 1e9:.2f} GB live"


def _short(row: Row) -> str:
    return smaller(row["live_nbytes"], LIVE_NBYTES)

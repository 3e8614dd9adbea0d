"""Figures of the trainer's side on a GPU: mask pass, stream held, step slowdown, payload durable.

Before it: report_measures. After it: report_targets, report_series.
"""

from __future__ import annotations

from launch.bench.report_measures import SHARE_NBYTES, Measure, Measured, smaller
from launch.bench.report_rows import Results, stat


def mask_pass(place: str) -> Measure:
    """Busy time of mask, compaction, sums and snapshot update (P2), as the callback runs it."""

    def measure(results: Results) -> Measured:
        floor_of = "copy_floor_s" if place == "device" else "pcie_floor_s"
        rows = results.take("trainer-gpu", "sync", place=place)
        said = (
            f"{rows[0]['nbytes_in'] / 1e9:.2f} GB through MegasyncCallback, {rows[0]['density']:.3%} of bytes changed"
        )
        floor = stat(rows, floor_of).p50 * 1e3
        return Measured(
            stat(rows, "busy_s").scaled(1e3), floor, rows[0], said, smaller(rows[0]["nbytes_in"], SHARE_NBYTES)
        )

    return measure


def mask_kernels(place: str) -> Measure:
    """The kernels of the mask pass alone."""

    def measure(results: Results) -> Measured:
        device = place == "device"
        where, floor_case = ("HBM", "P2 floor: copy of the share") if device else ("pinned", "P2 floor: PCIe up")
        rows = results.take("mask-gpu", f"P2 mask + compact + sums + snapshot, {where}, as chosen")
        floor = stat(results.take("mask-gpu", floor_case), "seconds").p50 * 1e3
        nbytes = rows[0]["nbytes_in"] // 2
        said = f"kernels alone, {nbytes / 1e9:.2f} GB, {rows[0]['density']:.3%} of bytes changed"
        return Measured(stat(rows, "seconds").scaled(1e3), floor, rows[0], said, smaller(nbytes, SHARE_NBYTES))

    return measure


def stream_held(place: str, file: str = "trainer-gpu") -> Measure:
    """How long the trainer's stream waits for the mask pass (P2)."""

    def measure(results: Results) -> Measured:
        rows = results.take(file, "step", place=place, syncs=True)
        return Measured(stat(rows, "held_s").scaled(1e3), 0.0, rows[0], _step_said(results, file, place))

    return measure


def step_slowdown(file: str, place: str) -> Measure:
    """Steps with a sync behind them over steps without, taken in turn, in percent (P2)."""

    def measure(results: Results) -> Measured:
        rows = results.take(file, "step", place=place, syncs=True)
        alone = stat(results.take(file, "step", place=place, syncs=False), "seconds").p50
        slower = stat(rows, lambda r: 100 * (r["seconds"] / alone - 1))
        said = f"{_step_said(results, file, place)}, {alone * 1e3:.1f} ms without a sync"
        connections = rows[0]["max_connections"]
        return Measured(slower, 0.0, rows[0], f"{said}, CUDA_DEVICE_MAX_CONNECTIONS={connections or 'unset'}")

    return measure


def _step_said(results: Results, file: str, place: str) -> str:
    nbytes = results.take(file, "sync", place=place)[0]["nbytes_in"]
    return f"{nbytes / 1e9:.2f} GB of weights, matrix products stand for forward and backward"


def durable(results: Results) -> Measured:
    """P3. The floor reads both states once and brings the payload down; what fsync must cost is not in it."""
    rows = results.take("trainer-gpu", "sync", place="device")
    floor = stat(rows, lambda r: 1e3 * (r["copy_floor_s"] + r["nbytes_out"] * r["pcie_floor_s"] / r["nbytes_in"]))
    system = rows[0]["file_system"]
    said = f"{rows[0]['nbytes_in'] / 1e9:.2f} GB, payload {rows[0]['nbytes_out'] / 1e6:.1f} MB, fsync on {system}"
    short = smaller(rows[0]["nbytes_in"], SHARE_NBYTES)
    if system in ("tmpfs", "ramfs"):
        said += ", where it costs nothing"
    return Measured(stat(rows, "durable_s").scaled(1e3), floor.p50, rows[0], said, short)


def sync_ms(column: str) -> Measure:
    """A stage of a sync with the snapshot in HBM, from its column of seconds."""

    def measure(results: Results) -> Measured:
        rows = results.take("trainer-gpu", "sync", place="device")
        return Measured(stat(rows, column).scaled(1e3), None, rows[0])

    return measure

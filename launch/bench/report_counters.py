"""What hardware counters say of P7: whether decoder and XOR of a layer could run side by side in the time that it allows.

Each kernel's seconds times the share of a peak that it reached alone are its seconds at that peak. Those of all kernels of a
layer, over a time in which they would all have to run, are the share of the peak that this would take. Before it:
bench_counters, through report_rows. After it: report_receiver (P7's conditions), report_tables.
"""

from __future__ import annotations

from itertools import groupby

from launch.bench.report_measures import TWO_SLOTS_LIMIT
from launch.bench.report_rows import NotMeasuredError, Results, stat
from launch.bench.rows import Row, middle

FILE = "counters-gpu"
_LAYER = "MoE layer"

_PARTS = {"L2": "l2_ratio", "issue slots": "issue_ratio", "DRAM": "dram_ratio"}
"""What two kernels side by side share, and its column."""

TITLE = (
    "Why the two slots of P7 overlap less than asked, by hardware counters: the kernels of one MoE layer (medians over those"
    " measured), each launch alone under Nsight Compute, and how much of its peak each part of the GPU reached. The last lines"
    " have the work of all of them in one time: seconds x share of the peak, added up, over that time. **A reason, not a"
    " proof**: clocks were not fixed, issue slots are counted while an SM is active, and the share of L2 is that of its busiest"
    " unit, which need not be the same one in both kernels, so what is added up is an upper estimate:"
)
"""What stands above the table."""

HEADER = ("kernel", "blocks", "ms", *(f"{part}, % of peak" for part in _PARTS), "warps active, %", "registers")


def layers(results: Results) -> list[list[Row]]:
    """Launches of each MoE layer that was measured, its decoder first.

    Raises:
        NotMeasuredError: There are none.
    """
    rows = sorted(results.take(FILE, layer=_LAYER), key=lambda r: (r["step"], r["launch"]))
    return [list(mine) for _, mine in groupby(rows, lambda r: r["step"])]


def needed(found: list[list[Row]], column: str) -> float:
    """Seconds at the peak of all kernels of a layer over the seconds of its decoder: the median of the layers.

    Args:
        found: From ``layers``.
        column: Share of the peak.
    """
    return middle(sum(r["seconds"] * r[column] for r in mine) / mine[0]["seconds"] for mine in found)[0]


def said(results: Results, measured: float) -> str:
    """What the counters say of P7, to be put behind its conditions; empty where there are none.

    Args:
        results: The rows.
        measured: Total over the larger of decoder alone and XOR alone.
    """
    try:
        found = layers(results)
    except NotMeasuredError:
        return ""
    decoder = [mine[0] for mine in found]
    largest = [max(mine[1:], key=lambda r: float(r["seconds"])) for mine in found]
    alone = [f"{part} at {_percent(decoder, c)} and {_percent(largest, c)}" for part, c in _PARTS.items()]
    would = {part: needed(found, column) for part, column in _PARTS.items()}
    asked = [f"{part} at {100 * share / TWO_SLOTS_LIMIT:.0f}" for part, share in would.items()]
    return (
        f"; a reason, not a proof, by hardware counters of {len(found)} MoE layers (each kernel alone, clocks not fixed, sums are"
        f" upper estimates): the decoder and the largest XOR of the layer keep {', '.join(alone)} % of the peak; what all"
        f" kernels of the layer ask of L2 takes {would['L2']:.2f} of the decoder's time at the peak of L2, so in"
        f" {TWO_SLOTS_LIMIT:g} x that time they would have to keep {', '.join(asked)} % throughout, and in the {measured:.4g} x"
        f" measured, were all steps such layers, they keep L2 at {100 * would['L2'] / measured:.0f} %: they share L2 first, then"
        " issue slots, and DRAM least"
    )


def _percent(rows: list[Row], column: str) -> str:
    return f"{100 * stat(rows, column).p50:.1f}"


def lines(results: Results, measured: float | None) -> list[list[str]]:
    """Lines of the table, by the columns of ``HEADER``; none where nothing was measured.

    Args:
        results: The rows.
        measured: P7's total over the larger of decoder alone and XOR alone, where it is known.
    """
    try:
        found = layers(results)
    except NotMeasuredError:
        return []
    out = [_line(list(same)) for same in zip(*found, strict=True)]
    times = {"the decoder's time": 1.0, f"{TWO_SLOTS_LIMIT:g} x that time, as asked": TWO_SLOTS_LIMIT}
    if measured is not None:
        times[f"{measured:.4g} x that time, as measured over all steps"] = measured
    took = stat([mine[0] for mine in found], "seconds").p50
    for name, times_decoder in times.items():
        shares = [f"{100 * needed(found, column) / times_decoder:.1f}" for column in _PARTS.values()]
        out.append([f"all of them in {name}", "", f"{1e3 * took * times_decoder:.3f}", *shares, "", ""])
    return out


def _line(same: list[Row]) -> list[str]:
    r, took = same[0], 1e3 * stat(same, "seconds").p50
    shares = [_percent(same, column) for column in (*_PARTS.values(), "warps_ratio")]
    return [f"{r['kernel']}: {r['work']}", str(r["grid"]), f"{took:.3f}", *shares, str(r["num_registers"])]

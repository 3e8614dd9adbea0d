"""The table of peers: what else one could do, in ms a GB of weights, from the rows of bench_peers.

Before it: report_rows. After it: report_tables.
"""

from __future__ import annotations

from launch.bench.report_rows import Results, stat
from launch.bench.rows import Row

FILES = ("peers-gpu", "peers-nvlink-gpu")

TITLE = (
    "Other ways to new weights, on the same model-like list in one run (the copy between GPUs in its own), fastest first; "
    "input in pinned host memory unless HBM is named, 0.085 % of the bytes changed, 4-bit, scales and BF16 together:"
)
"""What stands above the table."""

HEADER = ("way", "ms a GB of weights", "MB to the device a GB", "checked", "GB of weights")


def peer_rows(results: Results) -> list[list[Row]]:
    """Rows by way, fastest first."""
    groups: dict[str, list[Row]] = {}
    for name in FILES:
        for row in results.files.get(name, []):
            groups.setdefault(row["way"], []).append(row)
    return sorted(groups.values(), key=lambda rows: stat(rows, _ms_per_gb).p50)


def peer_lines(results: Results) -> list[list[str]]:
    """Lines of the table, by the columns of ``HEADER``; none where nothing was measured."""
    lines = []
    for rows in peer_rows(results):
        took, r = stat(rows, _ms_per_gb), rows[0]
        spread = f" ({_digits(took.p20)}-{_digits(took.p80)})" if took.num > 1 else ""
        moved = 1e3 * r["moved_nbytes"] / r["weights_nbytes"]
        each = _digits(took.p50) + spread
        lines.append([r["way"], each, _digits(moved), str(r["checked"]), f"{r['weights_nbytes'] / 1e9:.1f}"])
    return lines


def _ms_per_gb(row: Row) -> float:
    return float(row["seconds"]) * 1e12 / float(row["weights_nbytes"])


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1 else f"{value:.3g}"

"""The table of quantised export on a GPU: each pass and the whole, as share of the bandwidth of copying.

Before it: report_rows. After it: report_tables.
"""

from __future__ import annotations

from launch.bench.report_rows import Results, stat
from launch.bench.rows import Row

FILE = "nvfp4-gpu"

TITLE = (
    "Quantised export of BF16 weights on the device, bytes read and written by all passes over the bandwidth of a copy in the "
    "same run (the exchange of amax over the ranks is not in it; at least 50 % is asked of the whole):"
)
"""What stands above the table."""

HEADER = ("work", "ms", "GB read and written", "% of copying", "GB of BF16")


def lines(results: Results) -> list[list[str]]:
    """Lines of the table, by the columns of ``HEADER``; none where nothing was measured."""
    groups: dict[str, list[Row]] = {}
    for row in results.files.get(FILE, []):
        if "copy_share" in row:
            groups.setdefault(row["case"], []).append(row)
    found = []
    for case, rows in groups.items():
        r, took = rows[0], stat(rows, lambda r: 1e3 * r["seconds"])
        share = stat(rows, lambda r: 100 * r["copy_share"])
        spread = f"{took.p50:.3f} ({took.p20:.3f}-{took.p80:.3f})"
        moved = (r["nbytes_in"] + r["nbytes_out"]) / 1e9
        found.append([case, spread, f"{moved:.2f}", f"{share.p50:.1f}", f"{2 * r['weights'] / 1e9:.2f}"])
    return found

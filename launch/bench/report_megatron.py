"""The table of runs of Megatron on GPUs: versions compared with an engine in another process, and steps with publishing.

Before it: launch.gpu_megatron, through report_rows. After it: report_tables.
"""

from __future__ import annotations

from launch.bench.report_rows import MEGATRON, Results, Stat, stat
from launch.bench.rows import Row

TITLE = (
    "Real Megatron training (megatron-core 0.19.2) with megasync: a Llama-shaped model of **random weights, on random tokens**,"
    " trained with Adam in Megatron's local layers, not TransformerEngine's, so that its steps are bound by launching kernels"
    " from Python, and the publisher's threads take turns at the same interpreter. After the timed steps every step published,"
    " and each of these versions was compared by a digest of all bytes: a plain full gather of the trainer's weights"
    " against the live weights of an engine that followed in another process; the pause is that engine's, with nothing to"
    " decode. Steps are medians of blocks in which every step published and of blocks in which none did, in turn, without the"
    " first block of either kind (it compiles and grows) and without the first step of each block: in a block that publishes"
    " nothing runs behind it yet, and in the block after it the last publication still does:"
)

_TOKENS = 8_192
"""A step and data parallel rank in files that do not say."""

HEADER = (
    "layout (TP x DP)",
    "tokens a step and DP rank",
    "GB",
    "versions equal",
    "changed weights, %",
    "payload, MB",
    "pause, ms",
    "step, ms",
    "step that publishes, ms",
    "slower, %",
)


def lines(results: Results) -> list[list[str]]:
    """Lines of the table, by the columns of ``HEADER``: one a file; none where nothing was measured."""
    return [_line(results.files[name]) for name in results.family(MEGATRON)]


def steps(rows: list[Row], *, publishes: bool) -> list[Row]:
    """Timed steps that count: not the first block of either kind, not the first step of a block.

    Args:
        rows: Of a file.
        publishes: Whether of the blocks that publish.
    """
    timed = [r for r in rows if r["case"] == "step" and r["publishes"] is publishes]
    return [r for r in timed if r["block"] > 1 and r["step"] > 0]


def _line(rows: list[Row]) -> list[str]:
    r = rows[0]
    layout = f"{r['layout']}: {r['tp']} x {r['dp']}" + (", overlapped" if r["overlap"] else "")
    compared = [v for v in rows if v["case"] == "version"]
    deltas = [v for v in compared if v["version"] > 0]
    equal = sum(v["equal"] is True for v in compared)
    alone, beside = (_ms(steps(rows, publishes=which)) for which in (False, True))
    return [
        layout,
        f"{r.get('tokens', _TOKENS):,}",
        f"{r['weights_nbytes'] / 1e9:.2f}",
        f"{equal} of {len(compared)}" if equal == len(compared) else f"**no**: {equal} of {len(compared)}",
        _median(deltas, "density", 100, ".3f"),
        _median(deltas, "nbytes_out", 1e-6, ".1f"),
        _median(deltas, "pause_s", 1e3, ".2f"),
        _spread(alone),
        _spread(beside),
        f"{100 * (beside.p50 / alone.p50 - 1):.1f}" if alone and beside else "",
    ]


def _median(rows: list[Row], column: str, factor: float, form: str) -> str:
    """Of the rows that have it: what the engine says of a version is absent where it never showed that one."""
    known = [r for r in rows if r.get(column) is not None]
    return format(stat(known, column).scaled(factor).p50, form) if known else ""


def _ms(rows: list[Row]) -> Stat | None:
    return stat(rows, "seconds").scaled(1e3) if rows else None


def _spread(found: Stat | None) -> str:
    return f"{found.p50:.1f} ({found.p20:.1f}-{found.p80:.1f})" if found else ""

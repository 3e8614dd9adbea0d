"""The README's pictures, as SVG: what each shows, whether the rows for it are there, and how it is drawn.

Before it: report_series. After it: report (draws), report_tables (links). Imports matplotlib only to draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.bench import report_deltas
from launch.bench.report_measures import Measured
from launch.bench.report_rows import Results
from launch.bench.report_series import bf16_by_rate, bf16_peers, payload_sweep, stages

_INK, _QUIET, _WARM = "#1f5fa8", "#8a8a8a", "#c2571a"
_STYLE: Any = {"font.size": 9, "svg.hashsalt": "megasync", "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture.

    Attributes:
        caption: What it shows.
        size: Inches.
        data: Its series; empty where the rows are not there.
        draw: Draws the series.
    """

    caption: str
    size: tuple[float, float]
    data: Callable[[Results], list[Any]]
    draw: Callable[[Any, list[Any], Results], None]


def _draw_payload(page: Any, data: list[dict[str, list[tuple[float, float]]]], results: Results) -> None:
    left, right = page.subplots(1, 2, sharey=True)
    for axis, series, name in ((left, data[0], "bytes, random values"), (right, data[1], "BF16, steps of an ulp")):
        for i, (codec, points) in enumerate(series.items()):
            strong = codec == "sparse"
            style: Any = {"color": _INK, "lw": 2.5, "zorder": 3} if strong else {"color": f"C{i % 9 + 1}", "lw": 1}
            axis.plot([100 * x for x, _ in points], [y for _, y in points], ".-", label=codec, **style)
        axis.axhline(1, color="black", ls="--", lw=1)
        axis.set(xscale="log", yscale="log", xlabel="changed words, %", title=name)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
    left.set(ylabel="fetched bytes / order-0 bound")
    right.legend(frameon=False)


def _sweeps(results: Results) -> list[Any]:
    found = [payload_sweep(results, kind) for kind in ("uniform", "bf16")]
    return found if all(found) else []


def _draw_apply(page: Any, data: list[tuple[float, Measured]], results: Results) -> None:
    axis = page.subplots()
    x = [100 * rate for rate, _ in data]
    middle = [f.value.p50 for _, f in data]
    spread = [[f.value.p50 - f.value.p20 for _, f in data], [f.value.p80 - f.value.p50 for _, f in data]]
    axis.errorbar(x, middle, spread, fmt="o-", color=_INK, ms=4, capsize=2, label="scatter apply")
    axis.plot(x, [f.floor for _, f in data], "--", color=_QUIET, label="floor: XOR at ready-made addresses")
    for name, f in bf16_peers(results):
        if "ready mask" in name:  # costs the same at every density
            axis.axhline(f.value.p50, color=_WARM, lw=1, label="peer: XOR of a ready mask, decoding not counted")
        else:
            axis.plot(100 * f.row["density"], f.value.p50, "x", color=_WARM, label=f"peer: {name.partition(', ')[2]}")
    axis.set(xscale="log", yscale="log", xlabel="changed elements, %", ylabel="ms a GB of BF16 weights")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_yticks([0.03, 0.1, 0.3, 1])
    axis.set_xticks(x, [f"{v:g}" for v in x])
    axis.minorticks_off()
    axis.legend(frameon=False)


def _draw_stages(page: Any, data: list[tuple[str, Measured]], results: Results) -> None:
    axis = page.subplots()
    for y, (name, f) in enumerate(reversed(data)):
        color = _WARM if ", pause" in name else _INK
        axis.hlines(y, f.value.p20, f.value.p80, color=color, lw=2)
        axis.plot(f.value.p50, y, "o", color=color, ms=6)
        if f.floor:
            axis.plot(f.floor, y, "|", color="black", ms=16, mew=1.5)
        axis.annotate(
            f"{f.value.p50:.3g}", (f.value.p50, y), (0, 8), textcoords="offset points", ha="center", fontsize=8
        )
    axis.set_yticks(range(len(data)), [name for name, _ in reversed(data)])
    axis.set(xscale="log", xlabel="ms (black: floor; orange: decoding stands still)", ylim=(-0.6, len(data) - 0.3))
    axis.grid(axis="x", color="#dddddd", lw=0.6)
    axis.margins(x=0.15)
    axis.xaxis.set_major_formatter("{x:g}")


FIGURES = {
    "payload": Figure("Payload against the order-0 bound, over density and codecs", (8.0, 3.8), _sweeps, _draw_payload),
    "deltas": Figure("Deltas of a real training run", (8.4, 6.6), report_deltas.series, report_deltas.draw),
    "apply": Figure("Apply time against its floor, over density", (6.4, 3.6), bf16_by_rate, _draw_apply),
    "stages": Figure("One sync of the article's workload by stage", (7.6, 5.4), stages, _draw_stages),
}
"""Pictures by name of their file."""


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw every picture whose rows are there, the same bytes from the same rows.

    Args:
        results: The rows.
        folder: Where the ``.svg`` go.

    Returns:
        The files.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    made = []
    for name, figure in FIGURES.items():
        data = figure.data(results)
        if not data:
            continue
        with mpl.rc_context(_STYLE):
            page = plt.figure(figsize=figure.size, layout="constrained")
            figure.draw(page, data, results)
            made.append(folder / f"{name}.svg")
            page.savefig(made[-1], metadata={"Date": None})
            plt.close(page)
    return made

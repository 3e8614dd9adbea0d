"""The demo's picture: reward, density, payload and pause over versions, as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

_LINE, _QUIET = "#1f5fa8", "#8a8a8a"


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report.

    Args:
        report: From ``launch.demo.report``.
        path: Without its ending: ``.svg`` and ``.png`` are written.
    """
    rows = report["per_version"]
    deltas = [v for v in rows if v["phase"] != "start"]
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "megasync", "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(4, 1, figsize=(7.2, 8.4), sharex=True, layout="constrained")
        made = [v for v in rows if v["reward"] is not None]
        axes[0].plot(*_columns(made, "reward"), ".", color=_LINE, ms=3, label="samples of this version")
        axes[0].axhline(report["reward_control"], color=_QUIET, ls="--", label="control: weights never applied")
        axes[0].set(ylabel="reward", ylim=(0, 1), title=_title(report), xlim=(0, rows[-1]["version"] + 1))
        axes[0].legend(frameon=False, loc="lower right")
        axes[1].plot(*_columns(deltas, "density", 100), color=_LINE)
        axes[1].set(ylabel="changed elements, %", yscale="log")
        axes[2].plot(*_columns(deltas, "payload_nbytes", 1e-3), color=_LINE, label="payload")
        axes[2].plot(*_columns(deltas, "full_nbytes", 1e-3), color=_QUIET, ls="--", label="all weights")
        axes[2].set(ylabel="kB a version", yscale="log")
        axes[2].legend(frameon=False, loc="lower left")
        axes[3].plot(*_columns(deltas, "pause_s", 1e3), color=_LINE)
        axes[3].set(ylabel="pause, ms", yscale="log", xlabel="version")
        for axis in axes:
            for a, b in zip(deltas, deltas[1:], strict=False):
                if a["phase"] != b["phase"]:
                    axis.axvline(b["version"] - 0.5, color=_QUIET, lw=0.8)
        for ending, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 130})):
            figure.savefig(path.with_suffix(ending), **options)
        plt.close(figure)


def _columns(rows: list[dict[str, Any]], name: str, scale: float = 1.0) -> tuple[list[int], list[float]]:
    return [v["version"] for v in rows], [v[name] * scale for v in rows]


def _title(report: dict[str, Any]) -> str:
    exact = "every one bit-exact" if report["bit_exact"] else "NOT bit-exact"
    return f"{report['versions']} versions, {exact}"

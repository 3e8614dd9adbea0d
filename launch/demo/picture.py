"""The demo's picture: reward, density, payload and pause over versions, as SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

_LINE, _QUIET = "#1f5fa8", "#8a8a8a"
_STYLE: Any = {"font.size": 9, "svg.hashsalt": "megasync", "axes.spines.top": False, "axes.spines.right": False}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report.

    Args:
        report: From ``launch.demo.report``.
        path: Without its ending: ``.svg`` and ``.png`` are written.
    """
    rows = report["per_version"]
    deltas = [v for v in rows if v["phase"] != "start"]
    with mpl.rc_context(_STYLE):
        figure, (reward, density, payload, pause) = plt.subplots(
            4, 1, figsize=(7.2, 8.4), sharex=True, layout="constrained"
        )
        exact = "every one bit-exact" if report["bit_exact"] else "NOT bit-exact"
        reward.set(title=f"{report['versions']} versions, {exact}", ylabel="reward", ylim=(0, 1))
        reward.set(xlim=(0, rows[-1]["version"] + 1))
        reward.plot(report["control_rewards"], ".", color=_QUIET, ms=3, label="control: weights never applied")
        made = [v for v in rows if v["reward"] is not None]
        reward.plot(*_columns(made, "reward"), ".", color=_LINE, ms=3, label="weights applied")
        reward.legend(frameon=False, loc="lower right")
        density.plot(*_columns(deltas, "density", 100), color=_LINE)
        density.set(ylabel="changed elements, %", yscale="log")
        payload.plot(*_columns(deltas, "full_nbytes", 1e-3), color=_QUIET, ls="--", label="all weights")
        payload.plot(*_columns(deltas, "payload_nbytes", 1e-3), color=_LINE, label="sent")
        payload.set(ylabel="kB a version", yscale="log")
        payload.legend(frameon=False, loc="lower left")
        pause.plot(*_columns(deltas, "pause_s", 1e3), color=_LINE)
        pause.set(ylabel="pause, ms", yscale="log", xlabel="version")
        _mark_phases(deltas, (reward, density, payload, pause))
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".png"), dpi=130)
        plt.close(figure)


def _mark_phases(deltas: list[dict[str, Any]], axes: Sequence[Any]) -> None:
    """A line where a phase begins, and its name on top."""
    for phase, versions in groupby(deltas, key=lambda v: v["phase"]):
        begin = next(versions)["version"] - 0.5
        axes[0].annotate(f" {phase}", (begin, 1), va="top", color=_QUIET)
        for axis in axes:
            axis.axvline(begin, color=_QUIET, lw=0.6)


def _columns(rows: list[dict[str, Any]], name: str, scale: float = 1.0) -> tuple[list[int], list[float]]:
    return [v["version"] for v in rows], [v[name] * scale for v in rows]

"""Series of figures that tables and pictures share. Before it: report_apply, report_trainer, report_cpu."""

from __future__ import annotations

import re

from launch.bench import report_apply, report_trainer
from launch.bench import report_receiver as receiver
from launch.bench.report_measures import Measure, Measured, value_of
from launch.bench.report_rows import Results, stat
from launch.bench.rows import Row


def bf16_by_rate(results: Results) -> list[tuple[float, Measured]]:
    """Scatter apply of a BF16 list in ms a GB, by the share of elements changed, as the library launches it."""
    found = [re.fullmatch(r"P6 bf16 (.*)%, as chosen", case) for case in results.cases("apply-gpu", "P6 bf16 ")]
    rates = sorted(float(match.group(1)) / 100 for match in found if match)
    return [(rate, f) for rate in rates if (f := value_of(report_apply.bf16_ms_per_gb(rate), results))]


def bf16_peers(results: Results) -> list[tuple[str, Measured]]:
    """What one would do instead of a scatter apply, in ms a GB, from the same run."""
    found = []
    for case in results.cases("apply-gpu", "P6 peer: "):
        rows = results.take("apply-gpu", case)
        each = stat(rows, lambda r: r["seconds"] * 1e12 / r["weights_nbytes"])
        found.append((f"{rows[0]['density']:.1%}, {case.removeprefix('P6 peer: ')}", Measured(each, None, rows[0])))
    return found


def stages(results: Results) -> list[tuple[str, Measured]]:
    """One sync of the article's workload, stage by stage, in ms; what was not measured is left out."""
    asked: list[tuple[str, Measure]] = [
        ("trainer, beside the step: mask pass, snapshot in HBM", report_trainer.mask_pass("device")),
        ("trainer, beside the step: mask pass, snapshot pinned", report_trainer.mask_pass("host")),
        ("trainer, beside the step: its kernels alone, HBM", report_trainer.mask_kernels("device")),
        ("trainer, beside the step: its kernels alone, pinned", report_trainer.mask_kernels("host")),
        ("trainer, behind: entries to host memory", report_trainer.sync_ms("landing_s")),
        ("trainer, behind: codec", report_trainer.sync_ms("codec_s")),
        ("trainer, step end to payload durable", report_trainer.durable),
        ("trainer, step end to head moved", report_trainer.sync_ms("head_s")),
        ("receiver, while decoding: staging, all checks", receiver.case_ms("P5 staging, as called")),
        ("receiver, while decoding: touched-old check alone", report_apply.touched_old),
        ("receiver, pause: scatter apply, entries in HBM", report_apply.apply_in_hbm),
        ("receiver, pause: scatter apply, entries pinned", report_apply.apply_pinned),
        ("receiver, pause: scatter apply with all proofs", report_apply.apply_proved),
        ("receiver, pause: whole, through Applier", receiver.pause),
        ("receiver, pause: dense codec through two slots", receiver.case_ms("P7 two slots, total")),
    ]
    return [(name, found) for name, measure in asked if (found := value_of(measure, results))]


def cpu_by_density(results: Results) -> list[list[Row]]:
    """Rows of one core, grouped by case and density, in the order they were taken."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for r in results.files.get("cpu", []):
        groups.setdefault((r["case"], r["density"]), []).append(r)
    return list(groups.values())


def payload_by_case(results: Results) -> dict[str, dict[str, Row]]:
    """Payload rows by case, then codec, in the order they were taken."""
    found: dict[str, dict[str, Row]] = {}
    for r in results.files.get("payload-cpu", []):
        found.setdefault(r["case"], {})[r["codec"]] = r
    return found


def payload_sweep(results: Results, kind: str) -> dict[str, list[tuple[float, float]]]:
    """By codec, density and fetched bytes over the bound, along the sweep of a kind of mask."""
    found: dict[str, list[tuple[float, float]]] = {}
    for case, by_codec in payload_by_case(results).items():
        if case.startswith(f"{kind} "):
            for codec, r in by_codec.items():
                found.setdefault(codec, []).append((r["density"], r["over_bound_ratio"]))
    return {codec: sorted(points) for codec, points in found.items()}

"""The part of the README that the rows make: targets beside floors, then tables by density, stage, layout and core.

Before it: report_targets. After it: report, which puts the text between the markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from launch.bench import (
    report_counters,
    report_deltas,
    report_megatron,
    report_nvfp4,
    report_one_queue,
    report_peers,
    report_receiver,
)
from launch.bench.report_apply import audit_class, audit_classes, num_digits
from launch.bench.report_figures import FIGURES
from launch.bench.report_measures import Measured, value_of
from launch.bench.report_rows import Results, commit_of, stat
from launch.bench.report_series import bf16_by_rate, bf16_peers, cpu_by_density, payload_by_case, stages
from launch.bench.report_targets import TARGETS, Found, Target
from launch.bench.rows import Row, table

_INTRO = """\
Medians of raw samples (in brackets the 20th and 80th percentile), each beside the floor that the hardware sets to the
same work, measured in the same run. **Weights and masks are synthetic**: random bytes, and random positions that change
at the density named; only masks called `real`, the table of real deltas and that of Megatron are of training runs.
`bash launch/bench.sh` takes the samples into `launch/bench/results` and makes this part from them (`--report` does only
that); [summary.json](launch/bench/results/summary.json) has the targets for programs, with all conditions."""


def block(results: Results, folder: str) -> str:
    """Everything between the markers.

    Args:
        results: The rows.
        folder: Where the figures lie, relative to the README.
    """
    found = [(t, f) for t in TARGETS for f in t.find(results)]
    parts = [_INTRO, _targets(found), _missing(found)]
    parts += [f"{title}\n\n{table(header, lines)}" for title, header, lines in _tables(results) if lines]
    parts += [f"![{f.caption}]({folder}/{name}.svg)" for name, f in FIGURES.items() if f.data(results)]
    return "\n\n".join(p for p in (*parts, _where(results)) if p) + "\n"


def number(value: float) -> str:
    """Three significant digits, four above 1 where a bound could be hidden by rounding."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


def spread(found: Measured, unit: str = "") -> str:
    """Median, unit, and percentiles where there is more than one sample."""
    v = found.value
    return f"{number(v.p50)}{unit and ' ' + unit}" + (f" ({number(v.p20)}-{number(v.p80)})" if v.num > 1 else "")


def _targets(found: Iterable[tuple[Target, Found]]) -> str:
    lines = []
    for target, f in found:
        if f.measured is None:
            continue
        floor = "" if f.measured.floor is None else number(f.measured.floor)
        asked = f.bound + (f" = {number(f.target)}" if f.part.of_floor and f.target is not None else "")
        name = f"{target.id} {target.title}: {f.part.name}"
        lines.append([name, spread(f.measured, f.part.unit), floor, asked, _met(f), _device(f.measured.row)])
    return (
        table(["target", "measured", "floor", "asked", "met", "on"], lines) if lines else "No target was measured yet."
    )


def _met(f: Found) -> str:
    if f.excess > 1:
        return f"**no**: by {f.excess - 1:.1%}" if f.excess < 2 else f"**no**: {number(f.excess)} x the bound"
    return "yes" if f.met or f.measured is None else f"**no**: {f.measured.short}"


def _missing(found: Iterable[tuple[Target, Found]]) -> str:
    names: dict[str, list[str]] = {}
    for target, f in found:
        if f.measured is None:
            names.setdefault(target.id, []).append(f.part.name)
    return "Not measured: " + "; ".join(f"{k} ({', '.join(v)})" for k, v in names.items()) + "." if names else ""


def _tables(results: Results) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
    payloads = payload_by_case(results)
    codecs = list(dict.fromkeys(c for by_codec in payloads.values() for c in by_codec))
    yield (
        "All bytes that a receiver fetches (payload, manifest, tables, digests) over the order-0 bound"
        " `log2 C(n, k) + k H(value)`, by codec; the bound knows nothing of neighbours, so clustered masks go below it:",
        ["mask, changed words", "GB", "bound, % of weights", *codecs],
        [_payload(case, by_codec, codecs) for case, by_codec in payloads.items()],
    )
    yield report_deltas.TITLE, report_deltas.HEADER, report_deltas.lines(results)
    yield (
        "Scatter apply of BF16 weights, kernel alone, entries in HBM, by the share of elements that changed (the floor"
        " XORs the same words at ready-made addresses):",
        ["changed", "ms a GB of weights", "floor", "x floor"],
        [
            *(_beside(f"{rate:.1%}", found) for rate, found in bf16_by_rate(results)),
            *(_beside(f"peer: {name}", found) for name, found in bf16_peers(results)),
        ],
    )
    yield (
        "One sync of the article's workload by stage (what runs beside training or decoding costs no pause):",
        ["stage", "ms", "floor", "x floor"],
        [_beside(name, found) for name, found in stages(results)],
    )
    yield report_one_queue.TITLE, report_one_queue.HEADER, report_one_queue.lines(results)
    slots = value_of(report_receiver.two_slots, results)
    counters = report_counters.lines(results, slots.value.p50 if slots else None)
    yield report_counters.TITLE, report_counters.HEADER, counters
    yield report_megatron.TITLE, report_megatron.HEADER, report_megatron.lines(results)
    yield report_nvfp4.TITLE, report_nvfp4.HEADER, report_nvfp4.lines(results)
    yield report_peers.TITLE, report_peers.HEADER, report_peers.peer_lines(results)
    yield (
        "Full audit by class of layout, as share of the bandwidth of reading:",
        ["layout", "GB", "% of reading"],
        [_audit(results, case) for case in audit_classes(results)],
    )
    yield (
        "One CPU core, GB of weights a second of processor time, all checks on; peers of the same run read or copy all"
        " weights:",
        ["work", "changed bytes", "GB/s", "GB/s by the clock", "bytes out, % of weights", "weights, GB"],
        [_cpu(rows) for rows in cpu_by_density(results)],
    )


def _beside(name: str, found: Measured) -> list[str]:
    floor = found.floor
    return [name, spread(found), number(floor) if floor else "", f"{found.value.p50 / floor:.3f}" if floor else ""]


def _payload(case: str, by_codec: dict[str, Row], codecs: Sequence[str]) -> list[str]:
    r = next(iter(by_codec.values()))
    cells = [f"{by_codec[c]['over_bound_ratio']:.3f}" if c in by_codec else "" for c in codecs]
    return [case, f"{r['nbytes_in'] / 1e9:.3g}", f"{100 * r['bound_nbytes'] / r['nbytes_in']:.4f}", *cells]


def _audit(results: Results, case: str) -> list[str]:
    found = audit_class(results, case)
    digits = num_digits(case)
    layout = (
        "as in the checkpoint" if digits == 1 else "stacked, cut or interleaved" if digits == 2 else "128x4 swizzle"
    )
    return [f"{layout}, {case[3:14]}", f"{found.row['nbytes_in'] / 1e9:.1f}", spread(found)]


def _cpu(rows: list[Row]) -> list[str]:
    r = rows[0]
    speed = stat(rows, lambda r: r["nbytes_in"] / 1e9 / r["cpu_s"])
    wall = stat(rows, lambda r: r["nbytes_in"] / 1e9 / r["seconds"]).p50
    out = stat(rows, lambda r: 100 * r["nbytes_out"] / r["nbytes_in"]).p50
    changed = f"{r['density']:.3%}" if r["density"] else ""
    gb = f"{r['nbytes_in'] / 1e9:.2f}"
    return [r["case"], changed, spread(Measured(speed, None, r)), number(wall), number(out) if changed else "", gb]


def _device(row: Row) -> str:
    return str(row["device"]).removeprefix("NVIDIA ")


def _where(results: Results) -> str:
    lines = []
    for name, rows in results.files.items():
        r = rows[0]
        versions = ", ".join(f"{k} {r[k]}" for k in ("driver", "cuda", "torch", "triton", "numpy") if r.get(k))
        lines.append(f"- `{name}.jsonl`: {r['device']}, {versions}, commit {_commits(rows)}, {len(rows)} rows")
    said = "Where the samples were taken (`+`: by code that was changed since that commit, and committed later):"
    return f"{said}\n\n" + "\n".join(lines) if lines else ""


def _commits(rows: list[Row]) -> str:
    found = dict.fromkeys(commit_of(r) for r in rows)
    return " and ".join(c[:12] + "+" * c.endswith("+") for c in found)

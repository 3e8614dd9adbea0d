"""The performance targets, part by part, and the summary made of them.

A target is met when every part of it was measured, at the size it names, and is within its limit. Before it:
report_measures. After it: report_tables, summary.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from launch.bench import report_apply, report_cpu, report_receiver, report_trainer
from launch.bench.report_apply import audit_share, num_digits
from launch.bench.report_cpu import LARGE_NBYTES, payload_over_bound, payload_over_peer
from launch.bench.report_measures import SHARE_NBYTES, TWO_SLOTS_LIMIT, Measure, Measured, declared, first
from launch.bench.report_rows import NotMeasuredError, Results, commit_of


@dataclass(frozen=True, slots=True)
class Part:
    """One figure that a target asks for.

    Attributes:
        name: What is measured.
        unit: Its unit.
        limit: The bound.
        measure: Finds it in the rows.
        of_floor: The bound is ``limit`` times the floor.
        at_least: The bound is from below.
    """

    name: str
    unit: str
    limit: float
    measure: Measure
    of_floor: bool = False
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A part with what the rows say.

    Attributes:
        part: The part.
        measured: The figure; None where there is none.
        reason: Then why.
    """

    part: Part
    measured: Measured | None
    reason: str = ""

    @property
    def target(self) -> float | None:
        """The bound in the part's unit; None where the floor that it is a multiple of was not measured."""
        if not self.part.of_floor:
            return self.part.limit
        if self.measured is None or self.measured.floor is None:
            return None
        return self.part.limit * self.measured.floor

    @property
    def excess(self) -> float:
        """Figure / bound, or the other way round for a bound from below: above 1 misses. 0 where nothing was measured."""
        if self.measured is None or self.target is None:
            return 0.0
        value = self.measured.value.p50
        return (self.target / value if self.part.at_least else value / self.target) if value > 0 else 0.0

    @property
    def met(self) -> bool:
        """Measured, at full size, within the bound."""
        return self.measured is not None and not self.measured.short and self.excess <= 1.0

    @property
    def bound(self) -> str:
        """The bound in words."""
        sign = "at least" if self.part.at_least else "at most"
        unit = "x floor" if self.part.of_floor else self.part.unit
        return f"{sign} {self.part.limit:g} {unit}"


@dataclass(frozen=True, slots=True)
class Target:
    """A target of the project.

    Attributes:
        id: P1 to P12.
        title: What it is about.
        parts: The figures it asks for.
    """

    id: str
    title: str
    parts: tuple[Part, ...]

    def find(self, results: Results) -> list[Found]:
        """Every part with its figure or the reason why there is none."""
        found = []
        for part in self.parts:
            try:
                found.append(Found(part, part.measure(results)))
            except NotMeasuredError as e:
                found.append(Found(part, None, str(e.args[0])))
        return found


def _mask(place: str) -> Measure:
    return first(report_trainer.mask_pass(place), report_trainer.mask_kernels(place))


TARGETS = (
    Target(
        "P1",
        "apply kernel, digests off, remap on",
        (
            Part("entries in HBM", "ms", 1.15, report_apply.apply_in_hbm, of_floor=True),
            Part("entries in pinned memory", "ms", 1.3, report_apply.apply_pinned, of_floor=True),
        ),
    ),
    Target(
        "P1b",
        "the same with all proofs",
        (Part("in the pause", "ms", 1.6, first(report_receiver.pause, report_apply.apply_proved), of_floor=True),),
    ),
    Target(
        "P1c",
        "pause of a decoding engine with CUDA graphs",
        (Part("last token before to first token after", "ms", 1.0, declared("P1c"), of_floor=True),),
    ),
    Target(
        "P2",
        "trainer: mask, compaction, digests, snapshot update",
        (
            Part("busy with the snapshot in HBM", "ms", 1.5, _mask("device"), of_floor=True),
            Part("busy with the snapshot in pinned memory", "ms", 1.3, _mask("host"), of_floor=True),
            Part("stream held with the snapshot in HBM", "ms", 0.5, report_trainer.stream_held("device")),
            Part("stream held with the snapshot in pinned memory", "ms", 0.5, report_trainer.stream_held("host")),
            Part(
                "step slower with the snapshot in HBM", "%", 1.0, report_trainer.step_slowdown("trainer-gpu", "device")
            ),
            Part(
                "step slower with the snapshot in pinned memory",
                "%",
                1.0,
                report_trainer.step_slowdown("trainer-gpu", "host"),
            ),
            *(
                Part(
                    f"step slower with one connection, snapshot in {where}",
                    "%",
                    1.0,
                    report_trainer.step_slowdown("trainer-gpu-connections1", place),
                )
                for where, place in (("HBM", "device"), ("pinned memory", "host"))
            ),
            Part(
                "stream held with one connection, snapshot in pinned memory",
                "ms",
                0.5,
                report_trainer.stream_held("host", "trainer-gpu-connections1"),
            ),
        ),
    ),
    Target("P3", "step end to payload durable", (Part("snapshot in HBM", "ms", 100.0, report_trainer.durable),)),
    Target(
        "P4",
        "payload, all fetched bytes, against the order-0 bound",
        (
            *(Part(f"mask {k}", "x bound", 1.05, payload_over_bound(f"{k} ", LARGE_NBYTES)) for k in "ABCD"),
            Part("model-like list at 0.085 %", "x bound", 1.15, payload_over_bound("list-", SHARE_NBYTES)),
            Part("over CPU Zstd-1 in 1 MiB frames", "x", 1.0, payload_over_peer),
        ),
    ),
    Target("P5", "receiver preparation on 16 cores", (Part("arenas warm", "s", 0.3, report_receiver.staging),)),
    Target(
        "P6", "bf16, 2 % of elements", (Part("kernel, digests off", "ms/GB", 0.33, report_apply.bf16_ms_per_gb(0.02)),)
    ),
    Target(
        "P7",
        "dense codecs through two slots",
        (
            Part("total over the larger of decoder and XOR", "x", TWO_SLOTS_LIMIT, report_receiver.two_slots),
            Part("HBM beyond weights and slots", "MB", 64.0, report_receiver.slots_beyond),
        ),
    ),
    Target(
        "P8",
        "full audit, share of read bandwidth",
        (
            Part("identity layouts", "%", 60.0, audit_share("identity", lambda c: num_digits(c) == 1), at_least=True),
            Part("swizzled layouts", "%", 35.0, audit_share("swizzled", lambda c: num_digits(c) > 2), at_least=True),
            Part("nibble repacks", "%", 0.0, audit_share("nibble", lambda c: "nibble" in c), at_least=True),
        ),
    ),
    Target(
        "P9",
        "ownership plan of a 445 GB MoE, one core",
        (
            Part("gathered metadata to owned tiles", "s", 5.0, report_cpu.plan_case("total_s")),
            Part("largest load over the optimum", "x", 1.02, report_cpu.plan_case("largest_over_optimum_ratio")),
        ),
    ),
    Target(
        "P10",
        "one CPU core, checks on, 0.1 % of bytes",
        (
            Part("encode", "GB/s", 3.0, report_cpu.cpu_speed("encode"), at_least=True),
            Part("apply", "GB/s", 15.0, report_cpu.cpu_speed("apply"), at_least=True),
        ),
    ),
    Target("P11", "end to end on one host", (Part("callback to first token", "s", 1.0, declared("P11")),)),
    Target("P12", "while staging", (Part("token latency p99 slower", "%", 2.0, report_receiver.token_slowdown),)),
)


def summarize(results: Results) -> dict[str, dict[str, Any]]:
    """``summary.json``: by target id, the part that decides (the one furthest beyond its bound; the first where all are
    within), and every part in ``conditions``."""
    return {t.id: _entry(t, t.find(results)) for t in TARGETS}


def _entry(target: Target, found: list[Found]) -> dict[str, Any]:
    worst = max(found, key=lambda f: f.excess)
    deciding = worst if worst.excess > 1 else next((f for f in found if f.measured), found[0])
    measured = deciding.measured
    return {
        "value": _round(measured.value.p50 if measured else None),
        "unit": deciding.part.unit,
        "target": _round(deciding.target),
        "floor": _round(measured.floor if measured else None),
        "met": all(f.met for f in found),
        "device": _joined(f.measured.row["device"] for f in found if f.measured),
        "commit": _joined(commit_of(f.measured.row) for f in found if f.measured),
        "conditions": f"{target.title}; weights and masks are synthetic. "
        + " ".join(_sentence(f, shown=f is deciding) for f in found),
    }


def _sentence(f: Found, *, shown: bool) -> str:
    if f.measured is None:
        return f"{f.part.name} ({f.bound}): not measured: {f.reason}."
    v, floor = f.measured.value, f.measured.floor
    times = f", {v.p50 / floor:.3f} x floor" if floor else ""
    mark = " [this value]" if shown else ""
    short = f"; does not count: {f.measured.short}" if f.measured.short else ""
    if v.num == 1:
        value = f"{v.p50:.4g} {f.part.unit}"
    else:
        value = f"median {v.p50:.4g} {f.part.unit}, p20 {v.p20:.4g}, p80 {v.p80:.4g} of {v.num} samples"
    return f"{f.part.name}{mark} ({f.bound}): {value}{times}; {f.measured.said}{short}."


def _joined(names: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(names)) or None


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")

"""Quantised export on a GPU: amax pass, quantising pass, mask + compact, over a model-like list of expert weights.

``python -m launch.bench.bench_nvfp4`` on a GPU. Every formula goes through the trainer's own exporter, ownership plan and
tables; bytes of each pass are counted (an element once a pass), the exchange of amaxes is measured by itself and counted
nowhere else. Checked: buffers against the CPU's bytes on a sample, the snapshot against the buffers after every pass.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hydra
import torch
import torch.distributed as dist

from launch.bench.entry import plain_hydra, register, settings_of
from launch.bench.gpu_rank import DEVICE, Report, sample
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, RowWriter
from launch.bench.workload import Shape
from megasync.kernels.compact import compact_jobs_
from megasync.quant import fp8, nvfp4
from megasync.quant.checkpoint import QuantRule, describe
from megasync.quant.exchange import exchange_amax
from megasync.trainer.device_plan import Compaction, plan_compactions
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.metadata import exchange
from megasync.trainer.plan import make_plan
from megasync.trainer.quantised import QuantisedExporter
from megasync.trainer.regions import Region, match_regions
from megasync.trainer.snapshot import SAME_SIZE, Snapshot
from megasync.types import Box, TensorSpec

MOVED = 0.003
"""Weights whose lowest bit flips between two passes."""

FORMULAS = (
    ("nvfp4/te-2d", "modelopt", "F32"),
    ("nvfp4/te-1d", "modelopt", "F32"),
    ("nvfp4/modelopt-1d", "modelopt", "F32"),
    ("nvfp4/compressed-tensors-1d", "compressed-tensors", "F32"),
    ("fp8/deepgemm-128", "deepseek", "F32"),
    ("fp8/deepgemm-128-ue8m0", "deepseek", "F8_E8M0"),
    ("fp8/channel", "compressed-tensors", "F32"),
    ("fp8/tensor", "modelopt", "F32"),
)
"""Formula, whose checkpoint, and how block scales are stored."""


@dataclass
class Nvfp4Bench:
    """Configuration.

    Attributes:
        num_experts: Experts of one layer, three matrices of 12.6 M weights each; 48 are 3.6 GB of BF16.
        formulas: Which formulas; all where empty.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    num_experts: int = 48
    formulas: list[str] = field(default_factory=list)
    out: str = str(RESULTS)


class Experts(Exporter):
    """The BF16 weights of a layer's experts in one buffer, as a grouped matrix product keeps them."""

    def __init__(self, num_experts: int, shape: Shape | None = None) -> None:
        m = shape or Shape()
        sizes = {"gate_proj": (m.inner, m.hidden), "up_proj": (m.inner, m.hidden), "down_proj": (m.hidden, m.inner)}
        self.arena = torch.empty(num_experts * 3 * m.inner * m.hidden, dtype=torch.bfloat16, device=DEVICE)
        for part in self.arena.split(1 << 28):
            part.normal_(std=0.02)
        self.weights: dict[str, torch.Tensor] = {}
        views = iter(self.arena.split(m.inner * m.hidden))
        for e in range(num_experts):
            for name, extents in sizes.items():
                self.weights[f"model.layers.3.mlp.experts.{e}.{name}.weight"] = next(views).view(extents)

    def specs(self) -> list[TensorSpec]:
        """See ``Exporter.specs``."""
        cuts = {n: "last" if "down_proj" in n else "row" for n in self.weights}
        return [TensorSpec(n, "BF16", tuple(w.shape), 3, cuts[n]) for n, w in self.weights.items()]  # type: ignore[arg-type]

    def pieces(self) -> list[Piece]:
        """See ``Exporter.pieces``."""
        return [Piece(n, Box((0, 0), tuple(w.shape)), w) for n, w in self.weights.items()]


@dataclass
class Prepared:
    """One formula over the weights, ready to run.

    Attributes:
        rule: The formula and the checkpoint it is for.
        exporter: Makes the bytes.
        regions: What is owned: everything.
        snapshot: Its bytes of the version before.
        compactions: Tables of mask + compact.
    """

    rule: QuantRule
    exporter: QuantisedExporter
    regions: list[Region]
    snapshot: Snapshot
    compactions: list[Compaction]

    @property
    def compared_nbytes(self) -> int:
        """Live bytes that mask + compact compares."""
        return sum(c.plan.nbytes for c in self.compactions)

    def amax(self) -> torch.Tensor:
        """First pass."""
        return self.exporter.passes.amax()

    def compact(self) -> int:
        """Mask, compaction, sums and snapshot update; returns changed words."""
        jobs = [(c.plan, c.lanes) for c in self.compactions]
        return sum(part.planes.entries.shape[1] for part in compact_jobs_(jobs, self.snapshot.arena))


def prepare(experts: Experts, formula: str, checkpoint: str, scale_dtype: str) -> Prepared:
    """The trainer's own way from weights to tables, for one rank that owns everything."""
    rule = QuantRule("*", formula, checkpoint, scale_dtype)  # type: ignore[arg-type]
    exporter = QuantisedExporter(experts, [rule])
    schema, holdings = exchange("bench", exporter, None)
    plan = make_plan(schema, holdings)
    pieces = exporter.own(plan.owned(0).named_boxes(), schema.tensors)
    regions = match_regions(schema, plan, 0, pieces)
    snapshot = Snapshot(schema, regions, lambda n: torch.zeros(n, dtype=torch.uint8, device=DEVICE))
    compactions, copies = plan_compactions(schema, snapshot, experts.arena.device)
    assert not copies
    exporter.settle()
    done = Prepared(rule, exporter, regions, snapshot, compactions)
    done.compact()
    _check_snapshot(done)
    return done


def run_formula(experts: Experts, report: Report, copy_rate: float, formula: str, checkpoint: str, scales: str) -> None:
    """Each pass by itself, then all of them in a row, against the copy bandwidth of this run."""
    done = prepare(experts, formula, checkpoint, scales)
    _check_sample(experts, done)
    place = torch.randint(0, experts.arena.numel(), (int(experts.arena.numel() * MOVED),), device=DEVICE).unique()
    place = place[experts.arena[place].abs() < 0.08]  # far from every amax, so that all runs quantise alike
    bits = experts.arena.view(torch.int16)
    passes, moved = done.exporter.passes, done.exporter.passes.nbytes
    compared = done.compared_nbytes

    def step() -> None:
        bits[place] ^= 1

    def whole() -> int:
        passes.fill(passes.amax())
        return done.compact()

    step()
    num_words = whole()
    _check_snapshot(done)
    density = num_words / compared

    def measure(name: str, work: Callable[[], object], read: int, written: int, reset: Callable[[], None]) -> None:
        seconds = sample(work, reset=reset)
        columns = {"copy_share": round((read + written) / sorted(seconds)[len(seconds) // 2] / copy_rate, 4)}
        report.add(
            f"{formula} {name}",
            seconds,
            nbytes_in=read,
            nbytes_out=written,
            density=density,
            formula=formula,
            weights=experts.arena.numel(),
            **columns,
        )
        report.lines[-1] += f"  {columns['copy_share']:.0%} of copying"
        print(report.lines[-1][-18:], flush=True)

    amaxes = passes.amax().clone()
    measure("amax pass", passes.amax, moved.amax_read, 0, lambda: None)
    measure("quantising pass", lambda: passes.fill(amaxes), moved.quantise_read, moved.quantise_written, step)

    def changed() -> None:
        step()
        passes.fill(amaxes)

    written = num_words * 35  # a sector of the snapshot and the planes a changed word
    measure("mask + compact", done.compact, 2 * compared, written, changed)
    read = moved.amax_read + moved.quantise_read + 2 * compared
    measure("export: amax, quantise, mask + compact", whole, read, moved.quantise_written + written, step)
    _check_snapshot(done)
    assert torch.equal(passes.amax(), amaxes), "a flipped lowest bit of few weights moved an amax"


def run_exchange(report: Report, num_groups: int) -> None:
    """The collective between the passes by itself, over a group of one: what a rank adds to the network's time."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        values = torch.rand(num_groups, device=DEVICE)
        seconds = [exchange_amax(values, dist.group.WORLD)[1] for _ in range(13)][2:]
        dist.destroy_process_group()
    report.add(f"exchange of {num_groups} amaxes, gloo, one rank", seconds, nbytes_in=4 * num_groups, nbytes_out=0)


def _check_snapshot(done: Prepared) -> None:
    for region, offset in zip(done.regions, done.snapshot.offsets.tolist(), strict=True):
        live = region.data.reshape(-1).view(torch.uint8)
        assert torch.equal(done.snapshot.arena[offset : offset + live.numel()], live), "the snapshot is not the export"


def _check_sample(experts: Experts, done: Prepared, rows: int = 256) -> None:
    """Codes and scales of the first and the last rows of three weights against the CPU's, which is the specification."""
    by_name: dict[str, list[Region]] = {}
    for region in done.regions:
        by_name.setdefault(done.snapshot.schema.tensors[region.tensor_id].name, []).append(region)
    for spec in experts.specs()[:3]:
        weight = describe(spec, done.rule)
        fused = [s.name for s in experts.specs() if describe(s, done.rule).group == weight.group]
        amax = torch.stack([nvfp4.amax(experts.weights[n]) for n in fused]).amax().cpu()
        source = experts.weights[spec.name].cpu()
        for first in (0, source.shape[0] - rows):
            part = source[first : first + rows]
            if weight.formula.family == "nvfp4":
                q = nvfp4.quantize(part, amax, weight.formula)
                want = {"codes": q.codes, "scales": q.scales}
            else:
                q8 = fp8.quantize(part, weight.formula, amax=amax)
                want = {"codes": q8.codes, "scales": q8.scales}
            for member in weight.members[:2]:
                if not member.step:
                    continue
                expected = want[member.role]
                if member.spec.dtype == "F8_E8M0":
                    expected = fp8.e8m0_bytes(expected)
                got = torch.zeros(member.spec.shape, dtype=expected.dtype)
                for region in by_name[member.spec.name]:
                    at = tuple(slice(a, a + n) for a, n in zip(region.box.start, region.box.extent, strict=True))
                    got[at] = region.data.cpu()
                start = first // member.step[0]
                assert torch.equal(got[start : start + len(expected)], expected), f"{member.spec.name} differs"


def run(config: Nvfp4Bench) -> None:
    """Runs all and prints a table."""
    torch.manual_seed(0)
    with RowWriter(result_file(config.out, "nvfp4-gpu.jsonl"), "nvfp4") as writer:
        report = Report(writer)
        experts = Experts(config.num_experts)
        bits = experts.arena.view(SAME_SIZE[2])
        other = torch.empty_like(bits)
        seconds = sample(lambda x=other: x.copy_(bits))
        took = report.add("floor: copy", seconds, nbytes_in=bits.nbytes, nbytes_out=bits.nbytes)
        del other
        copy_rate = 2 * bits.nbytes / took
        for formula, checkpoint, scales in FORMULAS:
            if not config.formulas or formula in config.formulas:
                run_formula(experts, report, copy_rate, formula, checkpoint, scales)
                torch.cuda.empty_cache()
        run_exchange(report, 60_000)
    print("\n".join(report.lines))


register("bench_nvfp4", Nvfp4Bench)


@hydra.main(version_base="1.3", config_name="bench_nvfp4", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    known = [f for f, _, _ in FORMULAS]
    run(settings_of(Nvfp4Bench, config, choices={"formulas": known}, empty=("formulas",)))


if __name__ == "__main__":
    plain_hydra(Nvfp4Bench)
    main()

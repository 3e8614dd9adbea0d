"""Hardware counters of the streaming apply (P7): every kernel of the decoder and of the XOR, each alone, by Nsight Compute.

``python -m launch.bench.bench_counters`` on a GPU runs itself (``--child``) under ``ncu``, which is in the CUDA toolkit: an
engine rank of five layers, decoder alone and then XOR alone over its steps. ``ncu`` repeats each launch by itself until it has
all counters, so nothing here overlaps; clocks are left as they are. One row a launch goes to ``results/counters-gpu.jsonl``:
``nbytes_in`` and ``nbytes_out`` are what DRAM gave and took, ``*_ratio`` shares of a peak, but for stalls (warps that stand for
that reason, for each instruction issued). The driver must let the user read counters, which sandboxes (gVisor) do not pass on.

What ``ncu --csv --print-units base`` printed elsewhere becomes the same rows; device, versions and commit are then those of
another benchmark's rows, taken at the same commit on the same machine (the message where ``ncu`` is missing has the command):

    python -m launch.bench.bench_counters --csv counters.csv --where launch/bench/results/receiver-gpu.jsonl

Before it: receiver_stream, whose passes it runs. After it: report_counters.
"""

from __future__ import annotations

import csv
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from itertools import groupby
from pathlib import Path

import torch

from launch.bench.bench_receiver import DENSITY, Bench
from launch.bench.entry import Parser, require_cuda
from launch.bench.places import result_file
from launch.bench.receiver_stream import _staged, decode_all, xor_all
from launch.bench.rows import RESULTS, Row, RowWriter, read_rows
from launch.bench.workload import Shape
from megasync.receiver.scatter import ScatterBackend

ROOT = Path(__file__).resolve().parents[2]

_ROWS, _COLUMNS = "BF16, whole or cut by rows", "BF16, cut by columns"
STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("outside layers", (_ROWS,)),
    *(3 * [("dense layer", (_ROWS, _COLUMNS))]),
    *(2 * [("MoE layer", ("block scales", "4-bit experts", _ROWS, _COLUMNS))]),
)
"""Steps of the program in their order: which part of the model, and what each launch of the XOR works on."""

KERNELS = {"lz4Decompress": "decoder", "walk_kernel": "XOR"}
"""What is in a kernel's name, and what the kernel is."""

_VERSIONS = ("python", "torch", "triton", "numpy", "zstandard", "cramjam", "xxhash", "msgspec", "commit")
_WHERE = ("cpu", "cores", "device", "driver", "cuda", *_VERSIONS)


class CountersError(ValueError):
    """No counters could be taken, or a CSV is not that of this program; no row was written."""


@dataclass(frozen=True, slots=True)
class Counter:
    """One metric of Nsight Compute.

    Attributes:
        column: Its column in the rows.
        units: In which it may come; any where empty.
        divisor: To the column's unit.
        kind: Of number.
    """

    column: str
    units: tuple[str, ...] = ()
    divisor: int = 1
    kind: Callable[[Decimal], float] = float


def _peak(column: str) -> Counter:
    return Counter(column, ("%",), 100)


_STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

METRICS = {
    "gpu__time_duration.sum": Counter("seconds", ("ns", "nsecond"), 10**9),
    "dram__bytes_read.sum": Counter("nbytes_in", ("byte",), kind=int),
    "dram__bytes_write.sum": Counter("nbytes_out", ("byte",), kind=int),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": _peak("dram_ratio"),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": _peak("l2_ratio"),
    "l1tex__throughput.avg.pct_of_peak_sustained_active": _peak("l1_ratio"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": _peak("sm_ratio"),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": _peak("issue_ratio"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": _peak("warps_ratio"),
    "smsp__inst_executed.sum": Counter("num_instructions", kind=int),
    "launch__registers_per_thread": Counter("num_registers", kind=int),
    "launch__shared_mem_per_block_static": Counter("shared_nbytes", ("byte/block",), kind=int),
    "launch__block_size": Counter("block", kind=int),
    "launch__grid_size": Counter("grid", kind=int),
    "launch__waves_per_multiprocessor": Counter("waves"),
    _STALLED.format("long_scoreboard"): Counter("stall_long_scoreboard_ratio"),
    _STALLED.format("lg_throttle"): Counter("stall_lg_throttle_ratio"),
}
"""What is asked of Nsight Compute, by its names."""


def command(ncu: str) -> list[str]:
    """The command line that profiles the child and prints a CSV among other lines; run it in the root of the checkout."""
    asked = ("-k", "regex:" + "|".join(KERNELS), "--metrics", ",".join(METRICS), "--csv", "--print-units", "base")
    child = (sys.executable, "-m", "launch.bench.bench_counters", "--child")
    return [ncu, "--clock-control", "none", "--profile-from-start", "off", *asked, *child]


def take() -> str:
    """Run the child under ``ncu``.

    Returns:
        What was printed, a CSV in it.

    Raises:
        CountersError: There is no ``ncu``, or it gave no counters.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise CountersError(
            "there is no ncu (Nsight Compute, of the CUDA toolkit) on PATH, so no counters can be taken. Install it, or run "
            f"this where it is and import what it prints with --csv: {shlex.join(command('ncu'))}"
        )
    done = subprocess.run(command(ncu), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not _csv_lines(done.stdout):
        last = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise CountersError(
            f"{ncu} ended with status {done.returncode} and gave no counters. The driver must let this user read them "
            f"(NVreg_RestrictProfilingToAdminUsers=0, or root), and sandboxes such as gVisor pass none on. Its last lines:\n{last}"
        )
    return done.stdout


def _csv_lines(text: str) -> list[str]:
    """Header and samples, without what else was printed."""
    quoted = [line for line in text.splitlines() if line.startswith('"')]
    starts = [i for i, line in enumerate(quoted) if line.startswith('"ID"')]
    return quoted[starts[0] :] if starts else []


def launches_of(text: str) -> list[Row]:
    """The launches of a CSV, each a row's columns, in the order they were made.

    Args:
        text: What ``ncu`` printed: a line a metric and launch.

    Raises:
        CountersError: The CSV lacks a column or a metric, or is not of this program.
    """
    samples = list(csv.DictReader(_csv_lines(text)))
    wanted = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    if not samples or any(s.get(key) is None for s in samples for key in wanted):
        raise CountersError(f"expected the CSV of ncu with columns {', '.join(wanted)}, found none; see --help")
    found = []
    for number, lines in groupby(samples, lambda s: s["ID"]):
        mine = list(lines)
        what = f"launch {number} ({mine[0]['Kernel Name'][:60]})"
        kernels = [kernel for part, kernel in KERNELS.items() if part in mine[0]["Kernel Name"]]
        values = {METRICS[s["Metric Name"]].column: _value(s, what) for s in mine if s["Metric Name"] in METRICS}
        missing = [name for name, counter in METRICS.items() if counter.column not in values]
        if missing or not kernels:
            why = f"lacks {', '.join(missing)}" if missing else f"is none of {', '.join(KERNELS)}"
            raise CountersError(f"{what} {why}; take the counters with the command of bench_counters.command")
        found.append(values | {"kernel": kernels[0], "launch": int(number)})
    return _placed(found)


def _value(sample: dict[str, str], what: str) -> float:
    """A number as ncu prints it, thousands separated by commas, in the unit of its column."""
    counter, name = METRICS[sample["Metric Name"]], sample["Metric Name"]
    try:
        value = Decimal(sample["Metric Value"].replace(",", ""))
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise CountersError(f"{what}: {name} is {sample['Metric Value']!r}, no number; this device does not count it")
    if counter.units and sample["Metric Unit"] not in counter.units:
        raise CountersError(
            f"{what}: {name} is in {sample['Metric Unit']!r}, expected {counter.units[0]!r}; use --print-units base"
        )
    return counter.kind(value / counter.divisor)


def _placed(found: list[Row]) -> list[Row]:
    """With step, part of the model and work of each launch: all steps are decoded, then all XORed, in one order."""
    decodes = [("decoder", step, layer, "LZ4 blocks to masks") for step, (layer, _) in enumerate(STEPS)]
    xors = [("XOR", step, layer, work) for step, (layer, works) in enumerate(STEPS) for work in works]
    plan = decodes + xors
    if [r["kernel"] for r in found] != [kernel for kernel, *_ in plan]:
        seen = [f"{len(list(run))} x {kernel}" for kernel, run in groupby(r["kernel"] for r in found)]
        raise CountersError(
            f"found launches {', '.join(seen)}, expected {len(decodes)} x decoder, then {len(xors)} x XOR; if the apply "
            "makes others by now, correct STEPS of bench_counters"
        )
    rows = [r | {"step": s, "layer": layer, "work": work} for r, (_, s, layer, work) in zip(found, plan, strict=True)]
    grids: dict[tuple[str, str, str], set[int]] = {}
    for r in rows:
        grids.setdefault((r["kernel"], r["layer"], r["work"]), set()).add(r["grid"])
    if odd := {key: grid for key, grid in grids.items() if len(grid) > 1}:
        raise CountersError(f"launches of the same work have other grids: {odd}; correct STEPS of bench_counters")
    return rows


def write_rows(path: Path, launches: Sequence[Row], where: Row | None = None) -> list[Row]:
    """Write the result file.

    Args:
        path: The file; replaced.
        launches: From ``launches_of``.
        where: Columns of the machine that they were taken on; None for this one.
    """
    seen: dict[str, int] = {}
    with _RowsOf(path, where) as out:
        for launch in launches:
            columns = dict(launch)
            nbytes = {key: columns.pop(key) for key in ("nbytes_in", "nbytes_out")}
            case = f"{launch['kernel']}, {launch['layer']}: {launch['work']}"
            sample = seen[case] = seen.get(case, -1) + 1
            out.add(case, **nbytes, density=DENSITY, sample=sample, **columns)
    return out.rows


class _RowsOf(RowWriter):
    """A writer of samples that may have been taken on another machine."""

    def __init__(self, path: Path, where: Row | None) -> None:
        super().__init__(path, "counters")
        self._where = where or self._where


def where_of(path: Path) -> Row:
    """The machine, versions and commit that all rows of a result file name.

    Raises:
        CountersError: They do not name the same, or are no rows.
    """
    try:
        found = [{key: row[key] for key in _WHERE if key in row} for row in read_rows(path)]
    except (ValueError, TypeError) as e:
        raise CountersError(f"{path}: expected rows of a benchmark, one JSON object a line: {e}") from e
    if not found or any(row != found[0] for row in found):
        raise CountersError(f"{path}: expected rows of one machine and commit; name another file with --where")
    return found[0]


def child() -> None:
    """What is profiled: all steps decoded, then all XORed, after two whole passes that load the kernels."""
    directory = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        bench = Bench(replace(Shape(), num_layers=5), directory, "cuda", 16)
        bench.publish(ScatterBackend(bench.binding))
        backend, placed, _ = _staged(bench)
        for _ in range(2):
            placed.write_()
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            decode_all(backend, placed)
            torch.cuda.synchronize()
            xor_all(backend, placed)
            torch.cuda.synchronize()
    finally:
        shutil.rmtree(directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 where there are no counters."""
    parser = Parser(__doc__)
    parser.add_argument("--child", action="store_true", help="run what is profiled, and nothing else")
    parser.add_argument("--csv", type=Path, help="make the rows from this output of ncu")
    parser.add_argument("--where", type=Path, default=RESULTS / "receiver-gpu.jsonl", help="rows of the CSV's machine")
    given = parser.parse_args(arguments)
    if given.child:
        require_cuda()
        child()
        return 0
    path = result_file(given.out, "counters-gpu.jsonl")
    try:
        launches = launches_of(given.csv.read_text() if given.csv else take())
        rows = write_rows(path, launches, where_of(given.where) if given.csv else None)
    except (CountersError, UnicodeDecodeError, OSError) as e:
        print(f"counters: {e}\ncounters: nothing was written", file=sys.stderr)
        return 2
    for r in rows:
        peaks = ", ".join(f"{k} {r[f'{k.lower()}_ratio']:.1%}" for k in ("L2", "issue", "DRAM"))
        print(f"{r['case']}: {r['seconds'] * 1e3:.3f} ms, grid {r['grid']}, {peaks}")
    print(f"wrote {path}: {len(rows)} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())

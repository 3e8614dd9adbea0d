"""Hardware counters: what ncu prints becomes rows, what it cannot count is refused, and P7's reason is computed from the rows."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.bench import bench_counters, report_counters
from launch.bench.bench_counters import METRICS, CountersError, command, launches_of, main
from launch.bench.report_rows import Results
from launch.bench.report_tables import block
from launch.bench.report_targets import summarize
from launch.bench.rows import read_rows

DECODER = "void nvcomp::lz4DecompressBatchKernel<0, 1>(const unsigned char *const *, unsigned long *)"
HEADER = ("ID", "Process ID", "Kernel Name", "Block Size", "Metric Name", "Metric Unit", "Metric Value")
UNITS = {"seconds": "ns", "nbytes_in": "byte", "nbytes_out": "byte", "shared_nbytes": "byte/block"}
WHERE = {"cpu": "Xeon", "cores": 16, "device": "NVIDIA H200", "driver": "580", "cuda": "13.0", "python": "3.12.3"}
WHERE |= {"torch": "2.11.0", "triton": "3.6.0", "commit": "0123456789abcdef+"}

# microseconds, L2 %, issue slots %, DRAM %, blocks: decoder and XORs of steps outside layers, of dense and of MoE layers
DECODES = [(800, 50, 30, 20, 511), *3 * [(700, 12, 20, 5, 146)], (1000, 60, 40, 25, 1474), (2000, 60, 40, 25, 1474)]
DENSE = [(80, 40, 30, 31, 1646), (78, 32, 29, 25, 1344)]
MOE = [(100, 32, 50, 20, 2816), (400, 70, 55, 50, 18432), (50, 20, 10, 20, 734), (50, 20, 20, 20, 864)]
LAUNCHES = [(DECODER, *x) for x in DECODES] + [
    ("walk_kernel", *x) for x in [(380, 70, 47, 56, 14777), *3 * DENSE, *2 * MOE]
]


def printed(
    launches: list[tuple[Any, ...]] = LAUNCHES, change: Callable[[dict[str, str]], None] = lambda s: None
) -> str:
    """What ncu prints: its own lines and the program's, then a line a launch and metric, all quoted."""
    out = io.StringIO()
    writer = csv.DictWriter(out, HEADER, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    for number, (kernel, took_us, l2, issue, dram, grid) in enumerate(launches):
        values = {"seconds": f"{1000 * took_us:,}", "l2_ratio": f"{l2:.2f}", "issue_ratio": f"{issue:.2f}"}
        values |= {"dram_ratio": f"{dram:.2f}", "grid": f"{grid:,}", "nbytes_in": "100,338,688", "waves": "0.47"}
        for name, counter in METRICS.items():
            unit = UNITS.get(counter.column, "%" if counter.divisor == 100 else "")
            sample = {"ID": str(number), "Process ID": "704", "Kernel Name": kernel, "Block Size": "(32, 2, 1)"}
            sample |= {"Metric Name": name, "Metric Unit": unit, "Metric Value": values.get(counter.column, "64")}
            change(sample)
            writer.writerow(sample)
    return f"==PROF== Connected to process 704\nworld_s 12.30\n{out.getvalue()}==PROF== Disconnected\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"stage": "receiver", "case": c, "sample": 0, "seconds": s} for c, s in (("a", 1.0), ("b", 2.0))]
    (tmp_path / "receiver-gpu.jsonl").write_text("".join(json.dumps(r | WHERE) + "\n" for r in rows))
    (tmp_path / "counters.csv").write_text(printed())
    return tmp_path


def imported(folder: Path) -> int:
    where, out = str(folder / "receiver-gpu.jsonl"), str(folder / "counters-gpu.jsonl")
    return main(["--csv", str(folder / "counters.csv"), "--where", where, "--out", out])


def test_a_csv_becomes_rows_of_the_machine_it_was_taken_on(folder: Path) -> None:
    assert imported(folder) == 0
    rows = read_rows(folder / "counters-gpu.jsonl")
    assert len(rows) == 21
    r = rows[5]
    assert (r["stage"], r["case"], r["sample"]) == ("counters", "decoder, MoE layer: LZ4 blocks to masks", 1)
    assert (r["seconds"], r["l2_ratio"], r["issue_ratio"], r["dram_ratio"]) == (0.002, 0.6, 0.4, 0.25)
    assert (r["nbytes_in"], r["grid"], r["block"], r["waves"], r["stall_lg_throttle_ratio"]) == (
        100_338_688,
        1474,
        64,
        0.47,
        64.0,
    )
    assert {key: r[key] for key in WHERE} == WHERE
    assert not {"cpu_s", "load"} & set(r)  # of this machine, not of the samples'
    assert [(x["step"], x["work"], x["grid"]) for x in rows[-4:]] == [
        (5, "block scales", 2816),
        (5, "4-bit experts", 18432),
        (5, "BF16, whole or cut by rows", 734),
        (5, "BF16, cut by columns", 864),
    ]
    assert [x["layer"] for x in rows[6:9]] == ["outside layers", "dense layer", "dense layer"]


def test_real_lines_of_ncu_are_read() -> None:
    """Two numbers as Nsight Compute printed them on an H200."""
    l2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"

    def change(sample: dict[str, str]) -> None:
        if sample["ID"] == "4" and sample["Metric Name"] in (l2, "gpu__time_duration.sum"):
            sample["Metric Value"] = "63.28" if sample["Metric Name"] == l2 else "1,256,736"

    r = launches_of(printed(change=change))[4]
    assert (r["seconds"], r["l2_ratio"]) == (0.001256736, 0.6328)


def _unit(sample: dict[str, str]) -> None:
    sample["Metric Unit"] = {"ns": "us"}.get(sample["Metric Unit"], sample["Metric Unit"])


def _uncounted(sample: dict[str, str]) -> None:
    if sample["Metric Name"].startswith("dram__throughput"):
        sample["Metric Value"] = "n/a"


def _renamed(sample: dict[str, str]) -> None:
    sample["Metric Name"] = sample["Metric Name"].replace("lts__throughput", "other")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM\n", "expected the CSV of ncu with columns ID"),
        (printed(change=_unit), r"launch 0 \(void nvcomp.*gpu__time_duration.sum is in 'us', expected 'ns'"),
        (printed(change=_uncounted), r"dram__throughput.avg.*is 'n/a', no number"),
        (printed(change=_renamed), "lacks lts__throughput.avg.pct_of_peak_sustained_elapsed"),
        (printed(LAUNCHES[:-1]), "found launches 6 x decoder, 14 x XOR, expected 6 x decoder, then 15 x XOR"),
        (printed([*LAUNCHES[:-1], ("gemm", *MOE[3])]), "is none of lz4Decompress, walk_kernel"),
        (printed([*LAUNCHES[:-1], ("walk_kernel", *MOE[0])]), "launches of the same work have other grids"),
    ],
    ids=["no-csv", "unit", "not-counted", "metric-missing", "fewer-launches", "other-kernel", "other-grid"],
)
def test_what_is_not_this_programs_csv_is_refused(text: str, told: str) -> None:
    with pytest.raises(CountersError, match=told):
        launches_of(text)


def test_rows_of_two_machines_do_not_say_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "receiver-gpu.jsonl"
    path.write_text(path.read_text().replace("H200", "B300", 1))
    assert imported(folder) == 2
    assert "expected rows of one machine and commit" in capsys.readouterr().err
    assert not (folder / "counters-gpu.jsonl").exists()


def _ncu(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program named ncu at the head of PATH."""
    (folder / "bin").mkdir()
    path = folder / "bin" / "ncu"
    path.write_text(f"#!{shutil.which('sh')}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def test_without_ncu_the_command_is_told_and_old_rows_stay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "counters-gpu.jsonl"
    out.write_text("kept\n")
    monkeypatch.setenv("PATH", str(folder))
    assert main(["--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert "there is no ncu" in told
    assert "--clock-control none --profile-from-start off -k 'regex:lz4Decompress|walk_kernel' --metrics gpu__" in told
    assert out.read_text() == "kept\n"


def test_a_sandbox_that_passes_no_counters_on_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _ncu(folder, "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1", monkeypatch)
    assert main(["--out", str(folder / "counters-gpu.jsonl")]) == 2
    told = capsys.readouterr().err
    assert "ended with status 1 and gave no counters" in told
    assert "gVisor" in told
    assert "==ERROR== ERR_NVGPUCTRPERM" in told
    assert not (folder / "counters-gpu.jsonl").exists()


def test_what_ncu_prints_here_is_of_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ncu(folder, f'for a in "$@"; do echo "$a"; done > {folder}/asked; cat {folder}/counters.csv', monkeypatch)
    assert main(["--out", str(folder / "counters-gpu.jsonl")]) == 0
    rows = read_rows(folder / "counters-gpu.jsonl")
    assert rows[4]["seconds"] == 0.001
    assert rows[4]["cpu"] == bench_counters.RowWriter(folder / "x", "x")._where["cpu"]
    assert (folder / "asked").read_text().splitlines() == command("ncu")[1:]


def test_seconds_at_the_peak_of_a_layer_over_its_decoder(folder: Path) -> None:
    """A layer of 1 ms and one of 2: decoder 0.6, then XORs of 0.332 ms at the peak of L2."""
    imported(folder)
    found = report_counters.layers(Results(folder))
    assert [[r["launch"] for r in mine] for mine in found] == [[4, 13, 14, 15, 16], [5, 17, 18, 19, 20]]
    assert report_counters.needed(found, "l2_ratio") == pytest.approx((0.932 + 0.766) / 2)
    assert report_counters.needed(found, "dram_ratio") == pytest.approx((0.49 + 0.37) / 2)
    lines = report_counters.lines(Results(folder), 1.25)
    assert lines[0] == ["decoder: LZ4 blocks to masks", "1474", "1.500", "60.0", "40.0", "25.0", "64.0", "64"]
    assert lines[2] == ["XOR: 4-bit experts", "18432", "0.400", "70.0", "55.0", "50.0", "64.0", "64"]
    assert lines[5] == ["all of them in the decoder's time", "", "1.500", "84.9", "61.4", "43.0", "", ""]
    assert lines[6] == ["all of them in 1.15 x that time, as asked", "", "1.725", "73.8", "53.4", "37.4", "", ""]
    assert lines[7][2:4] == ["1.875", "67.9"]
    assert len(report_counters.lines(Results(folder), None)) == 7


def test_p7_says_what_the_counters_give_as_a_reason(folder: Path) -> None:
    size = {"live_nbytes": 111_300_000_000, "hbm_nbytes": 3_050_000_000, "slots_nbytes": 3_000_000_000, "num_steps": 78}
    passes = (("two slots, total", 0.25), ("decoder alone", 0.2), ("XOR alone", 0.1))
    rows = [{"stage": "receiver", "case": f"P7 {c}", "sample": 0, "seconds": s} | size | WHERE for c, s in passes]
    (folder / "receiver-gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    without = summarize(Results(folder))["P7"]
    assert "counters" not in without["conditions"]
    assert "under Nsight Compute" not in block(Results(folder), ".")
    imported(folder)
    told = summarize(Results(folder))["P7"]
    assert (told["value"], told["met"]) == (without["value"], without["met"]) == (1.25, False)
    assert "a reason, not a proof, by hardware counters of 2 MoE layers" in told["conditions"]
    assert (
        "keep L2 at 60.0 and 70.0, issue slots at 40.0 and 55.0, DRAM at 25.0 and 50.0 % of the peak"
        in told["conditions"]
    )
    assert "takes 0.85 of the decoder's time at the peak of L2, so in 1.15 x that time" in told["conditions"]
    assert "keep L2 at 74, issue slots at 53, DRAM at 37 % throughout, and in the 1.25 x measured" in told["conditions"]
    assert "they keep L2 at 68 %" in told["conditions"]
    assert "all of them in 1.25 x that time, as measured over all steps" in block(Results(folder), ".")

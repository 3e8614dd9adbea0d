"""The table of Megatron's runs: which steps count, what was compared, and every file of that kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.bench import report_megatron
from launch.bench.report_rows import Results
from launch.bench.report_tables import block

COMMON = {"stage": "megatron", "device": "NVIDIA H200", "commit": "30d9f2cace618b02621a7ffef4a372804497fbb3+"}
ALONE_MS = (100.0, 102.0)


def run(tp: int = 1, dp: int = 1, layout: str = "one GPU", blocks: int = 6, **more: Any) -> list[dict[str, Any]]:
    """Steps of 101 ms, of 121 where they publish, and others in all places that must not count; 2 % of the weights change."""
    where = COMMON | {"layout": layout, "ranks": tp * dp, "tp": tp, "dp": dp, "overlap": False} | more
    where |= {"weights_nbytes": 2_450_000_000}
    rows: list[dict[str, Any]] = []
    for n in range(blocks):
        publishes = n % 2 == 1
        for step in range(3):
            took = 5e3 if n < 2 else 1e3 if step == 0 else ALONE_MS[step - 1] + 20 * publishes
            columns = {"block": n, "step": step, "publishes": publishes, "seconds": took / 1e3}
            rows.append({"case": "step", "sample": len(rows), **columns, **where})
    first = {"version": 0, "equal": True, "density": 1.0, "nbytes_out": 2_450_000_000, "pause_s": 0.5}
    later = {"equal": True, "density": 0.02, "nbytes_out": 16_500_000}
    versions = [first, *({"version": v, "pause_s": 0.001 * v, **later} for v in (1, 2, 3))]
    return rows + [{"case": "version", "sample": v["version"], **v, **where} for v in versions]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_first_blocks_first_steps_and_version_0_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "megatron-gpu", run())
    results = Results(tmp_path)
    counted = report_megatron.steps(results.files["megatron-gpu"], publishes=True)
    assert [(r["block"], r["step"]) for r in counted] == [(3, 1), (3, 2), (5, 1), (5, 2)]
    steps = ["101.0 (100.0-102.0)", "121.0 (120.0-122.0)", "19.8"]
    assert report_megatron.lines(results) == [
        ["one GPU: 1 x 1", "8,192", "2.45", "4 of 4", "2.000", "16.5", "2.00", *steps],
    ]


def test_a_version_that_differs_is_not_hidden(tmp_path: Path) -> None:
    rows = run()
    rows[-1] |= {"equal": False, "density": None, "pause_s": None}  # the engine never showed it
    write(tmp_path, "megatron-gpu", rows)
    (line,) = report_megatron.lines(Results(tmp_path))
    assert line[3:7] == ["**no**: 3 of 4", "2.000", "16.5", "1.50"]


def test_every_file_of_the_kind_is_in_the_table(tmp_path: Path) -> None:
    write(tmp_path, "megatron-gpu", run())
    write(tmp_path, "megatron-gpu-dp2", run(dp=2, layout="dp2", commit="0123456789abcdef"))
    write(tmp_path, "megatron-gpu-tp2", run(tp=2, layout="tp2", blocks=0, overlap=True))
    results = Results(tmp_path)
    assert results.unread() == []
    lines = report_megatron.lines(results)
    assert [line[0] for line in lines] == ["one GPU: 1 x 1", "dp2: 1 x 2", "tp2: 2 x 1, overlapped"]
    assert lines[2][-3:] == ["", "", ""]  # only compared, not timed
    assert "| dp2: 1 x 2 " in block(results, ".")


def test_without_runs_there_is_no_table(tmp_path: Path) -> None:
    results = Results(tmp_path)
    assert report_megatron.lines(results) == []
    assert "megatron-gpu.jsonl is missing (python -m launch.gpu_megatron writes it)" in results.missing()
    assert "Megatron training" not in block(results, ".")

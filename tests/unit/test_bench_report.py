"""The benchmark report: the same rows give the same README, summary and pictures; gaps and broken files are named."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.bench import report
from launch.bench.report_figures import draw_all
from launch.bench.report_rows import BrokenRowsError, Results
from launch.bench.report_targets import summarize
from launch.bench.rows import RESULTS

ROOT = Path(__file__).resolve().parents[2]
WHERE = {"device": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "commit": "0123456789abcdef"}
IDS = ["P1", "P1b", "P1c", *(f"P{i}" for i in range(2, 13))]
ENTRIES = 94_000_000


def row(stage: str, case: str, sample: int = 0, **columns: Any) -> dict[str, Any]:
    return {"stage": stage, "case": case, "sample": sample, "density": None, **columns, **WHERE}


def samples(case: str, seconds: Sequence[float], **columns: Any) -> list[dict[str, Any]]:
    columns = {"nbytes_in": 3 * ENTRIES, "nbytes_out": 4 * ENTRIES, "density": 0.00085} | columns
    return [row("apply", case, i, seconds=s, **columns) for i, s in enumerate(seconds)]


def apply_rows(pinned_s: float = 0.0062, **columns: Any) -> list[dict[str, Any]]:
    """A floor of 5 ms, an apply of 5.5 ms, proofs at 7 ms; a faster variant that nobody runs by default."""
    return [
        *samples("P1 scatter floor", [0.005, 0.0049, 0.0051], **columns),
        *samples("P1 apply, block 64, 1 warps", [0.001], **columns),
        *samples("P1 apply, entries in HBM", [0.0055, 0.0056, 0.0054, 0.0058, 0.0052], **columns),
        *samples("P1 apply, entries pinned, chunks of 1 Mi", [0.001], **columns),
        *samples("P1 apply, entries pinned, as chosen", [pinned_s], **columns),
        *samples("touched-old check (stage)", [0.002], **columns),
        *samples("P1b apply, sums, compare, read-back", [0.007], **columns),
        *samples("P6 floor, bf16 2.0% of elements", [0.002], density=None),
        *samples("P6 bf16 2.0%, as chosen", [0.004], density=0.02, weights_nbytes=10_000_000_000),
    ]


def receiver_rows(live_nbytes: int = 111_300_000_000) -> list[dict[str, Any]]:
    size = {"live_nbytes": live_nbytes, "workers": 16, "num_frames": 78, "nbytes_in": 250_000_000}
    size |= {"nbytes_out": 290_000_000, "staged_share": 0.27, "cores": 16}
    slots = {"hbm_nbytes": 3_050_000_000, "slots_nbytes": 3_000_000_000, "num_steps": 78}
    pause = "P1b pause: write, new-state digest, read-back, vote, resume"
    made = [
        ("P5 staging, as called", [0.21, 0.2, 0.22], {}),
        (pause, [0.009, 0.0095, 0.0085], {}),
        ("P1 scatter floor", [0.006], {}),
        ("P7 two slots, total", [0.24, 0.22, 0.23], slots),
        ("P7 decoder alone", [0.2], {}),
        ("P7 XOR alone", [0.1], {}),
        ("P12 token alone", [0.02, 0.021], {"p99_s": 0.021}),
        (
            "P12 token beside staging, quiet",
            [0.02, 0.0212],
            {"p99_s": 0.0212, "stage_s": 0.8, "processes": 4, "hbm_nbytes": 3e8},
        ),
    ]
    return [row("receiver", c, i, seconds=s, **size, **more) for c, v, more in made for i, s in enumerate(v)]


def trainer_rows(place: str, file_system: str = "ext4") -> list[dict[str, Any]]:
    where = {"place": place, "file_system": file_system, "max_connections": ""}
    sync = {"nbytes_in": 6_960_000_000, "nbytes_out": 15_000_000, "density": 0.00085, "busy_s": 0.0045}
    sync |= {"landing_s": 0.001, "codec_s": 0.04, "durable_s": 0.08, "head_s": 0.09}
    sync |= {"copy_floor_s": 0.003, "pcie_floor_s": 0.116}
    steps = [("step", 1.0, False), ("step", 1.005, True), ("step", 1.0, False), ("step", 1.005, True)]
    return [
        row("trainer", "sync", seconds=0.08, **sync, **where),
        *(row("trainer", c, seconds=s, syncs=w, held_s=1e-6 * w, **where) for c, s, w in steps),
    ]


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"# before\n\n{report.BEGIN}\nold\n{report.END}\n\n## after\n")
    return tmp_path


def run(place: Path, *more: str) -> int:
    return report.main(["--results", str(place / "results"), "--readme", str(place / "README.md"), *more])


def test_committed_rows_give_the_committed_readme_and_summary() -> None:
    differ = report.stale(report.make_texts(Results(RESULTS), report.README))
    assert not differ, f"{differ}: run bash launch/bench.sh --report"


def test_committed_readme_links_pictures_that_are_there() -> None:
    block = report.README.read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    links = [part.partition(")")[0] for part in block.split("](")[1:]]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_summary_has_every_target_and_key() -> None:
    keys = {"value", "unit", "target", "floor", "met", "device", "commit", "conditions"}
    found = summarize(Results(RESULTS))
    assert list(found) == IDS
    assert all(set(entry) == keys for entry in found.values())
    assert json.loads((RESULTS / "summary.json").read_text()) == found


def test_figures_are_medians_of_the_default_case_beside_their_floor(place: Path) -> None:
    write(place / "results", "apply-gpu", apply_rows())
    found = summarize(Results(place / "results"))
    p1 = found["P1"]
    assert (p1["value"], p1["unit"], p1["floor"], p1["target"]) == (5.5, "ms", 5.0, 5.75)
    assert p1["met"] is True
    assert (p1["device"], p1["commit"]) == ("NVIDIA H200", "0123456789abcdef")
    assert "median 5.5 ms, p20 5.36, p80 5.64 of 5 samples, 1.100 x floor" in p1["conditions"]
    assert (found["P1b"]["value"], found["P1b"]["met"]) == (7.0, True)
    assert (found["P6"]["value"], found["P6"]["floor"], found["P6"]["met"]) == (0.4, 0.2, False)


def test_the_part_beyond_its_bound_decides(place: Path) -> None:
    write(place / "results", "apply-gpu", apply_rows(pinned_s=0.0066))
    p1 = summarize(Results(place / "results"))["P1"]
    assert (p1["value"], p1["target"], p1["met"]) == (6.6, 6.5, False)
    assert "entries in pinned memory [this value]" in p1["conditions"]


def test_the_real_path_of_the_receiver_goes_before_its_kernels(place: Path) -> None:
    write(place / "results", "apply-gpu", apply_rows())
    write(place / "results", "receiver-gpu", receiver_rows())
    found = summarize(Results(place / "results"))
    assert (found["P1b"]["value"], found["P1b"]["floor"], found["P1b"]["target"]) == (9.0, 6.0, 9.6)
    assert (found["P5"]["value"], found["P5"]["met"]) == (0.21, True)
    assert (found["P7"]["value"], found["P7"]["floor"], found["P7"]["met"]) == (1.15, 1.0, True)
    assert "HBM beyond weights and slots (at most 64 MB): 50 MB" in found["P7"]["conditions"]
    assert (found["P12"]["value"], found["P12"]["met"]) == (0.9524, True)


def test_the_receiver_at_another_size_does_not_count(place: Path) -> None:
    write(place / "results", "receiver-gpu", receiver_rows(10_000_000_000))
    found = summarize(Results(place / "results"))
    assert not any(found[k]["met"] for k in ("P1b", "P5", "P7"))
    assert "does not count: 10 GB, the target names 111" in found["P5"]["conditions"]


def test_trainer_targets(place: Path) -> None:
    write(place / "results", "trainer-gpu", trainer_rows("device", "tmpfs") + trainer_rows("host"))
    missing = summarize(Results(place / "results"))["P2"]
    assert (missing["value"], missing["target"], missing["met"]) == (4.5, 4.5, False)
    name = "step slower with one connection, snapshot in pinned memory (at most 1 %): not measured"
    assert f"{name}: trainer-gpu-connections1" in missing["conditions"]
    write(place / "results", "trainer-gpu-connections1", trainer_rows("host") + trainer_rows("device"))
    found = summarize(Results(place / "results"))
    assert found["P2"]["met"] is True
    assert "step slower with the snapshot in HBM (at most 1 %): median 0.5 %" in found["P2"]["conditions"]
    assert (found["P3"]["value"], found["P3"]["floor"], found["P3"]["met"]) == (80.0, 3.25, True)
    assert "fsync on tmpfs, where it costs nothing" in found["P3"]["conditions"]


def test_rows_may_say_themselves_what_they_are_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("pause", "decoder", i, target_id="P1c", value=v, floor=30.0, said="4 layers")
        for i, v in enumerate([28, 29])
    ]
    write(place / "results", "pause-gpu", rows)
    assert run(place) == 0
    p1c = summarize(Results(place / "results"))["P1c"]
    assert (p1c["value"], p1c["target"], p1c["met"]) == (28.5, 30.0, True)
    assert "0.950 x floor; 4 layers." in p1c["conditions"]
    assert "pause-gpu" not in capsys.readouterr().err


def test_a_tree_without_history_has_no_commit(place: Path) -> None:
    write(place / "results", "apply-gpu", [r | {"commit": "HEAD"} for r in apply_rows()])
    assert summarize(Results(place / "results"))["P1"]["commit"] == "not recorded"


def test_a_smaller_run_does_not_meet_a_target(place: Path) -> None:
    write(place / "results", "apply-gpu", apply_rows(nbytes_out=4_000_000))
    p1 = summarize(Results(place / "results"))["P1"]
    assert (p1["value"], p1["met"]) == (5.5, False)
    assert "does not count: 1000000 entries, the target names 94600000" in p1["conditions"]


def test_what_is_not_measured_says_what_would_measure_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "results", "extra", apply_rows()[:1])
    assert run(place) == 0
    found = json.loads((place / "results/summary.json").read_text())
    for entry in found.values():
        assert (entry["value"], entry["met"], entry["device"], entry["commit"]) == (None, False, None, None)
        assert "not measured" in entry["conditions"]
    hint = "apply-gpu.jsonl is missing (python -m launch.bench.bench_apply writes it)"
    assert hint in found["P1"]["conditions"]
    assert f"report: {hint}\n" in capsys.readouterr().err
    assert "No target was measured yet." in (place / "README.md").read_text()


def test_missing_case_is_named(place: Path) -> None:
    write(place / "results", "apply-gpu", apply_rows()[:3])
    told = summarize(Results(place / "results"))["P1"]["conditions"]
    assert (
        "apply-gpu.jsonl has no rows with case 'P1 apply, entries in HBM' (python -m launch.bench.bench_apply)" in told
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"stage": "apply", "case": "x", "sam', "line 2 of 2: not JSON"),
        ("[1]", "line 2 of 2: expected an object, found list"),
        (
            '{"stage": "apply", "sample": 0, "device": "a", "commit": "b"}',
            "line 2 of 2: missing or of another type: case None",
        ),
        (json.dumps(row("apply", "x", seconds=float("nan"))), "line 2 of 2: not JSON (NaN is no measurement)"),
    ],
    ids=["truncated", "no-object", "no-case", "nan"],
)
def test_broken_file_is_named_and_nothing_written(
    place: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    path = write(place / "results", "apply-gpu", apply_rows()[:1])
    path.write_text(path.read_text() + text + "\n")
    before = (place / "README.md").read_text()
    assert run(place) == 2
    assert f"{path}, {told}" in capsys.readouterr().err
    assert (place / "README.md").read_text() == before
    assert not (place / "results/summary.json").exists()


def test_every_broken_file_is_named(place: Path) -> None:
    for name in ("apply-gpu", "cpu"):
        write(place / "results", name, [])
    with pytest.raises(BrokenRowsError, match=r"(?s)apply-gpu\.jsonl: no rows.*cpu\.jsonl: no rows"):
        Results(place / "results")


def test_row_without_a_needed_column_is_an_error(place: Path) -> None:
    rows = apply_rows()
    del rows[4]["seconds"]
    write(place / "results", "apply-gpu", rows)
    with pytest.raises(BrokenRowsError, match=r"case 'P1 apply, entries in HBM' give no seconds"):
        summarize(Results(place / "results"))


def test_report_is_stable_and_check_sees_a_change(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "results", "apply-gpu", apply_rows())
    assert run(place) == 0
    text = (place / "README.md").read_text()
    assert text.startswith(f"# before\n\n{report.BEGIN}\n")
    assert text.endswith(f"{report.END}\n\n## after\n")
    assert "5.5 ms (5.36-5.64)" in text
    pictures = {p.name: p.read_bytes() for p in (place / "results").glob("*.svg")}
    assert set(pictures) == {"apply.svg", "stages.svg"}
    assert run(place, "--check") == 0
    assert {p.name: p.read_bytes() for p in draw_all(Results(place / "results"), place / "results")} == pictures
    (place / "README.md").write_text(text.replace("5.5 ms", "4.5 ms"))
    assert run(place, "--check") == 1
    assert "README.md is not what the rows give" in capsys.readouterr().err
    assert run(place) == 0
    assert (place / "README.md").read_text() == text


def test_unread_file_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "results", "extra", apply_rows()[:1])
    assert run(place) == 0
    assert "extra.jsonl is read by no table or target" in capsys.readouterr().err


def test_no_rows_are_no_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, before = place / "results", (place / "README.md").read_text()
    told = ": take samples with bash launch/bench.sh, or name a folder with --results; nothing was written\n"
    for why in ("holds no *.jsonl", "is no folder"):
        assert run(place) == run(place, "--check") == 2
        assert capsys.readouterr().err == 2 * f"report: {results} {why}{told}"
        assert (place / "README.md").read_text() == before
        if results.exists():
            assert not list(results.iterdir())
            results.rmdir()


def test_a_report_that_cannot_be_written_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place / "results", "apply-gpu", apply_rows())
    monkeypatch.setattr(report, "folder_fault", lambda name, folder: f"{name}{folder}: x" if "readme" in name else "")
    assert run(place) == 2
    assert capsys.readouterr().err == f"report: --readme {place}: x; nothing was written\n"
    assert not list((place / "results").glob("*.svg"))


@pytest.mark.parametrize("text", ["no markers", f"{report.END}\n{report.BEGIN}\n"], ids=["none", "swapped"])
def test_readme_without_markers_is_refused(place: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (place / "README.md").write_text(text)
    write(place / "results", "apply-gpu", apply_rows())
    assert run(place) == 2
    assert "expected <!-- bench:begin -->" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["--fast"], 2), (["--only", "nothing"], 2)])
def test_command_line(arguments: list[str], status: int) -> None:
    done = subprocess.run(
        ["bash", "launch/bench.sh", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert "bench" in (done.stderr if status else done.stdout)

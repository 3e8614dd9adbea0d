"""Where results go: ``out`` means the same to every benchmark, and what cannot be written is known before measuring."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.bench.entry import Parser, folder, trace
from launch.bench.places import emptied_fault, folder_fault, out_fault, result_file, trace_fault
from launch.bench.rows import RESULTS

PROC = pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")


def test_a_path_that_ends_in_jsonl_is_the_file_and_any_other_the_folder() -> None:
    assert result_file("a/b", "cpu.jsonl") == Path("a/b/cpu.jsonl")
    assert result_file(Path("a/b.jsonl"), "cpu.jsonl") == Path("a/b.jsonl")
    assert result_file("results.v2", "cpu.jsonl") == Path("results.v2/cpu.jsonl")


def test_what_can_be_written_is_no_fault_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("{}\n")
    for out in (tmp_path, tmp_path / "new/er", tmp_path / "new/x.jsonl", tmp_path / "old.jsonl"):
        assert out_fault("out=", str(out)) == ""
    assert folder_fault("--directory ", str(tmp_path / "new")) == ""
    assert trace_fault("trace=", str(tmp_path / "new/t.json.gz")) == ""
    assert [p.name for p in tmp_path.iterdir()] == ["old.jsonl"]
    assert (tmp_path / "old.jsonl").read_text() == "{}\n"


def test_what_cannot_be_written_says_what_was_given_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    wanted = ": give a folder that can be written to, or a path in one that ends in .jsonl for the file itself"
    for out, why in (
        ("", "an empty path"),
        (str(tmp_path / "file"), f"{tmp_path / 'file'} is no folder"),
        (str(tmp_path / "file/x"), f"{tmp_path / 'file'} is no folder"),
        (str(tmp_path / "file/x.jsonl"), f"{tmp_path / 'file'} is no folder"),
        (str(tmp_path / "folder.jsonl"), "is a folder"),
        ("~/x", "~ is no folder, and no shell put one in its place: write $HOME"),
        (str(tmp_path / ("x" * 300 + ".jsonl")), "File name too long"),
        (str(tmp_path / "link"), f"{tmp_path / 'link'} is no folder"),
    ):
        assert out_fault("out=", out) == f"out={out}: {why}{wanted}"
    assert folder_fault("sink=", str(tmp_path / "file")).startswith(f"sink={tmp_path / 'file'}: ")
    assert (
        trace_fault("trace=", "x") == "trace=x: expected a file that ends in .json.gz, which is what trace viewers open"
    )
    assert "is no folder" in trace_fault("trace=", str(tmp_path / "file/t.json.gz"))


def test_a_folder_with_other_things_in_it_is_not_emptied(tmp_path: Path) -> None:
    assert emptied_fault("folder=", str(tmp_path / "new"), "mark") == ""
    assert emptied_fault("folder=", str(tmp_path), "mark") == ""
    (tmp_path / "mine").write_text("x")
    said = f"folder={tmp_path}: would be emptied, and holds what no earlier run has left: give a folder of its own"
    assert emptied_fault("folder=", str(tmp_path), "mark") == said
    (tmp_path / "mark").write_text("x")
    assert emptied_fault("folder=", str(tmp_path), "mark") == ""
    assert "is no folder" in emptied_fault("folder=", str(tmp_path / "mine"), "mark")


@PROC
def test_a_folder_where_nothing_can_be_made_is_a_fault() -> None:
    for out in ("/proc/x", "/proc/x/y.jsonl", "/proc"):
        fault = out_fault("--out ", out)
        assert fault.startswith(f"--out {out}: ")
        assert ": nothing can be made in /proc (" in fault
        assert len(fault.splitlines()) == 1


def test_options_of_benchmarks_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("about 5 %")
    parser.add_argument("--directory", type=folder)
    parser.add_argument("--trace", type=trace)
    assert parser.parse_args([]).out == RESULTS
    assert parser.parse_args(["--out", str(tmp_path / "x.jsonl")]).out == tmp_path / "x.jsonl"
    (tmp_path / "file").write_text("x")
    for arguments, said in (
        (["--out", f"{tmp_path}/file"], "argument --out: "),
        (["--directory", ""], "argument --directory: : an empty path"),
        (["--trace", "x%d"], "argument --trace: x%d: expected a file that ends in .json.gz"),
        (["--foo"], "unrecognized arguments: --foo"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(arguments)
        told = capsys.readouterr()
        assert (ended.value.code, told.out) == (2, "")
        assert said in told.err
        assert len(told.err.splitlines()) == 1
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--out" in capsys.readouterr().out

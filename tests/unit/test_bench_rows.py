"""Result rows: what was written is read back, with where it was measured; medians and tables."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch.bench.rows import RowWriter, Timed, environment, middle, read_rows, table, timed


def test_rows_say_where_they_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x-cpu.jsonl"
    with RowWriter(path, "x") as out:
        first = out.add("a", nbytes_in=10, nbytes_out=3, density=0.5, sample=2, took=Timed(0.25, 0.125), codec="sparse")
        out.add("b", nbytes_in=1, nbytes_out=1)
        assert read_rows(path.with_name("x-cpu.jsonl.part")) == out.rows  # each row is on disk at once
    rows = read_rows(path)
    assert rows[0] == first
    expected = {"stage": "x", "case": "a", "sample": 2, "density": 0.5, "nbytes_in": 10, "nbytes_out": 3}
    assert expected | {"seconds": 0.25, "cpu_s": 0.125, "codec": "sparse"} == {
        k: rows[0][k] for k in (*expected, "seconds", "cpu_s", "codec")
    }
    assert "seconds" not in rows[1]
    for key in ("device", "driver", "commit", "python", "numpy", "torch", "zstandard"):
        assert isinstance(rows[1][key], str), key
    assert environment()["cpu"] == rows[0]["cpu"] != ""


def test_a_new_run_replaces_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        with RowWriter(tmp_path / "x.jsonl", "x") as out:
            out.add("a", nbytes_in=1, nbytes_out=1)
    assert len(read_rows(tmp_path / "x.jsonl")) == 1


def test_a_run_that_breaks_off_leaves_the_rows_of_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with RowWriter(path, "x") as out:
        kept = out.add("a", nbytes_in=1, nbytes_out=1)

    def broken() -> None:
        with RowWriter(path, "x") as out:
            out.add("b", nbytes_in=1, nbytes_out=1)
            raise RuntimeError("no CUDA")

    with pytest.raises(RuntimeError, match="no CUDA"):
        broken()
    assert read_rows(path) == [kept]
    assert [r["case"] for r in read_rows(tmp_path / "x.jsonl.part")] == ["b"]


def test_processor_time_is_work_and_wall_time_is_not() -> None:
    out, took = timed(lambda: sum(range(300_000)))
    assert out == 44_999_850_000
    assert took.seconds > 0
    assert took.cpu_s > 0
    _, slept = timed(lambda: time.sleep(0.02))
    assert slept.seconds >= 0.02 > slept.cpu_s
    assert Timed(1, 2) + Timed(3, 4) == Timed(4, 6)


def test_middle_and_table() -> None:
    assert middle([5, 1, 3, 2, 4]) == (3, pytest.approx(1.8), pytest.approx(4.2))
    assert table(["case", "x"], [["a", "1.0"], ["long", "22.0"]]).splitlines() == [
        "| case |    x |",
        "|------|-----:|",
        "| a    |  1.0 |",
        "| long | 22.0 |",
    ]

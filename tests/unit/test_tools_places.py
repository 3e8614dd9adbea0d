"""The ``megasync`` command: runs of which little is left, and places that take no more bytes."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megasync.sinks.forward import ForwardingSink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.tools import rebuild
from megasync.tools.cli import main
from megasync.tools.diff import diff
from megasync.tools.examine import runs_of, verify
from megasync.versions.head import claim


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Versions 0 and 1 as checkpoints ``v0`` and ``v1``, the sink ``s`` with runs ``a`` and ``b`` of both."""
    for version in range(2):
        (tmp_path / f"v{version}").mkdir()
        data = torch.arange(5000.0)
        data[:: 1 + 99 * version] += version
        save_file({"w": data}, tmp_path / f"v{version}" / "model.safetensors")
    for name in "ab":
        diff(tmp_path / "v0", tmp_path / "v1", LocalSink(tmp_path / "s"), run=name)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    status = main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_run_of_which_only_the_head_is_left_is_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = LocalSink(place / "s")
    for key in list(sink.keys("a")):
        sink.delete(key)
    assert sink.heads() == ["a", "b"]
    assert runs_of(sink) == ["a", "b"]
    status, said = run(capsys, "verify", place / "s")
    assert (status, said["good"]) == (1, False)
    a, b = said["runs"]
    assert (a["run"], a["complete"], b["run"], b["complete"], b["faults"]) == ("a", False, "b", True, [])
    assert "manifest of version 1" in a["faults"][0]
    status, said = run(capsys, "inspect", place / "s")
    assert status == 1
    assert said["runs"][0]["run"] == "a"
    assert "manifest of version 1" in said["runs"][0]["faults"][0]
    assert [v["version"] for v in said["runs"][1]["versions"]] == [0, 1]  # one damaged run hides no other
    assert main(["inspect", str(place / "s")]) == 1
    assert "faults:\n    - manifest of version 1 epoch 1 of run 'a' is not in" in capsys.readouterr().out


def test_a_run_that_was_only_claimed_is_none_and_a_head_nobody_can_read_is_one() -> None:
    sink = MemorySink()
    claim(sink, "claimed")
    assert (sink.heads(), runs_of(sink), runs_of(ForwardingSink(sink))) == (["claimed"], [], [])
    sink.swap_head("odd", None, b"\xff no head")
    assert runs_of(ForwardingSink(sink)) == ["odd"]
    assert not verify(sink, "odd").complete


def test_what_has_faults_is_not_complete(place: Path) -> None:
    sink = LocalSink(place / "s")
    assert verify(sink, "a").complete
    (payload,) = [k for k in sink.keys("a") if "payload" in k]
    sink.delete(payload)
    report = verify(sink, "a")
    assert (len(report.faults), report.complete) == (1, False)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 16 KiB: the system refuses with EFBIG, as a full disk does with ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def apply(place: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    return run(capsys, "apply", place / "v0", "--sink", place / "s", "--run", "a", "--out", place / "out" / "new")


def test_a_copy_that_does_not_fit_names_the_place(
    place: Path, small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = apply(place, capsys)
    assert status == 1
    assert said["message"] == f"[Errno {errno.EFBIG}] File too large; nothing was kept: '{place / 'out' / 'new'}'"
    assert not (place / "out").exists()


@pytest.mark.parametrize("operation", ["copy_file_range", "pwritev"])
def test_a_disk_that_fills_up_names_the_place(
    place: Path, operation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, operation, full)
    status, said = apply(place, capsys)
    assert status == 1
    assert said["message"] == (
        f"[Errno {errno.ENOSPC}] No space left on device; nothing was kept: '{place / 'out' / 'new'}'"
    )
    assert not (place / "out").exists()


def test_a_base_that_cannot_be_read_is_named_itself(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(capsys, "apply", place / "none", "--sink", place / "s", "--run", "a", "--out", place / "o")
    assert status != 0
    assert str(place / "none") in said["message"]
    assert str(place / "o") not in said["message"]


@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(st.sampled_from([1, 2, 40, 3000, 70_000, 3_000_000]), st.integers(1, 30)), min_size=1, max_size=6
    ),
    st.integers(0, 1 << 32),
)
def test_words_are_xored_wherever_they_are(
    tmp_path_factory: pytest.TempPathFactory, power: int, groups: list[tuple[int, int]], seed: int
) -> None:
    """Against plain NumPy: positions in any order, close together and far apart, at an odd offset."""
    dtype, rng = np.dtype(f"<u{1 << power}"), np.random.default_rng(seed)
    gaps = np.concatenate([np.full(count, gap) for gap, count in groups])
    flat = np.unique(np.minimum(np.cumsum(gaps), 20_000_000) // dtype.itemsize)
    flat = flat if seed % 2 else rng.permutation(flat)
    values = rng.integers(1, 1 << (8 << power), len(flat), dtype=np.uint64).astype(dtype)
    path = tmp_path_factory.mktemp("xor") / "file"
    path.write_bytes(b"head!")
    os.truncate(path, 5 + (int(flat.max()) + 1) * dtype.itemsize)
    pieces = list(rebuild._pieces(flat, values))
    with path.open("r+b", buffering=0) as f:
        for at, given_values in pieces:
            rebuild._xor_piece(f.fileno(), 5, at, given_values)
    expected = np.zeros(int(flat.max()) + 1, dtype)
    expected[flat] = values
    found = np.memmap(path, np.uint8, "r")
    assert bytes(found[:5]) == b"head!"
    assert np.array_equal(found[5:].view(dtype), expected)
    assert all(int(p.max() - p.min()) * dtype.itemsize <= rebuild._PIECE_NBYTES for p, _ in pieces)
    path.unlink()


def test_a_file_that_ends_too_soon_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(10))
    with (tmp_path / "f").open("r+b", buffering=0) as f, pytest.raises(rebuild.FormatError, match="ends at byte 10"):
        rebuild._xor_piece(f.fileno(), 4, np.array([0, 3]), np.array([1, 1], "<u4"))

"""The ``megasync`` command where something is in its way: other writers, odd folders, closed outputs, interruptions."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import PublishConfig
from megasync.errors import FormatError, MegasyncError, NeedsAnchorError, RetryError, SinkConflictError
from megasync.manifest import manifest_key, payload_key
from megasync.sinks.forward import ForwardingSink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.tools import copying, rebuild
from megasync.tools.cli import main
from megasync.tools.diff import diff
from megasync.tools.examine import runs_of, verify
from megasync.trainer.callback import MegasyncCallback
from megasync.versions.checkpoint import Checkpoint
from megasync.versions.publication import PublicationReader

T = TypeVar("T")


def tensors(version: int) -> dict[str, torch.Tensor]:
    data = {"a": torch.arange(300.0), "b": torch.zeros(7, 9, dtype=torch.bfloat16)}
    data["a"][version] += version
    data["b"][0, : 2 * version] = 1.0
    return data


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Versions 0 to 2 as checkpoints ``v0`` to ``v2``, the sink ``s`` with all of them."""
    for version in range(3):
        (tmp_path / f"v{version}").mkdir()
        save_file(tensors(version), tmp_path / f"v{version}" / "model.safetensors")
    for version in range(2):
        diff(tmp_path / f"v{version}", tmp_path / f"v{version + 1}", LocalSink(tmp_path / "s"))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    status = main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def bytes_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_verify_takes_anchors_with_tensors_that_are_all_zero(key: bytes) -> None:
    for ones in ("", "a", "b", "ac", "bd", "abcd"):
        sink = MemorySink()
        values = {n: torch.full((64,), float(n in ones)) for n in "abcd"}
        callback = MegasyncCallback(TensorExporter(values), sink, PublishConfig(run="r", sign_key=key))
        callback.on_train_start()
        callback.on_train_end()
        report = verify(sink, "r", key=key or None)
        assert (report.faults, report.versions) == ([], [0])


@pytest.mark.parametrize("alone", [False, True])
def test_verify_names_a_run_whose_schema_is_gone(place: Path, alone: bool, capsys: pytest.CaptureFixture[str]) -> None:
    sink = LocalSink(place / "s")
    names = runs_of(sink)
    if not alone:
        callback = MegasyncCallback(TensorExporter({"a": torch.zeros(64)}), sink, PublishConfig(run="whole"))
        callback.on_train_start()
        callback.on_train_end()
    for key in list(sink.keys(f"{names[0]}/schema")):
        sink.delete(key)
    status, report = run(capsys, "verify", place / "s")
    assert status == 1
    assert not report["good"]
    assert [r["run"] for r in report["runs"]] == sorted([*names, *([] if alone else ["whole"])])
    (damaged,) = [r for r in report["runs"] if r["run"] == names[0]]
    assert "schema" in str(damaged["faults"])


def test_two_applies_to_one_place_never_share_bytes(place: Path) -> None:
    out = place / "out"

    def slow_apply() -> None:
        with copying.made_whole(out) as slow:
            (slow / "model.safetensors").write_bytes(b"half")
            assert rebuild.rebuild(place / "v0", LocalSink(place / "s"), out).version == 2
            (slow / "more").write_bytes(b"half")

    with pytest.raises(FileExistsError, match="exists"):
        slow_apply()
    assert bytes_of(out) == bytes_of(place / "v2")
    assert names_in(out) == ["model.safetensors"]
    assert {p.name for p in place.iterdir()} == {"v0", "v1", "v2", "s", "out"}


def test_an_apply_leaves_everything_else_beside_its_target_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "out.partial").mkdir()
    (place / "out.partial" / "precious").write_text("x")
    (place / "v0" / "tokenizer").mkdir()
    (place / "v0" / "tokenizer" / "vocab.txt").write_text("y")
    (place / "v0" / "link").symlink_to("model.safetensors")
    status, result = run(capsys, "apply", place / "v0", "--sink", place / "s", "--out", place / "out")
    assert (status, result["version"]) == (0, 2)
    assert (place / "out.partial" / "precious").read_text() == "x"
    assert (place / "out" / "tokenizer" / "vocab.txt").read_text() == "y"
    assert (place / "out" / "link").read_bytes() == bytes_of(place / "v0")
    # Inside its own base too, without a copy of itself.
    status, _ = run(capsys, "apply", place / "v0", "--sink", place / "s", "--out", place / "v0" / "deep" / "out")
    assert (status, names_in(place / "v0" / "deep" / "out")) == (
        0,
        ["link", "model.safetensors", "tokenizer"],
    )
    (place / "dead").symlink_to("nowhere")
    status, result = run(capsys, "apply", place / "v0", "--sink", place / "s", "--out", place / "dead")
    assert (status, result["error"]) == (1, "FileExistsError")


def test_what_a_killed_apply_left_is_removed_once_it_is_old(place: Path) -> None:
    out, old = place / "out", place / ".out.megasync-apply-0123456789abcdef"
    others = [place / ".out.megasync-apply-mine", place / ".other.megasync-apply-0123456789abcdef"]
    for folder in (old, *others):
        folder.mkdir()
        os.utime(folder, (1, 1))
    with copying.made_whole(out) as mine:
        os.utime(mine, (1, 1))  # however old: who lives holds its lock
        with copying.made_whole(place / "out2"):
            pass
        copying._remove_stale(out)
        assert mine.exists()
    assert not old.exists()
    assert all(folder.exists() for folder in others)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, 0])
def test_files_are_copied_where_the_kernel_cannot_copy_between_two_places(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*args: object) -> int:
        if code:
            raise OSError(code, os.strerror(code))
        return 0

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert rebuild.rebuild(place / "v0", LocalSink(place / "s"), place / "out").version == 2
    assert bytes_of(place / "out") == bytes_of(place / "v2")


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")  # noqa: PTH112
def test_an_apply_to_another_file_system(place: Path) -> None:
    out = Path(f"/dev/shm/megasync-test-{os.getpid()}")
    try:
        rebuild.rebuild(place / "v0", LocalSink(place / "s"), out)
        assert bytes_of(out) == bytes_of(place / "v2")
    finally:
        for file in out.glob("*"):
            file.unlink()
        out.rmdir()


def test_a_file_system_without_holes_and_a_file_with_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    with source.open("wb") as f:
        f.write(b"begin")
        f.seek(3 << 20)
        f.write(b"end")
        f.truncate(5 << 20)
    copying.copy_file(source, tmp_path / "by holes")
    monkeypatch.setattr(os, "lseek", lambda *a: (_ for _ in ()).throw(OSError(errno.EINVAL, "no holes here")))
    copying.copy_file(source, tmp_path / "whole")
    assert (tmp_path / "by holes").read_bytes() == (tmp_path / "whole").read_bytes() == source.read_bytes()


def test_what_cannot_be_copied_is_named_and_nothing_waits_for_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(place / "v0" / "pipe")
    (place / "v0" / "dangling").symlink_to("nowhere")
    (place / "v0" / "loop").symlink_to(".")
    status, result = run(capsys, "apply", place / "v0", "--sink", place / "s", "--out", place / "out")
    assert (status, result["error"]) == (1, "FormatError")
    for word in ("pipe is neither", "dangling is a link that leads nowhere", "loop is a link back"):
        assert word in result["message"]
    assert not list(place.glob("*out*"))
    shard = place / "fifo"
    shard.mkdir()
    os.mkfifo(shard / "model.safetensors")
    status, result = run(capsys, "diff", shard, shard, "--sink", place / "s2")
    assert (status, "no regular file" in result["message"]) == (1, True)


def test_apply_says_that_it_moves_forward_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["apply", place / "v2", "--sink", place / "s", "--out", place / "out", "--version"]
    status, result = run(capsys, *argv, 0)
    assert (status, result["error"]) == (1, "BaseMismatchError")
    assert "is version 2 of run 'run', version 0 is wanted: apply moves forward only" in result["message"]
    status, result = run(capsys, *argv, 2)
    assert (status, result["num_applied"]) == (0, 0)


@pytest.mark.parametrize("part", ["payload-00000", "schema", "state", "v000000000002/e000002/manifest"])
def test_a_missing_object_is_a_fault_with_a_name(place: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    keys = [k for k in LocalSink(place / "s").keys("run") if part in k]
    LocalSink(place / "s").delete(keys[-1])
    status, result = run(capsys, "apply", place / "v0", "--sink", place / "s", "--out", place / "out")
    if part == "state":  # no delta needs it
        assert status == 0
    else:
        assert (status, result["error"]) == (1, "RetryError")
        assert keys[-1] in result["message"]
    if part != "schema":  # nothing else says which runs there are
        status, report = run(capsys, "verify", place / "s")
        assert (status, report["good"]) == (1, False)


def test_a_missing_payload_may_come_back_and_a_pruned_version_does_not(place: Path) -> None:
    sink = LocalSink(place / "s")
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    key = payload_key("run", 2, newest.epoch, 0)
    data = sink.read(key)
    sink.delete(key)
    with pytest.raises(RetryError, match=key):
        list(reader.entries(newest))
    sink.create(key, [data])
    assert len(list(reader.entries(newest))) == len(newest.frames)
    sink.delete(key)
    sink.delete(manifest_key("run", 2, newest.epoch))
    with pytest.raises(NeedsAnchorError, match="pruned"):
        list(reader.entries(newest))
    with pytest.raises(RetryError, match="the head names it"):
        PublicationReader(sink, "run").newest()


def test_a_sink_that_vanished_is_not_one_that_never_was(place: Path) -> None:
    reader = PublicationReader(LocalSink(place / "s"), "run")
    assert reader.newest() is not None
    (place / "s").rename(place / "gone")
    assert PublicationReader(LocalSink(place / "s"), "run").newest() is None
    with pytest.raises(RetryError, match="was at version 2 and now has no head"):
        reader.newest()
    (place / "gone").rename(place / "s")
    assert reader.newest() is not None


class Meddled(ForwardingSink):
    """Does something else before its n-th call."""

    def __init__(self, inner: MemorySink, at: int, act: Callable[[], None]) -> None:
        super().__init__(inner)
        self.left, self.act = at, act

    def _run(self, operation: str, key: str, timeout_s: float, effect: Callable[[], T]) -> T:
        self.left -= 1
        if not self.left:
            self.act()
        return effect()


def publish(place: Path, sink: Any) -> str:
    try:
        diff(place / "v0", place / "v1", sink)
    except MegasyncError as e:
        return str(e)
    return ""


def test_of_publishers_that_meet_at_any_point_exactly_one_wins(place: Path) -> None:
    total = Meddled(MemorySink(), -1, lambda: None)
    assert publish(place, total) == ""
    for at in range(1, -total.left):
        inner, others = MemorySink(), list[str]()
        # The second one starts at any point of the first, and a third one at some point of the second.
        third = Meddled(inner, 1 + at // 2, lambda inner=inner, others=others: others.append(publish(place, inner)))  # type: ignore[misc]
        first = publish(
            place, Meddled(inner, at, lambda third=third, others=others: others.append(publish(place, third)))
        )  # type: ignore[misc]
        outcomes = [first, *others]
        assert outcomes.count("") == 1, (at, outcomes)
        assert all(not o or "another publisher" in o or "is at version 1" in o for o in outcomes), outcomes
        report = verify(inner, "run")
        assert (report.faults, report.versions, report.orphans) == ([], [0, 1], []), (at, outcomes)


def test_what_a_killed_writer_left_is_told_and_then_removed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "s" / "run" / "v000000000001"
    (folder / ".tmp-dead").write_bytes(b"x")
    os.utime(folder / ".tmp-dead", (1, 1))
    (folder / ".tmp-young").write_bytes(b"x")
    status, report = run(capsys, "verify", place / "s")
    assert (status, report["runs"][0]["orphans"]) == (0, ["run/v000000000001/.tmp-dead"])
    status, _ = run(capsys, "diff", place / "v2", place / "v1", "--sink", place / "s")
    assert (status, sorted(p.name for p in folder.glob(".tmp-*"))) == (0, [".tmp-young"])


def test_a_head_that_is_gone_is_told_apart_from_one_that_moved(tmp_path: Path) -> None:
    for sink in (MemorySink(), LocalSink(tmp_path)):
        with pytest.raises(SinkConflictError, match=r"expected 3 bytes, crc32 .*found no head.*the head is gone") as e:
            sink.swap_head("r", b"\x00\xffq", b"new")
        assert "another publisher" not in str(e.value)
        sink.swap_head("r", None, b"new")
        with pytest.raises(SinkConflictError, match="another publisher moved it") as e:
            sink.swap_head("r", b"\x00\xffq", b"newer")
        assert "\\x" not in str(e.value)


@pytest.mark.parametrize("name", ["a" * 513, "a\ud800"])
def test_what_no_reader_takes_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    status, result = diff_of_header(tmp_path, capsys, {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
    assert (status, result["error"]) == (1, "FormatError")
    huge = {"dtype": "U8", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}
    four = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    status, result = diff_of_header(tmp_path, capsys, {"huge": huge, "b": four})
    assert (status, "huge has shape" in result["message"]) == (1, True)
    assert not (tmp_path / "s").exists()


def diff_of_header(place: Path, capsys: pytest.CaptureFixture[str], header: object) -> tuple[int, Any]:
    text = json.dumps(header).encode()
    file = place / "one.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\1\2\3\4")
    return run(capsys, "diff", file, file, "--sink", place / "s")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([1], "header is unreadable: a list, expected an object"),
        (None, "header is unreadable: null, expected an object"),
        ({"a": [1]}, "a: a list, expected an object with dtype"),
        ({"a": {"dtype": 5, "shape": [4], "data_offsets": [0, 4]}}, "a: dtype is a number, expected text"),
        ({"a": {"dtype": "U8", "shape": "4", "data_offsets": [0, 4]}}, "a: shape is no list of whole numbers"),
        ({"a": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}}, "a: shape is no list of whole numbers"),
        ({"a": {"dtype": "U8", "shape": [True, 4], "data_offsets": [0, 4]}}, "a: shape is no list of whole numbers"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "a: data_offsets is no list of whole numbers"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, "a: data_offsets has 3 numbers"),
        ({"__metadata__": [1], "a": {}}, "__metadata__ is a list, expected an object"),
    ],
)
def test_odd_headers_are_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: object, words: str
) -> None:
    status, result = diff_of_header(tmp_path, capsys, header)
    assert (status, result["error"]) == (1, "FormatError")
    assert words in result["message"]


@pytest.mark.parametrize("index", ["[" * 100_000, "[1]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "{"])
def test_odd_indexes_are_told_in_words(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FormatError, match=r"unreadable|no weight_map"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("extra", [{}, {"new_field": 1}])
def test_a_newer_format_says_to_upgrade(place: Path, capsys: pytest.CaptureFixture[str], extra: dict[str, int]) -> None:
    path = place / "s" / ".heads" / "run.head"
    head = msgspec.msgpack.decode(path.read_bytes())
    for number, words in ((2, "upgrade megasync"), (99, "upgrade megasync"), (0, "expected" if not extra else "")):
        path.write_bytes(msgspec.msgpack.encode({**head, "format": number, **extra}))
        status, result = run(capsys, "inspect", place / "s")
        (said,) = result["runs"][0]["faults"]
        assert (status, "the head of run 'run' cannot be read" in said) == (1, True)
        assert words in said
        assert number or "upgrade" not in said


def test_wrong_flags_are_json_where_json_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["apply", "--version", "x"], ["nonsense"], ["diff", "a", "b", "--sink", "s", "--codec", "anchor"]):
        with pytest.raises(SystemExit, match="2"):
            main([*argv, "--json"])
        out, err = capsys.readouterr()
        assert json.loads(out)["error"] == "UsageError"
        assert "usage:" in err
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert capsys.readouterr().out == ""


def test_sinks_that_the_command_cannot_share_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sink in ("memory://", "MEMORY://x", "pg://h:1"):
        status, result = run(capsys, "diff", place / "v0", place / "v1", "--sink", sink)
        assert (status, "lives in the processes of a job" in result["message"]) == (2, True)
    status, facts = run(capsys, "inspect", f"file:{place}/s")
    assert (status, len(facts["runs"][0]["versions"])) == (0, 3)
    for sink in ("s3:/bucket", "file:relative", "memory:x"):
        status, result = run(capsys, "inspect", sink)
        assert (status, "neither a URL nor a plain path" in result["message"]) == (2, True)


def command(*argv: object, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    code = "import sys; from megasync.tools.cli import main; sys.exit(main())"
    words = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.Popen(words, stdout=stdout, stderr=subprocess.PIPE, text=True, encoding="utf-8")


def test_an_output_that_takes_no_more_is_one_line(place: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    os.close(reading)
    for descriptor, status, words in ((full, 1, "could not be written"), (writing, 141, "")):
        with command("inspect", place / "s", stdout=descriptor) as process:
            err = process.communicate()[1]
        os.close(descriptor)
        assert process.returncode == status
        assert "Traceback" not in err
        assert "Exception ignored" not in err
        assert words in err
        assert len(err.splitlines()) == bool(words)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_is_one_line_and_leaves_nothing(place: Path, number: int, status: int) -> None:
    code = (
        "import sys, os, signal; from megasync.tools import cli, rebuild\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits it ignored\n"
        "real = rebuild._compare\n"
        f"rebuild._compare = lambda *a: (print('here', flush=True), os.kill(os.getpid(), {int(number)}), real(*a))\n"
        "sys.exit(cli.main())"
    )
    argv = [sys.executable, "-c", code, "apply", place / "v0", "--sink", place / "s", "--out", place / "new" / "out"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "here\n")
    assert done.stderr.startswith("megasync: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (place / "new").exists()


def test_an_interrupted_diff_leaves_no_orphan(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import megasync.tools.diff as module

    sink = LocalSink(place / "s")
    before = list(sink.keys("run"))

    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_manifest", interrupted)
    assert main(["diff", str(place / "v2"), str(place / "v0"), "--sink", str(place / "s")]) == 130
    assert list(sink.keys("run")) == before


def test_an_unsigned_version_is_not_put_on_a_signed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would stop every reader and publisher that has the key."""
    for version in range(2):
        (tmp_path / f"v{version}").mkdir()
        save_file(tensors(version), tmp_path / f"v{version}" / "model.safetensors")
    sink, values = LocalSink(tmp_path / "s"), tensors(0)
    callback = MegasyncCallback(TensorExporter(values), sink, PublishConfig(run="r", sign_key=b"k" * 32))
    callback.on_train_start()
    callback.on_train_end()
    assert callback.version == 0
    with pytest.raises(ValueError, match="run 'r' is signed, and this command has no key"):
        diff(tmp_path / "v0", tmp_path / "v1", sink, run="r")
    status, said = run(capsys, "inspect", tmp_path / "s")
    assert status == 0
    assert [v["signed"] for v in said["runs"][0]["versions"]] == [True]


def test_a_run_that_is_not_there_is_a_wrong_call(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "verify"):
        status, said = run(capsys, command, place / "s", "--run", "typo")
        assert status == 2
        assert "holds no run 'typo'; it holds ['run']" in said["message"]

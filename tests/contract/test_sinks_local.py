"""The directory sink beyond the contract: crashes inside a write, locks, links, rights and room."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megasync.errors import FormatError, MemoryPlanError, RetryError, SinkConflictError
from megasync.sinks.contract import (
    check_create_and_read,
    check_create_race,
    check_exclusive_create,
    check_nothing_half_done,
)
from megasync.sinks.contract_place import Place
from megasync.sinks.local import LocalSink

CREATE_POINTS = ("opened", "written", "durable", "linked", "unlinked")
HEAD_POINTS = ("locked", "head durable", "head moved")

# Forks one writer for each point and has it killed there; prints the signal that ended each.
_KILL_WRITERS = """
import os, signal, sys
from megasync.sinks.local import LocalSink

def die(sink, point):
    sink.reached = lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == point else None
    for key in ("payload", "manifest"):
        sink.create(f"{point.replace(' ', '-')}/v2/{key}", [b"new " * 1000, key.encode()])
    sink.swap_head(point.replace(" ", "-"), b"old", b"new")

for point in sys.argv[2:]:
    child = os.fork()
    if not child:
        die(LocalSink(sys.argv[1]), point)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def _python(code: str, *arguments: str) -> str:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _temps(directory: Path) -> list[Path]:
    return list(directory.rglob(".tmp-*"))


def test_killed_inside_a_write_leaves_the_old_head_readable(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path)
    points = CREATE_POINTS + HEAD_POINTS
    for point in points:
        run = point.replace(" ", "-")
        sink.create(f"{run}/v1/manifest", [b"old"])
        sink.swap_head(run, None, b"old")

    assert _python(_KILL_WRITERS, str(tmp_path), *points).split() == [str(-signal.SIGKILL)] * len(points)

    for point in points:
        run = point.replace(" ", "-")
        head = sink.read_head(run)
        assert head == (b"new" if point == "head moved" else b"old")
        assert sink.read(f"{run}/v1/manifest") == b"old"
        listed = list(sink.keys(run))
        if point in ("opened", "written", "durable"):
            assert listed == [f"{run}/v1/manifest"]
        for key in listed:
            name = key.rsplit("/", 1)[1]
            assert sink.read(key) == (b"old" if "/v1/" in key else b"new " * 1000 + name.encode())
        # The next publisher is held up by nothing: neither by locks nor by what the dead one left.
        sink.create(f"{run}/v2/payload", [b"new " * 1000 + b"payload"], timeout_s=5.0)
        sink.swap_head(run, head, b"newest", timeout_s=5.0)
        assert sink.read_head(run) == b"newest"

    left = _temps(tmp_path)
    assert len(left) == 5, left  # opened, written, durable, linked, head durable
    assert sink.sweep(min_age_s=3600.0) == 0
    assert sink.sweep(min_age_s=0.0) > 0
    assert _temps(tmp_path) == []
    assert sink.read("linked/v2/payload") == b"new " * 1000 + b"payload"


def test_sweep_spares_the_living(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".tmp-of-the-dead").write_bytes(b"12345")

    def parts() -> Iterator[bytes]:
        yield b"first"
        assert len(_temps(tmp_path)) == 2
        assert sink.sweep(min_age_s=0.0) == 5
        assert len(_temps(tmp_path)) == 1
        yield b"second"

    sink.create("run/a", parts())
    assert sink.read("run/a") == b"firstsecond"
    assert _temps(tmp_path) == []
    assert LocalSink(tmp_path / "not" / "there").sweep() == 0


def test_head_lock_times_out_while_held_and_dies_with_its_holder(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path)
    sink.swap_head("run", None, b"old")
    code = """
import sys
from megasync.sinks.local import LocalSink
sink = LocalSink(sys.argv[1])
def hold(point):
    if point == "locked":
        print("held", flush=True)
        sys.stdin.read()
sink.reached = hold
sink.swap_head("run", b"old", b"never")
"""
    root = str(Path(__file__).resolve().parents[2])
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RetryError, match=r"another process holds the lock run\.lock"):
            sink.swap_head("run", b"old", b"new", timeout_s=0.05)
        assert sink.read_head("run") == b"old"
        sink.swap_head("another-run", None, b"x", timeout_s=1.0)
        holder.kill()
        holder.wait()
        sink.swap_head("run", b"old", b"new", timeout_s=5.0)
    assert sink.read_head("run") == b"new"


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path)
    reading, writing = os.pipe()
    children: list[int] = []

    def fork(point: str) -> None:
        if point == "locked":
            child = os.fork()
            if not child:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            children.append(child)

    sink.reached = fork
    sink.swap_head("run", None, b"one")
    sink.reached = lambda point: None
    sink.swap_head("run", b"one", b"two", timeout_s=1.0)
    os.close(writing)
    os.close(reading)
    os.waitpid(children[0], 0)
    assert sink.read_head("run") == b"two"


def test_case_22_symbolic_links_lead_nowhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (outside / "run.head").write_bytes(b"forged")
    directory = tmp_path / "sink"
    (directory / "run").mkdir(parents=True)
    (directory / "run" / "folder").symlink_to(outside)
    (directory / "run" / "object").symlink_to(outside / "secret")
    (directory / ".heads").symlink_to(outside)
    os.mkfifo(directory / "run" / "fifo")
    sink = LocalSink(directory)
    for key in ("run/folder/secret", "run/object"):
        for call in (
            lambda k: sink.read(k),
            lambda k: sink.read_into(k, 0, memoryview(bytearray(1))),
            lambda k: sink.size(k),
            lambda k: sink.create(k, [b"x"]),
            lambda k: sink.delete(k),
        ):
            with pytest.raises(FormatError, match="symbolic link"):
                call(key)
    with pytest.raises(FormatError, match="symbolic link"):
        sink.create("run/folder/new", [b"x"])
    with pytest.raises(FormatError, match="symbolic link"):
        sink.read_head("run")
    with pytest.raises(FormatError, match="symbolic link"):
        sink.swap_head("run", b"forged", b"x")
    with pytest.raises(FormatError, match="symbolic link"):
        list(sink.keys("run/folder"))
    with pytest.raises(KeyError):
        sink.read("run/fifo")
    assert list(sink.keys("")) == []
    assert sorted(p.name for p in outside.iterdir()) == ["run.head", "secret"]
    assert (outside / "secret").read_bytes() == b"secret"

    # The directory itself may be behind a link: that is the operator's choice.
    (tmp_path / "link").symlink_to(directory)
    LocalSink(tmp_path / "link").create("run/fine", [b"fine"])
    assert sink.read("run/fine") == b"fine"


def test_read_only_directory_serves_receivers() -> None:
    with tempfile.TemporaryDirectory(prefix="megasync-read-only-") as name:
        directory = Path(name)
        sink = LocalSink(directory)
        sink.create("run/v1/payload", [b"payload"])
        sink.swap_head("run", None, b"head")
        before = sorted(directory.rglob("*"))
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        printed = _python(
            """
import os, sys
from megasync.sinks.local import LocalSink
if os.getuid() == 0:
    os.setuid(65534)
sink = LocalSink(sys.argv[1])
out = bytearray(3)
sink.read_into("run/v1/payload", 3, memoryview(out))
print(sink.read("run/v1/payload"), bytes(out), sink.read_head("run"), list(sink.keys("run")), sink.read_head("other"))
for call in (
    lambda: sink.create("run/v1/other", [b"x"]),
    lambda: sink.create("new/v1/other", [b"x"]),
    lambda: sink.swap_head("run", b"head", b"new"),
    lambda: sink.delete("run/v1/payload"),
    lambda: sink.check_room(1),
):
    try:
        call()
        print("written")
    except ValueError as error:
        print("refused" if sys.argv[1] in str(error) else error)
""",
            name,
        )
        assert printed.splitlines() == [
            "b'payload' b'loa' b'head' ['run/v1/payload'] None",
            *["refused"] * 5,
        ]
        assert sorted(directory.rglob("*")) == before
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o755)


def test_case_66_room_is_checked_before_writing(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path / "made" / "later")
    sink.check_room(1)
    needed = 1 << 60
    with pytest.raises(MemoryPlanError, match=f"needs {needed} bytes.* has [0-9]+ bytes") as caught:
        sink.check_room(needed)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_a_full_disk_stores_nothing(tmp_path: Path) -> None:
    printed = _python(
        """
import os, resource, sys
from megasync.errors import RetryError
from megasync.sinks.local import LocalSink
sink = LocalSink(sys.argv[1])
sink.swap_head("run", None, b"head")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    sink.create("run/a", [b"x" * 60_000, b"y" * 60_000])
except RetryError as error:
    print("retry", "run/a" in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3))
try:
    sink.swap_head("run", b"head", b"new head")
except RetryError as error:
    print("retry", sink.read_head("run"))
print(list(sink.keys("")), sum(len(files) for _, _, files in os.walk(sys.argv[1])))
""",
        str(tmp_path),
    )
    assert printed.splitlines() == ["retry True", "retry b'head'", "[] 2"]


@pytest.mark.parametrize(
    "check",
    [check_create_and_read, check_exclusive_create, check_nothing_half_done, check_create_race],
    ids=lambda check: check.__name__,
)
def test_without_hard_links(check: Callable[[Place], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_link)
    check(Place(lambda: LocalSink(tmp_path)))
    assert _temps(tmp_path) == []


def test_creating_while_the_folder_is_deleted(tmp_path: Path) -> None:
    """Deleting removes empty folders; creators that stood in one go on in a new one."""
    failed: list[BaseException] = []

    def churn(name: str) -> None:
        sink = LocalSink(tmp_path)
        try:
            for number in range(60):
                sink.create(f"run/v/e/{name}", [b"%d" % number])
                assert sink.read(f"run/v/e/{name}") == b"%d" % number
                sink.delete(f"run/v/e/{name}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=churn, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert not (tmp_path / "run").exists()


def test_a_key_is_an_object_or_a_folder(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path / "sink")
    sink.create("run/a", [b"x"])
    with pytest.raises(ValueError, match="below the key of an object"):
        sink.create("run/a/b", [b"x"])
    with pytest.raises(ValueError, match="cannot be both"):
        sink.create("run", [b"x"])
    with pytest.raises(KeyError):
        sink.read("run/a/b")
    sink.delete("run/a/b")
    assert list(sink.keys("run/a")) == []
    assert _temps(tmp_path) == []
    (tmp_path / "file").write_bytes(b"not a directory")
    with pytest.raises(ValueError, match="no directory"):
        LocalSink(tmp_path / "file").create("run/a", [b"x"])


def test_objects_that_were_cut_are_not_read_as_whole(tmp_path: Path) -> None:
    """A conflict on the bytes of a damaged object, not success by its name."""
    sink = LocalSink(tmp_path)
    sink.create("run/a", [b"x" * 100])
    os.truncate(tmp_path / "run" / "a", 50)
    with pytest.raises(SinkConflictError, match="50 other bytes"):
        sink.create("run/a", [b"x" * 100])


def test_timeouts_hold_between_system_calls(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path)
    with pytest.raises(RetryError, match="not done within 0 s"):
        sink.create("run/a", [b"x"], timeout_s=0.0)
    assert list(sink.keys("")) == []
    assert _temps(tmp_path) == []

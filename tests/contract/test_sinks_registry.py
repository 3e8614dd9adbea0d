"""Opening a sink by URL."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megasync.errors import MissingPackageError
from megasync.sinks import open_sink
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.sinks.registry import known_schemes
from megasync.sinks.remote import RemoteSink


@dataclass
class _Config:
    url: str
    num_versions: int | None = None
    max_nbytes: int | None = None


def test_paths_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    odd = tmp_path / "a b%20#?é"
    for place, directory in (
        (tmp_path, tmp_path),
        (str(tmp_path), tmp_path),
        ("relative/place", tmp_path / "relative" / "place"),
        (tmp_path.as_uri(), tmp_path),
        ("file://localhost" + str(tmp_path), tmp_path),
        (odd.as_uri(), odd),
        ({"url": tmp_path.as_uri()}, tmp_path),
    ):
        sink = open_sink(place)
        assert isinstance(sink, LocalSink)
        assert sink.directory == str(directory)


def test_memory_with_options_from_query_mapping_and_dataclass() -> None:
    try:
        first = open_sink("memory://opened?num_versions=3&max_nbytes=1000")
        assert isinstance(first, MemorySink)
        assert (first.num_versions, first.max_nbytes) == (3, 1000)
        assert open_sink({"url": "memory://opened", "num_versions": 3}, max_nbytes="1000") is first
        assert open_sink(_Config("memory://opened", 3, 1000)) is first
    finally:
        MemorySink.forget("opened")


def test_served_by_another_process() -> None:
    sink = open_sink("pg://[2001:db8::7]:4321", secret="ab" * 32)
    assert isinstance(sink, RemoteSink)
    assert sink.addresses == [("2001:db8::7", 4321)]
    assert "ab" * 32 not in sink.describe()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "ftp://somewhere/else",
            r"no sink for scheme 'ftp'; known: a path, az://, file://, gs://, memory://, pg://, s3://",
        ),
        ("", "not an empty text"),
        ("file://relative/path", "three slashes"),
        ("memory://a/b", "without a path"),
        ("memory://a?num_versions=many", "num_versions must be a whole number, not 'many'"),
        ("memory://a?colour=red", "colour"),
        ("pg://host:1?secret=abcd", "would end up in logs"),
        ("s3://bucket/x?secret_access_key=abcd", "would end up in logs"),
        ("pg://host:1", "takes the option 'secret'"),
        (42, "not 42"),
        ({"path": "x"}, "with 'url'"),
    ],
)
def test_case_72_bad_places_are_refused_by_name(place: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_sink(place)


def test_a_secret_that_is_not_hexadecimal() -> None:
    with pytest.raises(ValueError, match="not hexadecimal") as caught:
        open_sink({"url": "pg://host:1", "secret": "hunter2!"})
    assert "hunter2" not in str(caught.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackageError, match=r"megasync\[s3\]"):
        open_sink("s3://bucket/prefix")


def test_entry_points_add_schemes_and_never_replace_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [importlib.metadata.EntryPoint("here", "megasync.sinks.memory:MemorySink", "megasync.sinks")]

    def entry_points(**wanted: str) -> importlib.metadata.EntryPoints:
        return importlib.metadata.EntryPoints(ours).select(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert "here" in known_schemes()
    assert isinstance(open_sink("here://name"), MemorySink)
    ours.append(importlib.metadata.EntryPoint("here", "elsewhere:Sink", "megasync.sinks"))
    with pytest.raises(ValueError, match=r"claimed by megasync\.sinks\.memory:MemorySink and by elsewhere:Sink"):
        open_sink("here://name")
    ours[:] = [importlib.metadata.EntryPoint("s3", "elsewhere:Sink", "megasync.sinks")]
    with pytest.raises(ValueError, match="'s3' is claimed by"):
        open_sink("s3://bucket")


def test_opening_a_directory_imports_no_other_sink() -> None:
    import subprocess

    root = str(Path(__file__).resolve().parents[2])
    code = "import sys; from megasync.sinks import open_sink; open_sink('.'); print(sorted(m for m in sys.modules if m.startswith(('megasync.sinks.', 'torch', 'numpy', 'obstore'))))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    names = ("base", "local", "local_files", "registry")
    assert printed.strip() == str([f"megasync.sinks.{name}" for name in names])

"""The sink of a job that is launched: refused before anything starts where no process could open it, or share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.check import main
from launch.checks import check
from launch.compose import compose


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://x", "sink.url=foo://x: no sink for scheme 'foo'; take a path, or one of az://, file://, gs://, s3://"),
        ("S4://bucket/x", "no sink for scheme 's4'"),
        ("a:b://c", "no sink for scheme 'a'"),
        ("://x", "no sink for scheme ''"),
        ("s3:/bucket", "sink.url=s3:/bucket is neither a URL nor a plain path"),
        ("file:relative", "neither a URL nor a plain path"),
        ("memory://x", "ends with the trainer's processes"),
        ("PG://host:1", "ends with the trainer's processes"),
    ],
)
def test_a_sink_that_no_process_could_open_is_refused(
    url: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"sink.url='{url}'", f"out={tmp_path / 'out'}"]
    with pytest.raises(ValueError, match="this configuration cannot run") as e:
        check(compose(overrides))
    assert words in str(e.value)
    assert main(overrides) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert words in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "url", ["/tmp/x", "x/y:z", "file:///tmp/x", "file:/tmp/x", "S3://bucket/x", "gs://b", "az://c/x"]
)
def test_what_may_work_is_taken(url: str) -> None:
    assert check(compose([f"sink.url='{url}'"])).sink.url == url

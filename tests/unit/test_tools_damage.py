"""``megasync inspect`` and ``verify`` on damaged runs: all that can be read is shown, what cannot is named, nobody is blamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megasync.digest import content_digest
from megasync.errors import RetryError
from megasync.manifest import Head, decode_head, manifest_key, payload_key
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.tools.cli import main
from megasync.tools.diff import diff
from megasync.tools.examine import examine, verify
from megasync.tools.survey import survey
from megasync.versions.head import claim, look, move_head
from megasync.versions.inventory import Objects, spans
from megasync.versions.publication import PublicationReader

NEWEST = 5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints ``v0`` to ``v5``."""
    place = tmp_path_factory.mktemp("checkpoints")
    for version in range(NEWEST + 1):
        (place / f"v{version}").mkdir()
        data = torch.arange(300.0)
        data[:version] += 1
        save_file({"w": data}, place / f"v{version}" / "model.safetensors")
    return place


@pytest.fixture
def sink(checkpoints: Path, tmp_path: Path) -> LocalSink:
    """Versions 0 to 5 of run ``run``; version v has epoch max(v, 1)."""
    sink = LocalSink(tmp_path / "s")
    for version in range(NEWEST):
        diff(checkpoints / f"v{version}", checkpoints / f"v{version + 1}", sink)
    return sink


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any]:
    status = main([*map(str, argv), "--json"])
    return status, json.loads(capsys.readouterr().out)


def both(capsys: pytest.CaptureFixture[str], sink: LocalSink) -> tuple[dict[str, Any], dict[str, Any]]:
    """What inspect and verify say of the only run; neither finds it whole, with JSON and without."""
    found = []
    for command in ("inspect", "verify"):
        status, said = run(capsys, command, sink.directory)
        assert status == 1
        (only,) = said["runs"]
        assert only["faults"]
        found.append(only)
        assert main([command, str(sink.directory)]) == 1
        text = capsys.readouterr().out
        assert all(f"    - {fault}\n" in text for fault in only["faults"])
    return found[0], found[1]


def manifest_of(version: int) -> str:
    return manifest_key("run", version, max(version, 1))


def replace(sink: LocalSink, key: str, change: Callable[[bytes], bytes]) -> bytes:
    """Put other bytes in an object's place."""
    data = change(sink.read(key))
    sink.delete(key)
    sink.create(key, [data])
    return data


def lose_head(sink: LocalSink) -> bytes:
    path = Path(sink.directory) / ".heads" / "run.head"
    raw = path.read_bytes()
    path.unlink()
    return raw


def claim_blindly(sink: LocalSink) -> None:
    """As a publisher did that did not look for versions before it claimed."""
    sink.swap_head("run", None, Head("run", -1, 0, b"", 1, b"publisher").encode())


def links(facts: dict[str, Any]) -> dict[int, str]:
    return {v["version"]: v["chain"] for v in facts["versions"]}


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_versions_in_words() -> None:
    assert spans([4]) == "version 4"
    assert spans([7, 1, 0, 2, 5, 4]) == "versions 0 to 2, 4 to 5, 7"
    assert str(Objects()) == "nothing"
    assert str(Objects([(1, 2), (1, 1)], 2, 1, 1)) == (
        "a manifest of version 1, 2 payloads, 1 schema, 1 table of state digests"
    )


@pytest.mark.parametrize("change", [flip, lambda d: d.replace(b"zstd", b"zstx"), lambda d: d[:-1], lambda d: b""])
def test_a_damaged_manifest_in_the_middle_hides_no_other_version(
    sink: LocalSink, capsys: pytest.CaptureFixture[str], change: Callable[[bytes], bytes]
) -> None:
    key = manifest_of(3)
    expected = content_digest(sink.read(key)).hex()
    found = content_digest(replace(sink, key, change)).hex()
    facts, report = both(capsys, sink)
    assert links(facts) == {0: "unreached", 1: "unreached", 2: "unreached", 4: "unchained", 5: "unchained"}
    assert (report["versions"], report["frames"]) == ([0, 1, 2, 4, 5], 4)
    assert (report["unchained"], report["unreached"], report["complete"]) == ([4, 5], [0, 1, 2], False)
    assert report["orphans"] == []  # what is damaged is no garbage
    for said in (facts, report):
        (fault,) = said["faults"]
        for words in (key, expected, found, "versions 4 to 5 cannot be chained"):
            assert words in fault
        assert said["unreadable"] == [3]
    assert facts["head"]["version"] == 5


def test_several_damaged_manifests_are_all_named(sink: LocalSink, capsys: pytest.CaptureFixture[str]) -> None:
    replace(sink, manifest_of(4), flip)
    sink.delete(manifest_of(1))
    facts, report = both(capsys, sink)
    assert links(facts) == {0: "unreached", 2: "unchained, unreached", 3: "unchained, unreached", 5: "unchained"}
    assert (report["versions"], report["unchained"], report["unreadable"]) == ([0, 2, 3, 5], [2, 3, 5], [1, 4])
    above, below = report["faults"]
    assert manifest_of(4) in above
    assert "version 5 cannot be chained" in above
    assert "starts from version 1" in below
    assert "versions 2 to 3 cannot be chained" in below


def test_a_damaged_newest_manifest_leaves_the_others_to_be_seen(
    sink: LocalSink, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = content_digest(sink.read(manifest_of(5))).hex()
    found = content_digest(replace(sink, manifest_of(5), flip)).hex()
    facts, report = both(capsys, sink)
    assert links(facts) == dict.fromkeys(range(5), "unreached")
    assert (report["versions"], report["unreadable"], report["unchained"]) == ([0, 1, 2, 3, 4], [5], [])
    for said in (facts, report):
        (fault,) = said["faults"]
        assert all(words in fault for words in (manifest_of(5), expected, found))


def test_of_several_epochs_of_a_version_the_newest_counts_and_none_above_the_head(
    sink: LocalSink, checkpoints: Path
) -> None:
    reader = PublicationReader(sink, "run")
    before = sink.read(manifest_of(4))
    garbage = reader.manifest(2, 2, None)
    sink.create(manifest_key("run", 2, 1), [garbage.encoded])  # says epoch 2: misplaced, and older than the true one
    sink.create(manifest_key("run", 6, 6), [b"not published yet"])
    assert verify(sink, "run").complete
    replace(sink, manifest_of(4), flip)
    found = survey(sink, "run")
    assert [(m.version, m.epoch) for m in found.manifests] == [(0, 1), (1, 1), (2, 2), (3, 3), (5, 5)]
    assert (found.unreadable, len(found.faults)) == ({4}, 1)
    replace(sink, manifest_of(4), lambda _: before)
    assert verify(sink, "run").complete


def test_a_state_that_the_frames_do_not_lead_to_is_found_beside_a_break(sink: LocalSink) -> None:
    """Below the break everything is followed as in a whole run."""
    replace(sink, manifest_of(4), flip)
    (key,) = sink.keys("run/state")
    replace(sink, key, flip)
    report = verify(sink, "run")
    assert len(report.faults) == 2
    assert "version 0: table of state digests of version 0 has other bytes" in report.faults[1]


def test_a_lost_head_is_named_and_its_versions_are_shown(
    sink: LocalSink, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = lose_head(sink)
    before = sorted(sink.keys(""))
    facts, report = both(capsys, sink)
    assert facts["head"] is None
    assert links(facts) == dict.fromkeys(range(6), "unreached")
    assert facts["objects"] == {"manifests": 6, "payloads": 5, "schemas": 1, "state_tables": 1}
    assert (report["versions"], report["unchained"], report["frames"]) == ([0, 1, 2, 3, 4, 5], [], 5)
    for said in (facts, report):
        (fault,) = said["faults"]
        assert "the head of run 'run' is missing from local sink" in fault
        assert "manifests of versions 0 to 5" in fault
    status, said = run(capsys, "verify", sink.directory, "--run", "run")
    assert (status, said["runs"][0]["versions"]) == (1, [0, 1, 2, 3, 4, 5])
    for command in (
        ("diff", checkpoints / "v5", checkpoints / "v4"),
        ("apply", checkpoints / "v0", "--out", tmp_path / "o"),
    ):
        status, said = run(capsys, *command, "--sink", sink.directory)
        assert (status, said["error"]) == (1, "RetryError")
        assert "another publisher" not in said["message"]
        assert "Put the head back from a copy of the sink" in said["message"]
    assert (sorted(sink.keys("")), sink.heads(), (tmp_path / "o").exists()) == (before, [], False)
    sink.swap_head("run", None, raw)
    assert verify(sink, "run").complete
    assert diff(checkpoints / "v5", checkpoints / "v4", sink).version == 6


def test_a_head_that_cannot_be_read_hides_no_version(sink: LocalSink, capsys: pytest.CaptureFixture[str]) -> None:
    raw = lose_head(sink)
    sink.swap_head("run", None, raw[:-3])
    facts, report = both(capsys, sink)
    assert (facts["head"], sorted(links(facts)), report["versions"]) == (None, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert facts["faults"][0].startswith("the head of run 'run' cannot be read: ")


def test_a_run_that_was_claimed_anew_after_its_head_was_lost(
    sink: LocalSink, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_head(sink)
    claim_blindly(sink)
    facts, report = both(capsys, sink)
    assert (facts["head"]["version"], facts["head"]["fence"]) == (-1, 1)
    assert (sorted(links(facts)), report["versions"]) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert "its head names no version, though manifests of versions 0 to 5" in facts["faults"][0]


def test_a_run_of_which_manifest_and_head_are_gone(sink: LocalSink, capsys: pytest.CaptureFixture[str]) -> None:
    lose_head(sink)
    for key in list(sink.keys("")):
        if "payload" not in key:
            sink.delete(key)
    facts, report = both(capsys, sink)
    assert facts["objects"] == {"manifests": 0, "payloads": 5, "schemas": 0, "state_tables": 0}
    assert (facts["versions"], report["versions"], report["frames"]) == ([], [], 0)
    for said in (facts, report):
        assert "has neither a head nor a manifest" in said["faults"][0]
        assert "only 5 payloads, which nothing names" in said["faults"][0]


def test_parts_that_a_new_run_would_meet_are_not_blamed_on_a_publisher(sink: LocalSink, checkpoints: Path) -> None:
    lose_head(sink)
    for key in list(sink.keys("")):
        if "payload" not in key:
            sink.delete(key)
    with pytest.raises(RetryError, match="or delete the rest, or go on under another run name"):
        diff(checkpoints / "v0", checkpoints / "v2", sink)
    assert sink.heads() == []


def test_a_run_of_which_only_the_schema_is_left(
    sink: LocalSink, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_head(sink)
    for key in list(sink.keys("")):
        if "schema" not in key:
            sink.delete(key)
    facts, _ = both(capsys, sink)
    assert "only 1 schema, which nothing names" in facts["faults"][0]
    # Nothing of it is in a new run's way.
    assert diff(checkpoints / "v0", checkpoints / "v1", sink).version == 1
    assert verify(sink, "run").complete


def test_a_schema_that_is_gone_is_told_once(sink: LocalSink, capsys: pytest.CaptureFixture[str]) -> None:
    (key,) = sink.keys("run/schema")
    sink.delete(key)
    facts, report = both(capsys, sink)
    assert (facts["versions"], facts["unreadable"], report["unreadable"]) == (
        [],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    )
    for said in (facts, report):
        (fault,) = said["faults"]
        assert key in fault
    assert facts["objects"]["manifests"] == 6


def test_runs_with_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("inspect", "verify"):
        for place in ("empty", "none"):
            for more in ((), ("--run", "r")):
                status, said = run(capsys, command, tmp_path / place, *more)
                assert (status, "holds no run" in said["message"]) == (2, True)
    assert not (tmp_path / "none").exists()
    claimed = LocalSink(tmp_path / "claimed")
    claim(claimed, "r")
    status, said = run(capsys, "inspect", tmp_path / "claimed", "--run", "r")
    (facts,) = said["runs"]
    assert (status, facts["head"]["version"], facts["head"]["fence"], facts["faults"]) == (0, -1, 1, [])
    assert facts["objects"] == {"manifests": 0, "payloads": 0, "schemas": 0, "state_tables": 0}
    status, said = run(capsys, "verify", tmp_path / "claimed", "--run", "r")
    assert status == 1
    assert "was claimed and has no version yet (there: nothing)" in said["runs"][0]["faults"][0]
    assert "nothing lies there" in verify(MemorySink(), "r").faults[0]


def test_a_publisher_that_began_while_a_run_was_looked_at_lost_no_head(sink: LocalSink) -> None:
    """The head is asked again after everything was listed."""

    class Late(LocalSink):
        asked = 0

        def read_head(self, *arguments: Any, **more: Any) -> bytes | None:
            self.asked += 1
            return None if self.asked == 1 else super().read_head(*arguments, **more)

    for found in (examine(Late(sink.directory), "run"), vars(verify(Late(sink.directory), "run"))):
        assert found["faults"] == []


@pytest.mark.parametrize(("more", "words"), [(b"junk", "bytes were put after its end"), (None, "it was cut")])
def test_a_payload_of_another_length_is_a_fault(
    sink: LocalSink, capsys: pytest.CaptureFixture[str], more: bytes | None, words: str
) -> None:
    key = payload_key("run", 2, 2, 0)
    nbytes = sink.size(key)
    found = len(replace(sink, key, lambda d: d[:-1] if more is None else d + more))
    status, said = run(capsys, "verify", sink.directory)
    (report,) = said["runs"]
    assert (status, said["good"], report["complete"]) == (1, False, False)
    assert f"version 2: payload {key} has {found} bytes, its manifest says {nbytes}: {words}" in report["faults"][0]
    assert len(report["faults"]) == 1  # not one for each frame that was cut, too
    assert report["versions"] == [0, 1, 2, 3, 4, 5]


def test_the_sizes_of_anchors_are_compared_and_their_sums_beside_other_faults(tmp_path: Path) -> None:
    from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec

    specs = [spec("layers.0.w", "F32", (70, 9)), spec("layers.1.w", "BF16", (33,))]
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    words = random_words(specs)
    publisher.anchor(words)
    publisher.delta(changed(words, 0.1))
    sink = publisher.sink
    assert verify(sink, "run").complete
    for key in [k for k in sink.keys("run") if "payload" in k]:
        data = sink.read(key)
        sink.delete(key)
        sink.create(key, [data + b"\0"])
    report = verify(sink, "run")
    assert [fault.split(":")[0] for fault in report.faults] == ["version 0", "version 1"]
    assert not report.complete


def test_a_head_that_was_put_back_from_an_old_copy_shows_what_it_leads_to(sink: LocalSink, checkpoints: Path) -> None:
    """Later versions lie there and are nobody's: told as orphans, not as versions."""
    raw = lose_head(sink)
    at = decode_head(raw, "run")
    old = PublicationReader(sink, "run").manifest(2, 2, None)
    claim_blindly(sink)
    move_head(sink, look(sink, "run").head, old)
    report = verify(sink, "run")
    assert (at.version, report.versions, report.complete) == (5, [0, 1, 2], True)
    assert manifest_of(5) in report.orphans

"""When an engine needs attention: resume() that fails, weights that were swapped, an audit that fails; and what passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.config import ApplyConfig
from megasync.errors import (
    BaseMismatchError,
    LiveMismatchError,
    MegasyncError,
    RetryError,
    TaintedError,
    UndoneError,
)
from megasync.receiver.applier import Applier
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import BrokenBackend, plain_engine
from tests.unit.test_applier_failures import World
from tests.unit.test_applier_follow import Script

SPECS = [spec("0.weight", "F32", (40, 30)), spec("0.bias", "F32", (40,))]


def fail(version: int) -> None:
    raise RuntimeError(f"cannot serve {version}")


@pytest.mark.parametrize("root", ["checkpoint", "anchor"])
@pytest.mark.parametrize("streamed", [False, True])
def test_resume_that_fails_after_a_proof_leaves_the_new_version_held_and_says_so(
    tmp_path: Path, root: str, streamed: bool
) -> None:
    world = World(tmp_path / "s", root=root)
    if streamed:  # an anchor that is too large to be staged is written as it comes
        world.publisher.anchor(world.new, version=2)
        world.applier._session.config = ApplyConfig(workers=1, staged_limit_nbytes=1)  # type: ignore[union-attr]
        world.applier._route = lambda reader, held, wanted: [] if held.version == 2 else [wanted]
    newest = world.publisher.newest
    assert newest is not None
    world.engine.on_resume = fail
    with pytest.raises(RuntimeError, match=f"cannot serve {newest.version}"):
        world.applier.update()
    assert world.holds(world.new)
    assert (world.applier.version, world.applier.ready) == (newest.version, False)
    told = world.on_disk()
    assert (told["state"], told["version"], told["manifest"]) == ("behind", newest.version, newest.digest.hex())
    assert f"version {newest.version} is live and proven, but resume() failed (cannot serve" in str(told["reason"])
    # The engine is asked again before anything else, until it goes on.
    with pytest.raises(RuntimeError, match="cannot serve"):
        world.applier.update()
    assert not world.applier.ready
    world.engine.on_resume = lambda version: None
    assert world.applier.update().versions == ()
    assert (world.applier.ready, world.on_disk()["state"], world.on_disk()["reason"]) == (True, "serving", "")
    assert world.engine.events == ["pause", *[("resume", newest.version)] * 3]


def test_resume_that_fails_after_a_rollback_says_so(tmp_path: Path) -> None:
    world = World(tmp_path / "s")
    world.applier.update()
    world.engine.on_resume = fail
    with pytest.raises(RuntimeError, match="cannot serve 0"):
        world.applier.rollback()
    assert world.holds(world.old)
    assert (world.on_disk()["state"], world.on_disk()["version"]) == ("behind", 0)


def test_resume_that_fails_after_an_undo_says_so(tmp_path: Path) -> None:
    world = World(tmp_path / "s", backend=lambda b: BrokenBackend(b, write_fails_after=1))
    world.engine.on_resume = fail
    with pytest.raises(UndoneError, match=r"was undone.*It stands still: resume\(\) failed \(cannot serve 0\)"):
        world.applier.update()
    assert world.holds(world.old)
    assert (world.on_disk()["state"], world.on_disk()["version"], world.applier.ready) == ("behind", 0, False)


def test_resume_that_fails_after_a_pause_that_failed_says_so(tmp_path: Path) -> None:
    world = World(tmp_path / "s")

    def never() -> None:
        raise RetryError("a request does not end")

    world.engine.on_pause, world.engine.on_resume = never, fail
    with pytest.raises(RetryError, match="does not end"):
        world.applier.update()
    assert (world.on_disk()["state"], world.on_disk()["version"], world.applier.ready) == ("behind", 0, False)
    world.engine.on_pause, world.engine.on_resume = lambda: None, lambda version: None
    assert world.applier.update().versions == (1,)
    assert world.applier.ready
    assert world.holds(world.new)


def test_join_wakes_an_engine_that_stands_still() -> None:
    world = World()
    world.engine.on_resume = fail
    with pytest.raises(RuntimeError, match="cannot serve 1"):
        world.applier.update()
    with pytest.raises(RuntimeError, match="cannot serve 1"):
        world.applier.join()
    assert not world.applier.ready
    world.engine.on_resume = lambda version: None
    assert world.applier.join().version == 1
    assert world.applier.ready


def test_a_pause_that_times_out_before_a_streamed_anchor_taints_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "s", root="anchor")
    newest = world.publisher.anchor(world.new, version=2)
    world.applier._session.config = ApplyConfig(workers=1, staged_limit_nbytes=1)  # type: ignore[union-attr]
    world.applier._route = lambda reader, held, wanted: [] if held.version == 2 else [wanted]

    def never() -> None:
        raise TimeoutError("a request does not end")

    world.engine.on_pause = never
    with pytest.raises(RetryError, match="did not pause for version 2"):
        world.applier.update()
    assert (world.on_disk()["state"], world.on_disk()["version"]) == ("serving", 0)
    world.engine.on_pause = lambda: None
    key = newest.payload_key(0)
    payload = world.publisher.sink.read(key)
    world.publisher.sink.delete(key)
    with pytest.raises(RetryError, match="nothing was touched"):
        world.applier.update()
    assert (world.on_disk()["state"], world.applier.version, world.holds(world.old)) == ("serving", 0, True)
    world.publisher.sink.create(key, [payload])
    assert world.applier.update().versions == (2,)
    assert world.holds(world.new)


class ModuleWorld:
    """A torch module at version 0 of a run."""

    def __init__(self, path: Path | None = None, pause_timeout_s: float = 5.0) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(30, 40))
        self.publisher = Publisher(MemorySink(), make_schema("run", SPECS))
        words = random_words(SPECS)
        self.publisher.checkpoint(words)
        self.net.load_state_dict(
            {n: torch.from_numpy(w.view("f4").copy()) for n, w in words.items()}  # the words of F32 tensors
        )
        self.engine = TorchModuleEngine(self.net, pause_timeout_s=pause_timeout_s)
        self.applier = Applier(self.engine, self.publisher.sink, ApplyConfig(workers=1), status_path=path)
        self.applier.join()

    def served(self) -> int:
        with self.engine.serving() as version:
            return version


def replace_weight(w: ModuleWorld) -> None:
    w.net[0].weight = torch.nn.Parameter(w.net[0].weight.detach().clone())


def cast(w: ModuleWorld) -> None:
    w.net.double()


def write(w: ModuleWorld) -> None:
    with torch.no_grad():
        w.net[0].weight[0, 0] += 1


@pytest.mark.parametrize(
    ("change", "words"),
    [(replace_weight, "not where they were bound.*0.weight"), (cast, "not where they were bound"), (write, "0.weight")],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_failed_audit_takes_the_version_away_from_the_engine(
    change: Callable[[ModuleWorld], None], words: str, tmp_path: Path
) -> None:
    world = ModuleWorld(tmp_path / "s")
    assert (world.served(), world.applier.ready) == (0, True)
    change(world)
    with pytest.raises(BaseMismatchError, match=words):
        world.applier.audit()
    assert (world.served(), world.applier.version, world.applier.ready) == (-1, -1, False)
    told = json.loads((tmp_path / "s").read_text())
    assert told["state"] == "behind"
    assert told["reason"].startswith("audit: ")
    with pytest.raises(BaseMismatchError, match="join again"):
        world.applier.update()


def test_an_empty_version_is_not_held_by_weights_that_were_swapped() -> None:
    world = ModuleWorld()
    replace_weight(world)
    world.publisher.delta(world.publisher.words)
    with pytest.raises(BaseMismatchError, match="not where they were bound"):
        world.applier.update()
    assert (world.served(), world.applier.version, world.applier.ready) == (-1, -1, False)


@pytest.mark.parametrize("change", [replace_weight, cast])
@pytest.mark.parametrize("back", [False, True])
def test_an_update_or_rollback_that_finds_weights_replaced_asks_to_join_again(
    change: Callable[[ModuleWorld], None], back: bool, tmp_path: Path
) -> None:
    """What the engine reads now was never looked at: it may not be called ready, whatever is in it."""
    world = ModuleWorld(tmp_path / "s")
    world.publisher.delta(changed(world.publisher.words, 0.1))
    world.applier.update()
    change(world)
    world.publisher.delta(changed(world.publisher.words, 0.1, seed=2))
    with pytest.raises(LiveMismatchError, match=r"not where they were bound .*join again"):
        (world.applier.rollback if back else world.applier.update)()
    assert (world.served(), world.applier.version, world.applier.ready) == (-1, -1, False)
    told = json.loads((tmp_path / "s").read_text())
    assert told["state"] == "behind"
    assert "not where they were bound" in told["reason"]
    assert world.applier._session is not None
    assert world.applier._session.last is None, "nothing of a version that is not held is kept"
    with pytest.raises(BaseMismatchError, match=r"holds no version .*join again"):
        world.applier.update()
    if change is replace_weight:
        world.applier.join()
        assert world.applier.update().versions == (2,)
        assert (world.served(), world.applier.ready) == (2, True)


def test_an_engine_that_put_its_weights_to_sleep_elsewhere_says_so_itself() -> None:
    """While it says so nothing is doubted: the weights may be back in their place when it wakes."""
    world = ModuleWorld()
    world.publisher.delta(changed(world.publisher.words, 0.1))
    awake = world.net[0].weight.data

    def asleep() -> None:
        raise BaseMismatchError("weights are asleep: wake them first")

    world.net[0].weight.data = awake.clone()
    world.engine.check_ready = asleep  # type: ignore[method-assign]
    with pytest.raises(BaseMismatchError, match="asleep"):
        world.applier.update()
    assert (world.applier.version, world.applier.ready) == (0, True)
    world.net[0].weight.data = awake
    del world.engine.check_ready
    assert world.applier.update().versions == (1,)


def test_a_join_that_finds_no_version_takes_the_old_one_away() -> None:
    world = ModuleWorld()
    write(world)
    with pytest.raises(BaseMismatchError, match="reloaded=True"):
        world.applier.join()
    assert world.served() == -1


def test_follow_outlasts_forward_passes_and_a_payload_that_comes_back() -> None:
    world = ModuleWorld(pause_timeout_s=0.05)
    sink = world.publisher.sink
    problems: list[MegasyncError] = []
    kept: list[tuple[str, bytes]] = []
    passes = world.engine.serving()

    def publish() -> str:
        return world.publisher.delta(changed(world.publisher.words, 0.1)).payload_key(0)

    def begin() -> None:
        publish()
        passes.__enter__()

    def lose() -> None:
        passes.__exit__(None, None, None)
        key = publish()
        kept.append((key, sink.read(key)))
        sink.delete(key)

    def restore() -> None:
        sink.create(kept[0][0], [kept[0][1]])

    done: list[int] = []
    script = Script(begin, lose, restore, lambda: None)
    world.applier.follow(
        script.stop,
        poll_s=0.5,
        wait=script.wait,
        on_problem=problems.append,
        on_update=lambda r: done.append(r.version),
    )
    assert [type(p) for p in problems] == [RetryError, RetryError]
    assert "forward passes did not end" in str(problems[0])
    assert "though its manifest is" in str(problems[1])
    assert done == [2]
    assert world.served() == 2


def test_a_manifest_that_the_head_names_and_that_is_missing_is_tried_again() -> None:
    world = ModuleWorld()
    newest = world.publisher.delta(changed(world.publisher.words, 0.1))
    (key,) = [k for k in world.publisher.sink.keys("run/v000000000001") if k.endswith("manifest")]
    raw = world.publisher.sink.read(key)
    world.publisher.sink.delete(key)
    with pytest.raises(RetryError, match=r"manifest of version 1 .*though the head names it"):
        world.applier.update()
    world.publisher.sink.create(key, [raw])
    assert world.applier.update().version == newest.version


def test_update_inside_serving_is_an_error_of_megasync_that_names_it() -> None:
    world = ModuleWorld(pause_timeout_s=0.05)
    world.publisher.delta(changed(world.publisher.words, 0.1))
    with world.engine.serving(), pytest.raises(RetryError, match=r"do not update inside serving\(\)"):
        world.applier.update()
    assert world.applier.update().versions == (1,)


@pytest.mark.parametrize("version", ["x", 2.5, True, b"1"])
def test_versions_that_are_no_integers_are_refused(version: object) -> None:
    world = ModuleWorld()
    for call in (world.applier.update, world.applier.stage):
        with pytest.raises(TypeError, match="expected an integer"):
            call(version)  # type: ignore[arg-type]


def test_wrong_arguments_of_an_applier_are_named(tmp_path: Path) -> None:
    engine, sink = plain_engine({}), MemorySink()
    for arguments, words in (
        ((torch.nn.Linear(1, 1), sink), r"wrap it in one, TorchModuleEngine\(module\)"),
        ((engine, str(tmp_path)), r"got str for its sink: use open_sink"),
        ((engine, sink, {"run": "a"}), r"config is .*expected ApplyConfig"),
    ):
        with pytest.raises(TypeError, match=words):
            Applier(*arguments)  # type: ignore[arg-type]
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "no" / "file", "there is no directory .*no")):
        with pytest.raises(ValueError, match=words):
            Applier(engine, sink, status_path=path)
    named = Applier(engine, LocalSink(tmp_path / "sink"), status_path=str(tmp_path / "status"))
    assert named.status.state == "new"


def test_tainted_engines_stay_tainted() -> None:
    world = World(backend=lambda b: BrokenBackend(b, write_fails_after=1, undo_fails=True))
    world.engine.on_resume = fail
    with pytest.raises(TaintedError):
        world.applier.update()
    assert world.applier.status.state == "tainted"
    with pytest.raises(TaintedError, match="replace the replica"):
        world.applier.update()

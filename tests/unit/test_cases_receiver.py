"""Cases that users of such systems reported, receiving side: what an engine, its caches and its callers may rely on."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import megasync
from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, PlanError, UndoneError
from megasync.layout.modes import Layout
from megasync.receiver.applier import Applier
from megasync.receiver.engine import Engine
from megasync.schema import Schema
from megasync.sinks.memory import MemorySink
from megasync.versions import publication
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import BrokenBackend, PlainEngine, identity, live, plain_engine, words_of

SPECS = [spec("embed", "BF16", (50, 16)), spec("layers.0.w", "U8", (40, 30)), spec("layers.1.s", "F32", (7,))]
Words = Mapping[str, np.ndarray]


class Run:
    """A run whose version 0 is a checkpoint; the words of every version."""

    def __init__(self, num: int = 0, sink: MemorySink | None = None) -> None:
        self.sink = sink or MemorySink()
        self.publisher = Publisher(self.sink, make_schema("run", SPECS), frame_changed=30)
        self.words: list[dict[str, np.ndarray]] = [random_words(SPECS)]
        self.publisher.checkpoint(self.words[0])
        for _ in range(num):
            self.step()

    def step(self, density: float = 0.05) -> None:
        self.words.append(changed(self.words[-1], density, seed=len(self.words)))
        self.publisher.delta(self.words[-1])

    def join(self, words: Words, **more: object) -> tuple[Applier, PlainEngine]:
        engine = plain_engine(words)
        applier = Applier(engine, self.sink, ApplyConfig(workers=1), **more)  # type: ignore[arg-type]
        applier.join()
        return applier, engine


def require_words(engine: PlainEngine, words: Words) -> None:
    for n, w in words.items():
        np.testing.assert_array_equal(words_of(engine.live[n]), w, err_msg=n)


class OnceBroken(BrokenBackend):
    """The first write fails half way, later ones work."""

    def write_(self, placed, pool):  # type: ignore[no-untyped-def]
        try:
            return super().write_(placed, pool)
        finally:
            self.write_fails_after = None


def test_case_1_an_engine_that_failed_says_so_and_its_base_is_not_advanced() -> None:
    run = Run(1)
    good, one = run.join(run.words[0])
    bad, other = run.join(run.words[0], backend=lambda b: OnceBroken(b, write_fails_after=1))
    good.update()
    with pytest.raises(UndoneError, match="version 1 failed after the first write"):
        bad.update()
    assert (good.version, bad.version) == (1, 0)
    assert bad.status.version == 0
    run.step()  # the publisher goes on from its own durable version, whatever an engine did
    assert run.publisher.newest is not None
    assert (run.publisher.newest.version, run.publisher.newest.base_version) == (2, 1)
    assert good.update().versions == (2,)
    assert bad.update().versions == (1, 2)
    for engine in (one, other):
        require_words(engine, run.words[2])


class CountingSink(MemorySink):
    """Counts keys and bytes that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_keys: list[str] = []

    def read(self, key, **more):  # type: ignore[no-untyped-def]
        self.read_keys.append(key)
        return super().read(key, **more)

    def read_into(self, key, offset, out, **more):  # type: ignore[no-untyped-def]
        self.read_keys.append(key)
        return super().read_into(key, offset, out, **more)


def test_case_18_a_step_costs_one_delta_however_far_the_anchor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_MANIFESTS_KEPT", 4)  # what is read again must not be hidden by a cache
    run = Run(sink=CountingSink())
    assert isinstance(run.sink, CountingSink)
    applier, engine = run.join(run.words[0])
    costs = []
    for v in range(1, 31):
        run.step()
        run.sink.read_keys.clear()
        result = applier.update()
        assert result.versions == (v,)
        assert result.fetched_nbytes <= run.publisher.newest.payload_total_nbytes  # type: ignore[union-attr]
        assert {k.split("/")[1] for k in run.sink.read_keys} == {f"v{v:012d}"}
        costs.append(len(run.sink.read_keys))
    assert max(costs) <= min(costs) + 1  # ranges of frames; no manifest and no payload of another version
    require_words(engine, run.words[30])


def test_case_26_engines_come_and_go_between_two_versions() -> None:
    run = Run(2)
    first, one = run.join(run.words[0])
    first.update()
    first.close()  # an engine leaves; nothing of it is left behind that the next version could trip over
    run.step()
    # A new engine loads the checkpoint it has, another one was copied from a peer at version 2.
    late, two = run.join(run.words[0])
    peer, three = run.join(run.words[2])
    assert (late.version, peer.version) == (0, 2)
    assert late.update().versions == (1, 2, 3)
    assert peer.update().versions == (3,)
    require_words(two, run.words[3])
    require_words(three, run.words[3])
    require_words(one, run.words[2])


class CachingEngine(PlainEngine):
    """Answers from a cache, as engines answer prompts from their key-value cache; flushes it before it resumes."""

    def __init__(self, live_tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(live_tensors)
        self.cache: dict[str, float] = {}
        self.flushes: list[int] = []
        self.flush_fails = False

    def answer(self, prompt: str) -> float:
        if prompt not in self.cache:
            self.cache[prompt] = float(self.live["layers.1.s"].view(torch.float32).double().sum()) + len(prompt)
        return self.cache[prompt]

    def resume(self, version: int) -> None:
        if self.flush_fails:
            raise RuntimeError("live nodes in the prefix cache")
        self.cache.clear()
        self.flushes.append(version)
        super().resume(version)


def caching(run: Run, words: Words, path: Path | None = None) -> tuple[Applier, CachingEngine]:
    engine = CachingEngine({n: live(w) for n, w in words.items()})
    applier = Applier(engine, run.sink, ApplyConfig(workers=1), status_path=path)
    return applier, engine


def test_case_29_caches_of_old_weights_are_gone_before_the_first_token() -> None:
    run = Run(1)
    applier, engine = caching(run, run.words[0])
    applier.join()
    old = engine.answer("hello")
    applier.update()
    cold, other = caching(run, run.words[1])
    cold.join()
    assert engine.answer("hello") == other.answer("hello") != old
    assert engine.flushes == [1]
    # Undone updates run on old weights again, and their caches are flushed as well.
    applier._session.backend = BrokenBackend(applier._session.binding, write_fails_after=1)  # type: ignore[union-attr]
    run.step()
    with pytest.raises(UndoneError):
        applier.update()
    assert engine.flushes == [1, 1]
    assert engine.answer("hello") == other.answer("hello")


def test_case_29_a_generation_keeps_its_weights_until_its_last_token() -> None:
    """Its key-value cache is made by the weights that read it: an update waits for the running generation."""
    net = torch.nn.Linear(6, 6, bias=False)
    words = {"weight": net.weight.detach().numpy().view(np.uint32).copy()}
    publisher = Publisher(MemorySink(), make_schema("run", [spec("weight", "F32", (6, 6))]))
    publisher.checkpoint(words)
    engine = megasync.TorchModuleEngine(net)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    publisher.delta(changed(words, 0.9))
    started, paused, resumed = threading.Event(), threading.Event(), threading.Event()
    tokens: list[torch.Tensor] = []

    def generate() -> None:
        x = torch.ones(6)
        with engine.serving() as version, torch.no_grad():
            for _ in range(4):
                x = net(x) / 4
                tokens.append(x)
                started.set()
                paused.wait(10)
                if len(tokens) == 1:
                    resumed.wait(0.3)  # the update may not get that far before the last token
            assert version == 0

    wait_for_turn = engine.pause

    def pause() -> None:
        paused.set()  # the update has come this far while the first token was made
        wait_for_turn()

    go_on = engine.resume

    def resume(version: int) -> None:
        go_on(version)
        resumed.set()

    engine.pause, engine.resume = pause, resume  # type: ignore[method-assign]
    generating = threading.Thread(target=generate)
    generating.start()
    assert started.wait(10)
    old = net.weight.detach().clone()
    applier.update()
    generating.join(10)
    expected = torch.ones(6)
    for token in tokens:
        expected = torch.nn.functional.linear(expected, old) / 4
        assert torch.equal(token, expected)
    assert len(tokens) == 4
    assert not torch.equal(net.weight, old)


def test_case_30_a_flush_that_fails_leaves_whole_weights_and_an_engine_that_takes_no_traffic(tmp_path: Path) -> None:
    run = Run(1)
    applier, engine = caching(run, run.words[0], tmp_path / "s")
    applier.join()
    engine.answer("hello")
    engine.flush_fails = True
    with pytest.raises(RuntimeError, match="live nodes"):
        applier.update()
    assert not applier.ready
    require_words(engine, run.words[1])  # proven before the flush: not torn, not undone half way
    # The status says which version is live, and why it takes no traffic; a new engine process has no cache to flush.
    assert (applier.status.state, applier.status.version, applier.version) == ("behind", 1, 1)
    assert "version 1 is live and proven, but resume() failed (live nodes" in applier.status.reason
    again, _ = caching(run, run.words[1], tmp_path / "s")
    assert not again.ready
    assert again.join().version == 1
    # In this one the next update tries the flush again before anything else.
    run.step()
    with pytest.raises(RuntimeError, match="live nodes"):
        applier.update()
    require_words(engine, run.words[1])
    engine.flush_fails = False
    assert applier.update().versions == (2,)
    assert applier.ready
    assert engine.flushes == [1, 2]
    require_words(engine, run.words[2])


def test_case_31_no_token_is_made_between_the_first_write_and_the_proof() -> None:
    """A generating thread asks for its turn while an update is being written, fails and is undone."""
    net = torch.nn.Linear(6, 4, bias=False)
    specs = [spec("weight", "F32", (4, 6))]
    words = {"weight": net.weight.detach().numpy().view(np.uint32).copy()}
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    engine = megasync.TorchModuleEngine(net)
    writing, seen = threading.Event(), []

    class Slow(BrokenBackend):
        def write_(self, placed, pool):  # type: ignore[no-untyped-def]
            for p in placed:
                p.xor_()
            writing.set()
            asking.join(0.2)  # it may not get its turn now
            assert not seen
            raise OSError("the write failed")

    def ask() -> None:
        writing.wait(10)
        with engine.serving() as version:
            seen.append((version, net.weight.detach().clone()))

    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1), backend=lambda b: Slow(b))
    applier.join()
    publisher.delta(changed(words, 0.5))
    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(UndoneError, match="the write failed"):
        applier.update()
    asking.join(10)
    ((version, weight),) = seen
    assert version == 0
    np.testing.assert_array_equal(weight.numpy().view(np.uint32), words["weight"])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.proj = torch.nn.Linear(8, 8, bias=False)


def published(net: torch.nn.Module) -> tuple[Publisher, dict[str, np.ndarray]]:
    words = {n: t.detach().numpy().view(np.uint32).copy() for n, t in net.state_dict().items()}
    publisher = Publisher(MemorySink(), make_schema("run", [spec(n, "F32", w.shape) for n, w in words.items()]))
    publisher.checkpoint(words)
    return publisher, words


def test_case_77_adapters_beside_the_weights_are_said_by_name_and_never_touched() -> None:
    net = Net()
    publisher, words = published(net)
    net.proj.register_parameter("lora_a", torch.nn.Parameter(torch.randn(2, 8)))
    net.proj.register_parameter("lora_b", torch.nn.Parameter(torch.randn(8, 2)))
    with pytest.raises(PlanError, match="no tensor of the run reaches") as e:
        Applier(megasync.TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1)).join()
    assert "proj.lora_a, proj.lora_b" in str(e.value)
    before = {n: (t.data_ptr(), t.detach().clone()) for n, t in net.named_parameters() if "lora" in n}
    applier = Applier(megasync.TorchModuleEngine(net, local=[r".*\.lora_[ab]"]), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    for v in range(1, 6):
        words = changed(words, 0.3, seed=v)
        publisher.delta(words)
        applier.update()
    np.testing.assert_array_equal(net.proj.weight.detach().numpy().view(np.uint32), words["proj.weight"])
    assert sorted(n for n, _ in net.named_parameters()) == ["proj.lora_a", "proj.lora_b", "proj.weight"]
    for n, (address, value) in before.items():
        now = dict(net.named_parameters())[n]
        assert now.data_ptr() == address
        assert torch.equal(now, value)


def test_case_77_weights_with_a_merged_adapter_are_no_base() -> None:
    net = Net()
    publisher, words = published(net)
    applier = Applier(megasync.TorchModuleEngine(net), publisher.sink, ApplyConfig(workers=1))
    applier.join()
    publisher.delta(changed(words, 0.5))
    merged = torch.randn(8, 2) @ torch.randn(2, 8)
    with torch.no_grad():
        kept = net.proj.weight.clone()
        net.proj.weight += merged
    before = net.proj.weight.detach().clone()
    with pytest.raises(BaseMismatchError, match=r"live words of proj\.weight are not those of version 0"):
        applier.update()
    assert torch.equal(net.proj.weight, before)
    with torch.no_grad():
        net.proj.weight.copy_(kept)  # the adapter is taken off again
    assert not applier.ready
    applier.join()
    assert applier.update().version == 1


class OwnEngine(Engine):
    """What a third party writes: two methods, nothing of an existing adapter."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held = tensors

    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        return {t.name: identity(t) for t in schema.tensors}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.held


def test_case_78_the_public_calls_keep_their_shape_and_need_no_known_engine() -> None:
    shapes = {
        "__init__": "engine sink config status_path backend route telemetry clock",
        "join": "reloaded",
        "stage": "version",
        "update": "version",
        "rollback": "",
        "audit": "",
        "follow": "stop poll_s wait on_update on_problem",
        "close": "",
    }
    for name, names in shapes.items():
        found = list(inspect.signature(getattr(megasync.Applier, name)).parameters)[1:]
        assert found[: len(names.split())] == names.split(), name
    run = Run(1)
    engine = OwnEngine({n: live(w) for n, w in run.words[0].items()})
    applier = megasync.Applier(engine, run.sink, megasync.ApplyConfig(run="run"))
    assert applier.join().version == 0  # start
    staged = applier.stage()
    assert staged is not None
    assert staged.version == 1
    assert applier.update().versions == (1,)  # update
    assert applier.audit().version == 1
    assert applier.rollback().version == 0
    applier.close()  # finish
    for n, w in run.words[0].items():
        np.testing.assert_array_equal(words_of(engine.held[n]), w)

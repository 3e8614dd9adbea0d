"""Binding: what an engine says is checked against the run before anything is fetched; everything wrong is listed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, PlanError, SchemaMismatchError
from megasync.layout.compose import arrange, with_copies
from megasync.layout.modes import Layout
from megasync.receiver.applier import Applier
from megasync.receiver.backends import make_backend
from megasync.receiver.bind import bind
from megasync.receiver.engine import Derivation
from megasync.receiver.leads import Held
from megasync.sinks.memory import MemorySink
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, identity, live, plain_engine, words_of

SPECS = [spec("layers.0.a", "BF16", (6, 8)), spec("layers.0.b", "F32", (4, 4)), spec("layers.1.c", "U8", (9,))]


def joined(engine: PlainEngine, words: dict[str, np.ndarray], **more: object) -> tuple[Publisher, Applier]:
    publisher = Publisher(MemorySink(), make_schema("run", SPECS))
    publisher.checkpoint(words)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1), **more)  # type: ignore[arg-type]
    applier.join()
    return publisher, applier


def test_case_24_57_names_that_do_not_resolve_are_all_listed_at_plan_time() -> None:
    words = random_words(SPECS)
    engine = plain_engine(words)
    engine.places = {"layers.0.b": identity(SPECS[1])}
    publisher = Publisher(MemorySink(), make_schema("run", SPECS))
    publisher.checkpoint(words)
    before = {n: t.clone() for n, t in engine.live.items()}
    with pytest.raises(PlanError, match=r"does not resolve 2 tensors .*not held: layers\.0\.a, layers\.1\.c"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()
    assert all(torch.equal(before[n], engine.live[n]) for n in before)


def test_names_that_the_run_does_not_have_are_listed() -> None:
    engine = plain_engine(random_words(SPECS))
    engine.places = {t.name: identity(t) for t in SPECS} | {"layers.9.x": identity(SPECS[0])}
    with pytest.raises(PlanError, match=r"no tensors called layers\.9\.x"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)


def test_case_24_live_tensor_missing() -> None:
    engine = plain_engine(random_words(SPECS))
    del engine.live["layers.0.b"]
    with pytest.raises(PlanError, match=r"no live tensor called layers\.0\.b"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)


def test_case_81_another_model_is_refused_by_shape_and_by_schema() -> None:
    other = [spec("layers.0.a", "BF16", (6, 16)), *SPECS[1:]]
    engine = plain_engine(random_words(other))
    engine.places = {t.name: identity(t) for t in other}
    with pytest.raises(SchemaMismatchError, match=r"layers\.0\.a: engine \[6, 16\] of 2-byte words, run \[6, 8\]"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)
    words = random_words(SPECS)
    engine = plain_engine(words)
    publisher, applier = joined(engine, words)
    second = Publisher(publisher.sink, make_schema("run", other), head=publisher.head, newest=publisher.newest)
    second.words = random_words(other)
    from megasync.versions.head import write_schema

    write_schema(publisher.sink, second.schema)
    second.delta(changed(second.words, 0.1))
    with pytest.raises(SchemaMismatchError, match="another model"):
        applier.update()
    assert all(np.array_equal(words_of(engine.live[n]), w) for n, w in words.items())


def test_case_33_moved_storage_is_refused_with_both_values() -> None:
    words = random_words(SPECS)
    engine = plain_engine(words)
    publisher, applier = joined(engine, words)
    publisher.delta(changed(words, 0.2))
    kept, before = engine.live["layers.0.b"], engine.live["layers.0.b"].data_ptr()
    engine.live["layers.0.b"] = kept.clone()
    after = engine.live["layers.0.b"].data_ptr()
    with pytest.raises(BaseMismatchError, match=rf"layers\.0\.b: data_ptr {before} -> {after}"):
        applier.update()
    assert (applier.version, applier.status.state, applier.ready, engine.events) == (-1, "behind", False, [])
    engine.live["layers.0.b"] = kept
    assert applier.join().version == 0
    assert applier.update().version == 1


def test_case_33_changed_view_of_the_same_storage_is_refused() -> None:
    words = random_words(SPECS)
    engine = plain_engine(words)
    publisher, applier = joined(engine, words)
    publisher.delta(changed(words, 0.2))
    engine.live["layers.0.a"] = engine.live["layers.0.a"].t()
    with pytest.raises(BaseMismatchError, match=r"layers\.0\.a: shape \(6, 8\) -> \(8, 6\)"):
        applier.update()


def test_case_55_draft_tensors_are_excluded_by_name_and_reported() -> None:
    words = random_words(SPECS)
    engine = plain_engine({n: w for n, w in words.items() if n != "layers.1.c"})
    engine.left_out = {"layers.1.c": "no draft model is loaded"}
    publisher, applier = joined(engine, words)
    new = changed(words, 0.2)
    publisher.delta(new)
    result = applier.update()
    assert result.excluded == ("layers.1.c",)
    for name in ("layers.0.a", "layers.0.b"):
        np.testing.assert_array_equal(words_of(engine.live[name]), new[name])
    assert applier.audit().excluded == ("layers.1.c",)


def test_excluding_what_is_held_is_refused() -> None:
    engine = plain_engine(random_words(SPECS))
    engine.places = {t.name: identity(t) for t in SPECS}
    engine.left_out = {"layers.1.c": "twice"}
    with pytest.raises(PlanError, match=r"both holds and excludes layers\.1\.c"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)


def test_case_82_tied_head_is_updated_once_through_either_name() -> None:
    embed = spec("embed.weight", "BF16", (30, 8), aliases=("lm_head.weight",))
    words = random_words([embed])
    table = live(words["embed.weight"])
    places = {"embed.weight": identity(embed, "embed"), "lm_head.weight": identity(embed, "head")}
    for tensors in ({"embed": table, "head": table}, {"embed": table.clone(), "head": table.clone()}):
        publisher = Publisher(MemorySink(), make_schema("run", [embed]))
        publisher.checkpoint(words)
        engine = PlainEngine(dict(tensors), places)
        applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
        assert applier.join().version == 0
        new = changed(words, 0.3)
        publisher.delta(new)
        assert applier.update().num_written == publisher.newest.num_changed  # type: ignore[union-attr]
        for name in ("embed", "head"):
            np.testing.assert_array_equal(words_of(engine.live[name]), new["embed.weight"])


def test_case_50_dtype_of_a_single_precision_bias_is_kept() -> None:
    specs = [spec("layers.0.gate.expert_bias", "F32", (16,)), spec("layers.0.gate.weight", "BF16", (16, 8))]
    words = random_words(specs)
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    publisher.checkpoint(words)
    engine = PlainEngine(
        {
            "layers.0.gate.expert_bias": torch.from_numpy(words["layers.0.gate.expert_bias"].copy().view(np.float32)),
            "layers.0.gate.weight": live(words["layers.0.gate.weight"]).view(torch.bfloat16),
        }
    )
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    new = changed(words, 0.5)
    publisher.delta(new)
    applier.update()
    assert engine.live["layers.0.gate.expert_bias"].dtype == torch.float32
    for n, w in new.items():
        np.testing.assert_array_equal(words_of(engine.live[n]), w)


def test_empty_live_parameter_is_refused() -> None:
    """An engine that gave its weights to another library leaves an empty parameter behind."""
    engine = plain_engine(random_words(SPECS))
    engine.live["layers.0.b"] = torch.empty(0)
    with pytest.raises(PlanError, match="empty or smaller live tensor"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)


def test_meta_and_overlapping_storages_are_refused() -> None:
    engine = plain_engine(random_words(SPECS))
    engine.live["layers.0.b"] = torch.empty(4, 4, device="meta")
    with pytest.raises(PlanError, match="no plain memory"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)
    raw = np.zeros(200, np.uint8)
    engine.live["layers.0.b"] = torch.from_numpy(raw[:64])
    engine.live["layers.1.c"] = torch.from_numpy(raw[32:41])
    with pytest.raises(PlanError, match="share memory under two storages"):
        bind(engine, make_schema("run", SPECS), shadow_limit_nbytes=0)


def test_naive_plan_of_a_shuffled_layout_is_found_by_content_at_join() -> None:
    """Same shape, other layout: nothing but the bytes can tell."""
    words = random_words(SPECS)
    engine = plain_engine(words)
    engine.live["layers.0.a"].copy_(engine.live["layers.0.a"].flip(0).clone())
    publisher = Publisher(MemorySink(), make_schema("run", SPECS))
    publisher.checkpoint(words)
    with pytest.raises(BaseMismatchError, match=r"1 tensors differ from version 0, the closest: layers\.0\.a"):
        Applier(engine, publisher.sink, ApplyConfig(workers=1)).join()


def test_case_22_run_names_that_could_leave_the_sink_are_refused() -> None:
    for name in ("../other", "/etc", "a/b", "", "a b", "\0", ".hidden"):
        with pytest.raises(ValueError, match="run name"):
            Applier(plain_engine({}), MemorySink(), ApplyConfig(run=name))


def test_leads_tell_copies_from_replicas_and_refuse_cut_words() -> None:
    shape = (6, 4)
    own = arrange(shape, word_nbytes=1, start=(0, 0), stop=(4, 4)).to("a").records
    replica = arrange(shape, word_nbytes=1, start=(4, 0), stop=(6, 4)).to("b", primary=False).records
    again = arrange(shape, word_nbytes=1, start=(1, 0), stop=(3, 4)).to("c", primary=False).records
    held = Held.of("w", Layout(shape, 1, (0, 0), shape, (*own, *replica, *again)))
    assert held.lead == (True, True, False)
    assert not held.whole
    counted = held.counted()
    assert counted is not None
    np.testing.assert_array_equal(counted.any(axis=1), [True] * 4 + [False] * 2)
    assert held.here() is None
    across = arrange(shape, word_nbytes=1, start=(3, 0), stop=(5, 4)).to("c", primary=False).records
    with pytest.raises(PlanError, match="only partly a copy"):
        Held.of("w", Layout(shape, 1, (0, 0), shape, (*own, *across), partial=True))
    cut = arrange(shape, word_nbytes=1, unit="nibble").to("n").records[0]
    from dataclasses import replace

    with pytest.raises(PlanError, match="inside a word"):
        Held.of("w", Layout(shape, 1, (0, 0), shape, (replace(cut, start=(0, 1)),), partial=True))


def test_replica_beside_own_rows_is_written_but_not_counted(tmp_path: Path) -> None:
    """One rank that holds rows 0..4 first, and rows 4..6 only as another rank's: its sums leave them out."""
    t = spec("w", "BF16", (6, 4))
    own = arrange(t.shape, word_nbytes=2, start=(0, 0), stop=(4, 4)).to("a").records
    replica = arrange(t.shape, word_nbytes=2, start=(4, 0), stop=(6, 4)).to("b", primary=False).records
    layout = Layout(t.shape, 2, (0, 0), t.shape, (*own, *replica))
    from tests.unit.receiving import Mailbox, RankEngine, on_ranks

    words = random_words([t])
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.checkpoint(words)
    mailbox = Mailbox(2)
    rest = arrange(t.shape, word_nbytes=2, start=(4, 0), stop=(6, 4)).to("c")
    engines = [
        RankEngine(mailbox, 0, live={"a": live(words["w"][:4]), "b": live(words["w"][4:])}, places={"w": layout}),
        RankEngine(mailbox, 1, live={"c": live(words["w"][4:])}, places={"w": rest}),
    ]
    appliers = [Applier(e, publisher.sink, ApplyConfig(workers=1)) for e in engines]
    assert [r.version for r in on_ranks([a.join for a in appliers])] == [0, 0]  # type: ignore[attr-defined]
    for v, density in ((1, 0.1), (2, 0.9)):
        new = changed(publisher.words, density, seed=v)
        publisher.delta(new)
        assert [r.version for r in on_ranks([a.update for a in appliers])] == [v, v]  # type: ignore[attr-defined]
        np.testing.assert_array_equal(words_of(engines[0].live["a"]), new["w"][:4])
        np.testing.assert_array_equal(words_of(engines[0].live["b"]), new["w"][4:])
        np.testing.assert_array_equal(words_of(engines[1].live["c"]), new["w"][4:])


def test_copies_of_one_tensor_on_one_rank() -> None:
    t = SPECS[0]
    layout = with_copies(identity(t, "x"), identity(t, "y"))
    words = random_words([t])
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.checkpoint(words)
    engine = PlainEngine({"x": live(words[t.name]), "y": live(words[t.name])}, {t.name: layout})
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    engine.live["y"][0, 0] ^= 1
    with pytest.raises(BaseMismatchError, match="copies"):
        applier.audit()


def test_backends_are_chosen_by_name_rule_or_callable() -> None:
    binding = bind(plain_engine(random_words(SPECS)), make_schema("run", SPECS), shadow_limit_nbytes=0)
    assert make_backend(binding, "auto").name == make_backend(binding, "cpu").name == "cpu"
    made = make_backend(binding, "cpu")
    assert make_backend(binding, lambda b: made) is made
    with pytest.raises(ValueError, match="unknown; known: auto, cpu, mask"):
        make_backend(binding, "warp")


def derived(inputs: tuple[str, ...], outputs: tuple[str, ...], name: str = "sum") -> Derivation:
    return Derivation(name, inputs, outputs, lambda x: {n: next(iter(x.values())).clone() for n in outputs})


@pytest.mark.parametrize("case", ["destination", "bytes of one", "derivation", "same twice", "expanded", "apart"])
def test_places_that_a_derivation_writes_are_nobody_else_s(case: str) -> None:
    """XOR would be overwritten by the derivation, and undone by an audit only."""
    specs = [spec("a", "F32", (1,)), spec("norm", "BF16", (8,))]
    schema = make_schema("run", specs)
    flat = torch.zeros(12, dtype=torch.int32)
    tensors = {"s": flat[:1], "t": flat[1:2], "norm": flat.view(torch.int16)[8:16], "wide": flat[:1].expand(4)}
    places = {"norm": arrange((8,), word_nbytes=2).to("norm", base=8)}
    groups = [derived(("a",), ("s",))]
    said = ""
    if case == "destination":
        groups, said = [derived(("a",), ("norm",))], r"norm .*output of derivation sum"
    elif case == "bytes of one":
        tensors["s"], said = flat[5:6], r"norm .*s \(output of derivation sum\)|s \(output of derivation sum\) and norm"
    elif case == "derivation":
        tensors["t"] = flat[:1]
        groups, said = [*groups, derived(("a",), ("t",), "other")], "output of derivation (sum|other)"
    elif case == "same twice":
        tensors["t"] = flat.view(torch.int16)[1:2]
        groups, said = [derived(("a",), ("s", "t"))], "output of derivation sum"
    elif case == "expanded":
        groups, said = [derived(("a",), ("wide",))], "output wide is expanded along axis 0"
    engine = PlainEngine(tensors, places, groups=groups)
    if said:
        with pytest.raises(PlanError, match=said):
            bind(engine, schema, shadow_limit_nbytes=1 << 10)
    else:
        assert bind(engine, schema, shadow_limit_nbytes=1 << 10).shadows.nbytes == 4


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(3, 4, dtype=torch.complex128),
        torch.zeros(6, 4, dtype=torch.float64).t()[1:3],
        torch.zeros(0, 4),
        torch.tensor(1.0),
        torch.zeros(5, 7, dtype=torch.bool)[::2, 1:3],
    ],
)
def test_outputs_of_any_dtype_and_stride_bind(output: torch.Tensor) -> None:
    specs = [spec("a", "F32", (1,))]
    engine = PlainEngine({"out": output}, {}, groups=[derived(("a",), ("out",))])
    assert bind(engine, make_schema("run", specs), shadow_limit_nbytes=1 << 10).storages["out"].dtype == torch.uint8

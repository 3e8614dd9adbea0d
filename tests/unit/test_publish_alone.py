"""The trainer side in one process, without torch.distributed: publish, then rebuild from the sink alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megasync.adapters.torch_module import TorchModuleEngine
from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import ApplyConfig, FirstDifference, OnError, PublishConfig
from megasync.digest import bytes_lanes, state_digest
from megasync.errors import RankFailedError, SchemaMismatchError
from megasync.manifest import Manifest
from megasync.receiver.applier import Applier
from megasync.sinks.local import LocalSink
from megasync.sinks.memory import MemorySink
from megasync.tools.examine import verify
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.mask import words_of
from megasync.types import TensorSpec
from megasync.versions.publication import PublicationReader

Tensors = dict[str, torch.Tensor]


def model(seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(1000, 96, generator=g).bfloat16(),
        "model.layers.0.mlp.down_proj.weight": torch.randn(256, 2048, generator=g).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(2048, 96, generator=g).bfloat16()[:, ::2],
        "model.layers.1.router.bias": torch.randn(64, generator=g),
        "model.layers.1.packed": torch.randint(0, 256, (300, 700), generator=g, dtype=torch.uint8),
        "model.scalar": torch.tensor(3.5, dtype=torch.float64),
        "model.empty": torch.empty(0, 4, dtype=torch.float16),
    }


def change(tensors: Tensors, share: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for t in tensors.values():
        if t.numel():
            chosen = torch.rand(t.shape, generator=g) < share
            t[chosen] = (t[chosen].double() + 1 + torch.rand(int(chosen.sum()), generator=g).double() * 9).to(t.dtype)


def copy(tensors: Tensors) -> dict[str, np.ndarray]:
    return {n: np.ascontiguousarray(words_of(t)).copy() for n, t in tensors.items()}


def rebuild(
    reader: PublicationReader, newest: Manifest, base: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """A reader of its own: the chain applied to flat words, no part of the receiver."""
    schema = reader.schema(newest.schema_digest)
    out = {t.name: np.zeros(t.num_words, f"<u{t.word_nbytes}") for t in schema.tensors}
    if base is not None:
        out = {n: w.reshape(-1).copy() for n, w in base.items()}
    for manifest in reader.chain(newest):
        for _, e in reader.entries(manifest):
            starts = np.cumsum(e.counts, dtype=np.int64) - e.counts
            for i, (tensor_id, tile) in enumerate(zip(e.tensor_ids, e.tiles, strict=True)):
                at = slice(int(starts[i]), int(starts[i]) + int(e.counts[i]))
                flat = schema.grids[tensor_id].flat_index(np.array([tile]), e.positions[at])
                out[schema.tensors[tensor_id].name][flat] ^= e.values[at]
        touched = [schema.tensors[i] for i in manifest.touched_ids]
        for spec, state in zip(touched, manifest.new_states, strict=True):
            assert state_digest(spec, bytes_lanes(out[spec.name].view(np.uint8))) == state.tobytes()
    return out


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        np.testing.assert_array_equal(found[name].reshape(-1), words.reshape(-1), err_msg=name)


@pytest.mark.parametrize("codec", ["sparse", "lz4+zstd", "snappy", "zstd", "auto"])
def test_every_version_rebuilds_bit_for_bit(codec: str) -> None:
    sink, tensors = MemorySink(), model()
    callback = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(codec=codec, max_first_density=1))
    callback.on_train_start()
    versions = [copy(tensors)]
    for step, share in enumerate((0.01, 0.0, 0.6, 1e-4)):
        change(tensors, share, step)
        assert callback.step_end() == step + 1
        versions.append(copy(tensors))
    callback.on_train_end()
    assert [o.version for o in callback.outcomes] == [0, 1, 2, 3, 4]
    assert all(o.durable for o in callback.outcomes)
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 4
    for manifest in reader.chain(newest):
        assert_same(rebuild(reader, manifest), versions[manifest.version])
    assert reader.chain(newest)[2].num_changed == 0


def test_case_51_negative_zero_and_nan_travel_as_bits() -> None:
    sink = MemorySink()
    tensors = {"w": torch.tensor([0.0, 1.0, float("nan"), 2.0] * 100)}
    callback = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1))
    callback.on_train_start()
    tensors["w"][0] = -0.0
    tensors["w"].view(torch.int32)[2] = 0x7FC00001
    callback.step_end()
    callback.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.num_changed == 2
    assert_same(rebuild(reader, newest), copy(tensors))


def test_every_k_steps_and_the_last_step_always() -> None:
    sink, tensors = MemorySink(), model()
    callback = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(every=3, max_first_density=1))
    callback.on_train_start()
    published = []
    for step in range(7):
        change(tensors, 0.01, step)
        published.append(callback.step_end())
    assert published == [None, None, 1, None, None, 2, None]
    callback.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 3
    assert_same(rebuild(reader, newest), copy(tensors))


def test_flush_publishes_nothing_where_nothing_changed_since() -> None:
    tensors = model()
    callback = MegasyncCallback(TensorExporter(tensors), MemorySink(), PublishConfig(every=2, max_first_density=1))
    callback.on_train_start()
    callback.step_end(skipped=True)
    callback.flush()
    assert callback.version == 0
    callback.step_end()
    callback.flush()
    callback.flush()
    assert callback.version == 1
    callback.close()


def test_case_28_a_restarted_trainer_continues_from_the_head_never_from_its_own_weights(tmp_path: Path) -> None:
    sink, tensors = MemorySink(), model()
    first = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1))
    first.on_train_start()
    change(tensors, 0.01, 1)
    first.step_end()
    first.on_train_end()
    # The new process loaded an older save: it differs from version 1 before its first step.
    older = model()
    again = MegasyncCallback(TensorExporter(older), sink, PublishConfig(max_first_density=1))
    again.on_train_start()
    assert again.version == 1
    change(older, 0.001, 2)
    assert again.step_end() == 2
    again.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert (newest.version, newest.epoch, newest.base_version) == (2, 2, 1)
    assert_same(rebuild(reader, newest), copy(older))


def test_a_restart_elsewhere_is_refused_where_configured() -> None:
    sink, tensors = MemorySink(), model()
    first = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig())
    first.on_train_start()
    first.on_train_end()
    change(tensors, 0.001, 3)
    refusing = PublishConfig(first_difference=FirstDifference.REFUSE)
    with pytest.raises(RankFailedError, match="starts elsewhere than version 0"):
        MegasyncCallback(TensorExporter(tensors), sink, refusing).on_train_start()


def test_a_fresh_run_that_starts_elsewhere_than_its_base_is_refused_where_configured(tmp_path: Path) -> None:
    tensors = model()
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    refusing = PublishConfig(first_difference=FirstDifference.REFUSE)
    same = MegasyncCallback(TensorExporter(tensors), MemorySink(), refusing, base=tmp_path)
    same.on_train_start()
    same.on_train_end()
    change(tensors, 0.001, 3)
    sink = MemorySink()
    with pytest.raises(RankFailedError, match="starts elsewhere than version 0 of run 'run'"):
        MegasyncCallback(TensorExporter(tensors), sink, refusing, base=tmp_path).on_train_start()
    assert PublicationReader(sink, "run").newest() is None
    publishing = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(), base=tmp_path)
    publishing.on_train_start()
    publishing.step_end()
    publishing.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 1
    assert_same(rebuild(reader, newest, copy(model())), copy(tensors))


def test_a_first_delta_that_is_another_model_is_refused() -> None:
    sink = MemorySink()
    first = MegasyncCallback(TensorExporter(model()), sink, PublishConfig())
    first.on_train_start()
    first.on_train_end()
    other = MegasyncCallback(TensorExporter(model(seed=1)), sink, PublishConfig())
    other.on_train_start()
    with pytest.raises(SchemaMismatchError, match=r"max_first_density is 5\.0%"):
        other.step_end()
    other.close()
    newest = PublicationReader(sink, "run").newest()
    assert newest is not None
    assert newest.version == 0


def test_a_trainer_on_a_run_whose_head_was_lost_blames_no_publisher_and_takes_nothing(tmp_path: Path) -> None:
    sink, tensors = LocalSink(tmp_path), model()
    first = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig())
    first.on_train_start()
    first.on_train_end()
    (tmp_path / ".heads" / "run.head").unlink()
    before = sorted(sink.keys(""))
    with pytest.raises(RankFailedError, match=r"the head of run 'run' is missing .* though a manifest of version 0"):
        MegasyncCallback(TensorExporter(tensors), sink, PublishConfig()).on_train_start()
    assert (sorted(sink.keys("")), sink.heads()) == (before, [])


def test_another_model_is_refused_at_start() -> None:
    sink = MemorySink()
    first = MegasyncCallback(TensorExporter(model()), sink, PublishConfig())
    first.on_train_start()
    first.on_train_end()
    smaller = model()
    del smaller["model.scalar"]
    with pytest.raises(RankFailedError, match=r"model\.scalar"):
        MegasyncCallback(TensorExporter(smaller), sink, PublishConfig()).on_train_start()


def test_moved_weights_are_refused_and_nothing_is_published() -> None:
    sink, tensors = MemorySink(), model()
    exporter = TensorExporter(tensors)
    callback = MegasyncCallback(exporter, sink, PublishConfig(max_first_density=1, on_error=OnError.RAISE))
    callback.on_train_start()
    callback.step_end()
    tensors["model.embed_tokens.weight"].set_(torch.zeros(1000, 96, dtype=torch.bfloat16))
    callback.step_end()
    with pytest.raises(RankFailedError, match=r"model\.embed_tokens\.weight"):
        callback.flush()
    callback.close()
    newest = PublicationReader(sink, "run").newest()
    assert newest is not None
    assert newest.version == 1


def test_case_67_trainer_writes_after_step_end_do_not_reach_the_version() -> None:
    sink, tensors = MemorySink(), model()
    callback = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(max_first_density=1))
    callback.on_train_start()
    change(tensors, 0.05, 1)
    callback.step_end()
    expected = copy(tensors)
    change(tensors, 0.05, 2)
    callback.flush()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    assert_same(rebuild(reader, newest), expected)
    callback.close()


def test_calls_before_the_start_say_so() -> None:
    callback = MegasyncCallback(TensorExporter(model()), MemorySink())
    with pytest.raises(ValueError, match="on_train_start"):
        callback.step_end()
    with pytest.raises(ValueError, match="codec 'zip'"):
        MegasyncCallback(TensorExporter(model()), MemorySink(), PublishConfig(codec="zip"))


class FrozenExporter(TensorExporter):
    """The last tensor is frozen: an input scale, say."""

    def specs(self) -> list[TensorSpec]:
        *some, last = super().specs()
        return [*some, replace(last, frozen=True)]


@pytest.mark.parametrize("anchored", [True, False])
def test_frozen_tensors_are_in_the_root_and_never_published(tmp_path: Path, anchored: bool) -> None:
    sink = MemorySink()
    tensors = {"w": torch.randn(64, 64), "input_scale": torch.tensor([0.25, 4.0])}
    base = None
    if not anchored:
        base = tmp_path / "model.safetensors"
        save_file(tensors, base)
    callback = MegasyncCallback(FrozenExporter(tensors), sink, PublishConfig(max_first_density=1), base=base)
    callback.on_train_start()
    change({"w": tensors["w"]}, 0.1, 0)
    callback.step_end()
    callback.on_train_end()
    reader = PublicationReader(sink, "run")
    newest = reader.newest()
    assert newest is not None
    first = reader.chain(newest)[0]
    schema = reader.schema(first.schema_digest)
    frozen = schema.tensors[schema.ids["input_scale"]]
    assert frozen.frozen
    expected = state_digest(frozen, bytes_lanes(tensors["input_scale"].numpy().view(np.uint8)))
    assert reader.state_table(first)[schema.ids["input_scale"]].tobytes() == expected
    assert [schema.tensors[i].name for i in newest.touched_ids] == ["w"]
    engine = TorchModuleEngine(_Holder({n: t.clone() for n, t in tensors.items()}))
    applier = Applier(engine, sink, ApplyConfig(run="run"))
    applier.join()
    assert applier.version == 1


class _Holder(torch.nn.Module):
    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def test_verify_checks_tensors_that_an_anchor_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-zero tensor has no frame in an anchor: its state in the table must be that of zeros all the same."""
    sink, tensors = MemorySink(), {"a": torch.ones(300), "z": torch.zeros(200)}
    callback = MegasyncCallback(TensorExporter(tensors), sink, PublishConfig(run="r"))
    callback.on_train_start()
    callback.on_train_end()
    assert verify(sink, "r").faults == []
    table = PublicationReader.state_table

    def other(self: PublicationReader, manifest: Manifest) -> np.ndarray:
        found = table(self, manifest).copy()
        row = [t.name for t in self.schema(manifest.schema_digest).tensors].index("z")
        found[row, 0] ^= 1
        return found

    monkeypatch.setattr(PublicationReader, "state_table", other)
    assert verify(sink, "r").faults == ["version 0: z has other bytes than its digest"]

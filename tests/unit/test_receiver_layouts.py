"""Updates through engine layouts: where canonical words lie permuted, padded, sliced, copied or split in nibbles.

The oracle is ``layout.evaluate``: the live storages that an engine would have after loading the new weights cold.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.codecs.sparse import SparseCodec
from megasync.config import ApplyConfig
from megasync.errors import BaseMismatchError, FormatError, PlanError
from megasync.frames import FrameRecord
from megasync.layout.compose import arrange, with_copies
from megasync.layout.experts import Place, stacked, swizzled, w2_rows, w13_interleaved, w13_stack
from megasync.layout.modes import Layout
from megasync.layout.named import marlin_nibbles, swizzled_scales, transposed
from megasync.receiver.applier import Applier
from megasync.receiver.backend import FetchedFrame
from megasync.receiver.bind import bind
from megasync.receiver.cpu import CpuBackend
from megasync.sinks.memory import MemorySink
from megasync.types import Box, Entries, TensorSpec
from tests.unit.publishing import Publisher, changed, make_schema, random_words, spec
from tests.unit.receiving import PlainEngine, Storages, identity, load


def follow(specs: list[TensorSpec], places: Mapping[str, Layout], storages: Storages, *, steps: int = 2) -> Applier:
    """Publish a few versions, apply them, and compare all live bytes with a cold load each time."""
    publisher = Publisher(MemorySink(), make_schema("run", specs))
    words = random_words(specs)
    publisher.checkpoint(words)
    engine = PlainEngine(load(places, storages, words), places)
    addresses = {n: t.data_ptr() for n, t in engine.live.items()}
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    for v in range(1, steps + 1):
        words = changed(words, 0.02 if v % 2 else 0.6, seed=v)  # runs of words, then masks of tiles
        publisher.delta(words)
        applier.update()
        cold = load(places, storages, words)
        for n, t in engine.live.items():
            assert torch.equal(t, cold[n]), f"{n} at version {v}"
            assert t.data_ptr() == addresses[n]
        applier.audit()
    return applier


def moe(num: int = 3, inter: int = 160, hidden: int = 450) -> tuple[list[TensorSpec], dict[str, Layout], Storages]:
    """NVFP4 experts as CuteDSL keeps them: up-first groups of 64 rows, scales then swizzled and padded."""
    specs: list[TensorSpec] = []
    places: dict[str, Layout] = {}
    for e in range(num):
        for part, name in (("gate", "gate_proj"), ("up", "up_proj")):
            weight = spec(f"layers.0.experts.{e}.{name}.weight", "U8", (inter, hidden))
            scale = spec(f"layers.0.experts.{e}.{name}.weight_scale", "F8_E4M3", (inter, hidden // 8))
            specs += [weight, scale]
            place = Place(e, num)
            places[weight.name] = w13_interleaved(part, weight.shape, place, "w13", word_nbytes=1)  # type: ignore[arg-type]
            places[scale.name] = w13_interleaved(part, scale.shape, place, "w13s", word_nbytes=1, scales=True)  # type: ignore[arg-type]
        down = spec(f"layers.0.experts.{e}.down_proj.weight", "U8", (hidden, inter), cut="last")
        specs.append(down)
        places[down.name] = stacked(w2_rows(down.shape, Place(e, num), word_nbytes=1), Place(e, num), "w2")
    rows = -(-inter // 64) * 128
    storages = {
        "w13": torch.zeros(num * rows * hidden, dtype=torch.uint8),
        "w13s": torch.zeros(num * -(-rows // 128) * 128 * (-(-(hidden // 8) // 4) * 4), dtype=torch.uint8),
        "w2": torch.zeros(num * hidden * inter, dtype=torch.uint8),
    }
    return specs, places, storages


def test_case_35_swizzled_padded_scales_keep_zero_padding() -> None:
    specs, places, storages = moe()
    follow(specs, places, storages, steps=3)


def test_case_37_42_many_syncs_of_one_engine_need_no_raw_parameters() -> None:
    specs, places, storages = moe(2, 64, 64)
    follow(specs, places, storages, steps=6)


def test_case_43_second_swizzled_copy_of_a_scale_is_refreshed_too() -> None:
    scale = spec("layers.0.scale", "F8_E4M3", (130, 10))
    first = identity(scale, "plain")
    image = swizzled_scales(arrange(scale.shape, word_nbytes=1), "image")
    storages = {"plain": torch.zeros(1300, dtype=torch.uint8), "image": torch.zeros(256 * 12, dtype=torch.uint8)}
    follow([scale], {scale.name: with_copies(first, image)}, storages)


def test_a_copy_that_differs_is_refused_before_any_write() -> None:
    t = spec("w", "BF16", (20, 30))
    places = {"w": with_copies(identity(t, "a"), identity(t, "b"))}
    storages = {n: torch.zeros(600, dtype=torch.int16) for n in "ab"}
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    words = random_words([t])
    publisher.checkpoint(words)
    engine = PlainEngine(load(places, storages, words), places)
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    new = changed(words, 0.05)
    publisher.delta(new)
    at = int(np.flatnonzero((new["w"] != words["w"]).reshape(-1))[0])
    engine.live["b"][at] ^= 1
    before = {n: t.clone() for n, t in engine.live.items()}
    with pytest.raises(BaseMismatchError, match="w: word"):
        applier.update()
    assert all(torch.equal(before[n], engine.live[n]) for n in "ab")
    assert engine.events == []


def test_nibbles_in_another_order() -> None:
    """Marlin's 4-bit repack: neighbouring nibbles of a canonical byte lie in different live bytes."""
    t = spec("layers.0.q", "U8", (128, 64))
    follow([t], {t.name: marlin_nibbles(t.shape, storage="q")}, {"q": torch.zeros(128 * 64, dtype=torch.uint8)})


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64"])
def test_transposed_and_offset_storages(dtype: str) -> None:
    t = spec("layers.0.w", dtype, (37, 53))
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.word_nbytes]
    layout = arrange(t.shape, word_nbytes=t.word_nbytes).permute((1, 0)).to("w", base=11)
    follow([t], {t.name: layout}, {"w": torch.zeros(11 + 37 * 53 + 5, dtype=kind)})
    follow(
        [t],
        {t.name: transposed(arrange(t.shape, word_nbytes=t.word_nbytes), "w")},
        {"w": torch.zeros(37 * 53, dtype=kind)},
    )


def test_case_47_gate_and_up_are_split_on_the_right_axis() -> None:
    specs = [spec(f"layers.0.experts.{e}.{p}_proj.weight", "BF16", (24, 40)) for e in range(4) for p in ("gate", "up")]
    places = {
        t.name: w13_stack("gate" if "gate" in t.name else "up", t.shape, Place(i // 2, 4), "w13", word_nbytes=2)
        for i, t in enumerate(specs)
    }
    follow(specs, places, {"w13": torch.zeros(4 * 48 * 40, dtype=torch.int16)})


def test_case_51_negative_zero_and_nan() -> None:
    t = spec("w", "F32", (4, 64))
    words = {"w": np.zeros((4, 64), np.uint32)}
    new = {"w": words["w"].copy()}
    new["w"][0, 0] = 0x80000000  # 0.0 -> -0.0
    new["w"][1, 5] = 0x7FC00001  # one NaN
    new["w"][2, 6] = 0xFFC12345  # another
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.checkpoint(words)
    engine = PlainEngine({"w": torch.zeros(4, 64)})
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    publisher.delta(new)
    assert applier.update().num_written == 3
    np.testing.assert_array_equal(engine.live["w"].numpy().view(np.uint32), new["w"])


def test_case_52_non_contiguous_live_tensor() -> None:
    t = spec("w", "BF16", (12, 20))
    words = random_words([t])
    whole = torch.zeros(40, 30, dtype=torch.int16)
    view = whole[3:27:2, 4:24]
    view.copy_(torch.from_numpy(words["w"].view(np.int16)))
    layout = arrange(t.shape, word_nbytes=2).to("w", base=view.storage_offset(), strides=view.stride())
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    publisher.checkpoint(words)
    engine = PlainEngine({"w": view}, {"w": layout})
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    assert applier.join().version == 0
    new = changed(words, 0.1)
    publisher.delta(new)
    applier.update()
    np.testing.assert_array_equal(view.numpy().view(np.uint16), new["w"])
    whole[3:27:2, 4:24] = 0
    assert not whole.any(), "words outside the view were written"


def test_case_62_tensor_beyond_4_gib_is_addressed_exactly() -> None:
    """Only pages that hold changed words are ever touched, so the test takes little memory."""
    rows, cols = 70_000, 65_536
    t = spec("big", "U8", (rows, cols))
    schema = make_schema("run", [t])
    at = [(0, 0), (rows // 2, 5), (rows - 1, cols - 1), (65_537, 3)]
    live = torch.from_numpy(np.zeros(rows * cols, np.uint8))
    publisher = Publisher(MemorySink(), schema)
    binding = bind(PlainEngine({"big": live}), schema, shadow_limit_nbytes=0)
    backend = CpuBackend(binding)
    grid = schema.grids[0]
    flat = [r * cols + c for r, c in at]
    tiles = [int(grid.tiles_of(Box((r, c), (1, 1)))[0]) for r, c in at]
    order = sorted(range(4), key=lambda i: tiles[i])

    numbers = np.array([tiles[i] for i in order], np.uint32)
    starts, extents = grid.boxes(numbers)
    inside = [
        (at[i][0] - int(starts[k, 0])) * int(extents[k, 1]) + at[i][1] - int(starts[k, 1]) for k, i in enumerate(order)
    ]
    ids, ones = np.zeros(4, np.uint32), np.ones(4, np.uint32)
    words = grid.tile_words(numbers)
    entries = Entries(1, ids, numbers, words, ones, np.array(inside, np.uint32), np.arange(1, 5).astype(np.uint8))
    encoded = SparseCodec().encode(entries)
    record = FrameRecord(0, 0, encoded.codec, 1, -1, 4, encoded.plane_nbytes, b"", ids, numbers)
    frame = FetchedFrame(schema, publisher.newest, record, memoryview(b"".join(encoded.planes)))
    (placed,) = backend.place([frame])
    placed.prove()
    placed.write_()
    values = dict(zip([flat[i] for i in order], range(1, 5), strict=True))
    assert max(flat) > 1 << 32
    for place, value in values.items():
        assert int(live[place]) == value
    placed.undo_()
    assert all(int(live[place]) == 0 for place in values)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_composition_follows(data: st.DataObject) -> None:
    """Random layouts: a slice, padded, split, permuted, at an offset; with or without a copy."""
    w = data.draw(st.sampled_from([1, 2, 4]))
    dtype = {1: "U8", 2: "BF16", 4: "F32"}[w]
    shape = (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)))
    t = spec("layers.3.w", dtype, shape)
    steps = arrange(shape, word_nbytes=w)
    inner = data.draw(st.sampled_from([1, 2, 4, 16]))
    steps = steps.pad(0, multiple=inner).split(0, inner)
    order = data.draw(st.permutations([0, 1, 2]))
    steps = steps.permute(order)
    base = data.draw(st.integers(0, 9))
    size = int(np.prod(steps.extents)) + base
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[w]
    layout = steps.to("a", base=base)
    storages = {"a": torch.zeros(size, dtype=kind)}
    if data.draw(st.booleans()):
        layout = with_copies(layout, identity(t, "b"))
        storages["b"] = torch.zeros(shape[0] * shape[1], dtype=kind)
    follow([t], {t.name: layout}, storages)


def test_position_beyond_the_tensor_is_refused_case_23() -> None:
    """The largest position of a last, shorter segment is past the tensor: refused on the host, nothing is written."""
    t = spec("w", "U8", (10, 10))
    publisher = Publisher(MemorySink(), make_schema("run", [t]))
    words = random_words([t])
    publisher.checkpoint(words)
    engine = PlainEngine({"w": torch.from_numpy(words["w"].copy())})
    applier = Applier(engine, publisher.sink, ApplyConfig(workers=1))
    applier.join()
    new = {"w": words["w"].copy()}
    new["w"][9, 9] ^= 1

    def past_the_end(stored: bytes) -> bytes:
        assert stored == b"\x01\x00\x00\x00" + b"\x63" + b"\x00" + b"\x01"  # count 1, gap 99, value 1
        return b"\x01\x00\x00\x00" + b"\x64" + b"\x00" + b"\x01"

    publisher.edit_frame = past_the_end
    publisher.delta(new)
    with pytest.raises(FormatError, match="past its 100 words"):
        applier.update()
    np.testing.assert_array_equal(engine.live["w"].numpy(), words["w"])
    assert (applier.version, engine.events) == (0, [])


def test_two_tensors_in_one_place_are_refused() -> None:
    specs = [spec("a", "U8", (4, 4)), spec("b", "U8", (4, 4))]
    places = {n: identity(specs[0], "s") for n in "ab"}
    engine = PlainEngine({"s": torch.zeros(16, dtype=torch.uint8)}, places)
    with pytest.raises(PlanError, match="share"):
        bind(engine, make_schema("run", specs), shadow_limit_nbytes=0)


def test_scales_swizzle_alone() -> None:
    t = spec("layers.0.s", "F8_E4M3", (200, 7))
    layout = stacked(w2_rows(t.shape, Place(0, 1), word_nbytes=1), Place(0, 1), "s", swizzled)
    follow([t], {t.name: layout}, {"s": torch.zeros(256 * 8, dtype=torch.uint8)})

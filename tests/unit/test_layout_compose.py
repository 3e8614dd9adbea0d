"""Composition against index tensors: the same steps done to a numpy array of element numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megasync.errors import PlanError
from megasync.layout import Arrangement, Layout, Remap, arrange, chained, inverse, validate, with_copies
from megasync.layout.evaluate import gather, xor_
from megasync.layout.views import box_offsets


def places(layout: Layout) -> dict[int, int]:
    """Row-major canonical number -> physical offset, over all records."""
    out: dict[int, int] = {}
    for r in layout.records:
        for coords, offsets in box_offsets(r):
            for number, offset in zip(np.ravel_multi_index(coords, r.shape).tolist(), offsets.tolist(), strict=True):
                assert number not in out
                out[number] = offset
    return out


def expect(arrangement: Arrangement, index: np.ndarray) -> Layout:
    """The layout must find every number of the index array, and nothing else; padding is -1."""
    layout = arrangement.to("live")
    assert arrangement.extents == index.shape
    flat = index.reshape(-1)
    found = places(layout)
    assert sorted(found) == sorted(flat[flat >= 0].tolist())
    assert all(flat[offset] == number for number, offset in found.items())
    validate(layout, {"live": flat.size * layout.word_nbytes})
    if layout.word_nbytes == 2:
        whole = np.arange(np.prod(layout.shape), dtype=np.int16).reshape(layout.shape)
        cut = np.ascontiguousarray(whole[tuple(slice(a, b) for a, b in zip(layout.start, layout.stop, strict=True))])
        live = {"live": torch.from_numpy(flat.astype(np.int16).view(np.uint8).copy())}
        canonical = torch.from_numpy(cut.reshape(-1).view(np.uint8).copy())
        assert torch.equal(gather(layout, live), canonical)
        xor_(layout, live, canonical ^ 0xA5)
        expected = np.where(flat >= 0, 0xA5A5, 0xFFFF).astype(np.uint16)
        assert np.array_equal(live["live"].numpy().view(np.uint16), expected)
    return layout


def padded(index: np.ndarray, axis: int, extent: int) -> np.ndarray:
    widths = [(0, extent - n if a == axis else 0) for a, n in enumerate(index.shape)]
    return np.pad(index, widths, constant_values=-1)


def placed(index: np.ndarray, axis: int, offset: int, total: int) -> np.ndarray:
    widths = [(offset, total - offset - n) if a == axis else (0, 0) for a, n in enumerate(index.shape)]
    return np.pad(index, widths, constant_values=-1)


Step = Callable[[Arrangement, np.ndarray], tuple[Arrangement, np.ndarray]]


def random_step(draw: st.DrawFn, a: Arrangement, index: np.ndarray) -> tuple[Arrangement, np.ndarray]:
    """One step drawn at random, done to both."""
    rank = index.ndim
    axis = draw(st.integers(0, rank - 1))
    n = index.shape[axis]
    kind = draw(
        st.sampled_from(["split", "merge", "permute", "pad", "concat", "stack", "interleave", "reverse", "shuffle"])
    )
    if kind == "split" and rank < 6:
        inner = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
        return a.split(axis, inner), index.reshape(*index.shape[:axis], n // inner, inner, *index.shape[axis + 1 :])
    if kind == "merge" and axis + 1 < rank:
        return a.merge(axis), index.reshape(*index.shape[:axis], n * index.shape[axis + 1], *index.shape[axis + 2 :])
    if kind == "permute":
        order = draw(st.permutations(range(rank)))
        return a.permute(order), index.transpose(order)
    if kind == "pad":
        multiple = draw(st.sampled_from([1, 2, 3, 4, 8]))
        return a.pad(axis, multiple=multiple), padded(index, axis, -(-n // multiple) * multiple)
    if kind == "concat":
        before, after = draw(st.integers(0, 6)), draw(st.integers(0, 6))
        return a.concat(axis, offset=before, total=before + n + after), placed(index, axis, before, before + n + after)
    if kind == "stack" and rank < 6:
        at, count = draw(st.integers(0, 2)), 3
        return a.stack(at, count, axis), placed(np.expand_dims(index, axis), axis, at, count)
    if kind == "interleave":
        group, part = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 1))
        rows = padded(index, axis, -(-n // group) * group)
        rows = rows.reshape(*index.shape[:axis], -1, 1, group, *index.shape[axis + 1 :])
        both = placed(rows, axis + 1, part, 2)
        return a.interleave(axis, group, part), both.reshape(*index.shape[:axis], -1, *index.shape[axis + 1 :])
    if kind == "shuffle" and n % 4 == 0:
        blocks = index.reshape(*index.shape[:axis], n // 4, 2, 2, *index.shape[axis + 1 :])
        return a.shuffle(axis, (2, 2), (1, 0)), blocks.swapaxes(axis + 1, axis + 2).reshape(index.shape)
    return a.reverse(axis), np.flip(index, axis)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Arrangement, np.ndarray]:
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    a = arrange(shape, word_nbytes=2, start=start, stop=stop)
    index = np.arange(np.prod(shape)).reshape(shape)[tuple(slice(x, y) for x, y in zip(start, stop, strict=True))]
    for _ in range(draw(st.integers(0, 5))):
        try:
            a, index = random_step(draw, a, index)
        except PlanError:
            assume(False)
        assume(index.size < 20_000)
    return a, index


@given(programs())
@settings(max_examples=200, deadline=None)
def test_random_programs_place_every_word_where_numpy_does(program: tuple[Arrangement, np.ndarray]) -> None:
    a, index = program
    try:
        a.to("live")
    except PlanError:
        assume(False)
    expect(a, np.ascontiguousarray(index))


def swizzled(index: np.ndarray) -> np.ndarray:
    rows, cols = -(-index.shape[0] // 128) * 128, -(-index.shape[1] // 4) * 4
    full = padded(padded(index, 0, rows), 1, cols)
    return full.reshape(rows // 128, 4, 32, cols // 4, 4).transpose(0, 3, 2, 1, 4)


def test_case_35_interleave_then_swizzle_is_one_record_of_five_digits() -> None:
    index = np.arange(320 * 450).reshape(320, 450)[160:]
    a = arrange((320, 450), word_nbytes=1, start=(160, 0), stop=(320, 450)).interleave(0, 64, 1).swizzle_128x4()
    rows = padded(index, 0, 192).reshape(3, 1, 64, 450)
    layout = expect(a, np.ascontiguousarray(swizzled(placed(rows, 1, 1, 2).reshape(384, 450))))
    assert len(layout.records) == 1
    assert len(layout.records[0].digits) == 5
    assert layout.records[0].origin == (160, 0)


@pytest.mark.parametrize("offset", [0, 32, 96, 128, 160, 200])
def test_a_part_that_begins_inside_a_tile_becomes_records_with_bounds(offset: int) -> None:
    a = arrange((300, 10), word_nbytes=2).concat(0, offset=offset, total=offset + 300)
    index = placed(np.arange(3000).reshape(300, 10), 0, offset, offset + 300)
    if offset % 32:
        # 200 = 128 + 64 + 8: rows of 32 are cut too.
        assert len(expect(a.swizzle_128x4(), np.ascontiguousarray(swizzled(index))).records) <= 4
    else:
        assert len(expect(a.swizzle_128x4(), np.ascontiguousarray(swizzled(index))).records) == 1 + bool(offset % 128)


def test_axes_are_merged_only_where_digits_cross_them() -> None:
    a = arrange((3, 50), word_nbytes=2).merge(0).pad(0, multiple=16).split(0, 16).permute((1, 0))
    index = np.pad(np.arange(150), (0, 10), constant_values=-1).reshape(10, 16).T
    layout = expect(a, np.ascontiguousarray(index))
    assert layout.records[0].merge == ((0, 1),)
    plain = arrange((4, 50), word_nbytes=1).merge(0).split(0, 50).merge(0)
    assert expect(plain, np.arange(200)).records[0].merge == ((0,), (1,))


def test_halves_are_swapped_by_a_negative_stride() -> None:
    index = np.arange(96).reshape(12, 8)
    layout = expect(arrange((12, 8), word_nbytes=2).swap_halves(0), np.concatenate([index[6:], index[:6]]))
    assert [len(r.digits) for r in layout.records] == [3]
    assert min(d.dst_stride for d in layout.records[0].digits) == -48


def test_strides_and_storage_offset_of_a_live_view() -> None:
    # A [6, 4] live view of every second column of a [6, 10] buffer, from element 1.
    layout = arrange((6, 4), word_nbytes=2).to("s", base=1, strides=(10, 2))
    buffer = np.full(60, -1)
    buffer[1:].reshape(-1)[np.arange(6)[:, None] * 10 + np.arange(4) * 2] = np.arange(24).reshape(6, 4)
    assert all(buffer[o] == n for n, o in places(layout).items())


def test_an_empty_slice_has_no_records() -> None:
    layout = arrange((8, 4), word_nbytes=2, start=(8, 0), stop=(8, 4)).pad(0, to=8).swizzle_128x4().to("s")
    assert layout.records == ()
    validate(layout, {})


@pytest.mark.parametrize(
    "build",
    [
        lambda a: a.split(0, 5),
        lambda a: a.merge(1),
        lambda a: a.permute((0, 0)),
        lambda a: a.concat(0, offset=2, total=9),
        lambda a: a.stack(3, 3),
        lambda a: a.shuffle_rows(8),
        lambda a: a.shuffle_rows(16),
        lambda a: a.block_major_k(4),
        lambda a: a.pad(1, to=9).swap_halves(1),
        lambda a: a.split(4, 1),
        lambda a: a.to("s", strides=(1,)),
        # 6 columns padded to 8 and flattened: the digits of the rows (weight 8) do not divide 12.
        lambda a: a.pad(1, to=8).merge(0).pad(0, to=72).split(0, 12),
    ],
)
def test_steps_that_do_not_divide_are_refused(build: Callable[[Arrangement], object]) -> None:
    with pytest.raises(PlanError):
        build(arrange((8, 6), word_nbytes=1))


def test_more_than_eight_digits_are_refused() -> None:
    a = arrange((512,), word_nbytes=1)
    for _ in range(8):
        a = a.split(0, 2)
    rank = len(a.extents)
    with pytest.raises(PlanError, match="9 digits"):
        a.permute(list(reversed(range(rank)))).to("s")


def test_layouts_chain() -> None:
    first = arrange((160, 450), word_nbytes=1).interleave(0, 64, 1).pad(1, multiple=4).to("mid")
    second = arrange((384, 452), word_nbytes=1).swizzle_128x4().to("s")
    direct = arrange((160, 450), word_nbytes=1).interleave(0, 64, 1).swizzle_128x4().to("s")
    assert chained(first, second).records == direct.records


@given(programs(), st.data())
@settings(max_examples=80, deadline=None)
def test_chained_layouts_are_the_composed_function(
    program: tuple[Arrangement, np.ndarray], data: st.DataObject
) -> None:
    a, index = program
    try:
        inner = a.to("mid")
        b, second = arrange(index.shape, word_nbytes=2), np.arange(index.size).reshape(index.shape)
        for _ in range(2):
            b, second = random_step(data.draw, b, second)
        outer = b.to("s")
        both = chained(inner, outer)
    except PlanError:
        assume(False)
    through = places(outer)
    assert places(both) == {number: through[offset] for number, offset in places(inner).items()}


def test_chains_refuse_what_does_not_fit() -> None:
    inner = arrange((8, 6), word_nbytes=1).to("mid")
    with pytest.raises(PlanError, match="do not chain"):
        chained(inner, arrange((48,), word_nbytes=2).to("s"))
    with pytest.raises(PlanError, match="partly outside"):
        chained(inner, arrange((48,), word_nbytes=1, start=(0,), stop=(20,)).to("s"))
    with pytest.raises(PlanError, match="reaches 48 units, the one that it is chained to is of a tensor of 40"):
        chained(inner, arrange((40,), word_nbytes=1).to("s"))


def test_chains_compare_the_intermediate_tensor_where_it_is_told() -> None:
    """Records cannot tell a larger tensor from padding at its end; the arrangement can."""
    a = arrange((8, 6), word_nbytes=1)
    padded = a.pad(0, to=10)
    outer = arrange((10, 6), word_nbytes=1).permute((1, 0)).to("s")
    assert chained(padded.to("mid"), outer, extents=padded.extents).records[0].num_units == 48
    with pytest.raises(PlanError, match=r"\(8, 6\) has 48 units, the layout that it is chained to is of 60"):
        chained(a.to("mid"), outer, extents=a.extents)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda a: a.interleave(0, 0, 0), "groups of 0 rows"),
        (lambda a: a.interleave(0, 2, -1), "part -1 of 2"),
        (lambda a: a.pad(0, multiple=0), "multiple of 0"),
        (lambda a: a.shuffle(0, (4, 2), (0, 0)), r"not an order of the 2 digits"),
        (lambda a: a.to("s", base=-1), "offsets -1..46 leave live storage 's' at its start"),
        (lambda a: a.to("s", strides=(0, 1)), "axis 0 of .* has stride 0"),
        (lambda a: a.to("s", strides=(-6, 1)), "leave live storage 's' at its start"),
    ],
)
def test_steps_that_lead_nowhere_are_refused(build: Callable[[Arrangement], object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build(arrange((8, 6), word_nbytes=1))


def test_strides_that_run_backwards_from_a_base_are_inside() -> None:
    assert places(arrange((8, 6), word_nbytes=1).to("s", base=42, strides=(-6, 1)))[0] == 42


def test_arguments_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="unit 'bit' is neither"):
        arrange((8, 6), word_nbytes=1, unit="bit")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        arrange((8, 6.0), word_nbytes=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="goes by its name, got 7"):
        arrange((8, 6), word_nbytes=1).to(7)  # type: ignore[arg-type]


@given(programs())
@settings(max_examples=80, deadline=None)
def test_inverse_records_lead_back(program: tuple[Arrangement, np.ndarray]) -> None:
    a, _ = program
    try:
        layout = a.to("live")
        assume(len(layout.records) == 1)
        back = inverse(layout.records[0])
    except PlanError:
        assume(False)
    r = layout.records[0]
    local = [np.arange(b - s) for s, b in zip(r.start, r.stop, strict=True)]
    coords = [c.reshape(-1) for c in np.meshgrid(*local, indexing="ij")]
    offsets = r.local_offsets([c + s for c, s in zip(coords, r.start, strict=True)]) - r.base
    mask, numbers = back.offsets([offsets])
    assert mask.all()
    assert np.array_equal(numbers, np.arange(numbers.size))


def test_inverse_refuses_holes() -> None:
    holes: Remap = arrange((4, 6), word_nbytes=1).pad(1, to=8).to("s").records[0]
    with pytest.raises(PlanError, match="holes"):
        inverse(holes)


def test_copies_keep_one_primary() -> None:
    a = arrange((130, 6), word_nbytes=1)
    both = with_copies(a.to("plain"), a.swizzle_128x4().to("image"))
    assert [(r.storage, r.primary) for r in both.records] == [("plain", True), ("image", False)]
    assert both.leading() == both.records[:1]
    with pytest.raises(PlanError, match="another slice"):
        with_copies(a.to("plain"), arrange((130, 7), word_nbytes=1).to("image"))

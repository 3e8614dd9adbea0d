"""Layout documents: one encoding per value, and nothing believed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.errors import FormatError
from megasync.layout import arrange, decode_layouts, encode_layouts, layouts_digest
from megasync.layout import experts as E
from megasync.layout.encoding import decode_layout, encode_layout, layout_digest
from tests.unit.layout_oracles import ALL

LAYOUTS = {f"{case.name}/{name}": layout for case in ALL for name, layout in case.layouts.items()}


def test_every_named_layout_survives_its_encoding() -> None:
    data = encode_layouts(LAYOUTS)
    back = decode_layouts(data)
    assert back == LAYOUTS
    assert encode_layouts(dict(reversed(LAYOUTS.items()))) == data
    assert layouts_digest(back) == layouts_digest(LAYOUTS)
    assert len(layouts_digest(LAYOUTS)) == 16


def test_one_layout_alone() -> None:
    layout = arrange((160, 450), word_nbytes=1).swizzle_128x4().to("s")
    assert decode_layout(encode_layout(layout)) == layout
    other = arrange((160, 450), word_nbytes=1).swizzle_128x4().to("s", base=1)
    assert layout_digest(other) != layout_digest(layout)
    with pytest.raises(FormatError, match="one nameless"):
        decode_layout(encode_layouts({"a": layout}))


def test_the_size_does_not_depend_on_the_number_of_elements() -> None:
    def size(inner: int) -> int:
        place = E.Place(0, 1)
        return len(encode_layout(E.w13_interleaved("up", (inner, inner), place, "s", word_nbytes=1, scales=True)))

    # Up to the digits of the integers themselves.
    assert size(1 << 20) - size(1 << 10) < 64
    assert size(1 << 10) < 400


SMALL = encode_layouts({"a": arrange((8, 6), word_nbytes=2).to("s"), "b": arrange((4,), word_nbytes=1).to("t")})


@pytest.mark.parametrize("length", range(len(SMALL)))
def test_truncated_documents_are_refused(length: int) -> None:
    with pytest.raises(FormatError):
        decode_layouts(SMALL[:length])


@given(st.integers(0, len(SMALL) - 1), st.integers(1, 255))
@settings(max_examples=400, deadline=None)
def test_flipped_bytes_are_refused_or_are_another_document(at: int, flip: int) -> None:
    data = bytearray(SMALL)
    data[at] ^= flip
    try:
        back = decode_layouts(bytes(data))
    except FormatError:
        return
    assert encode_layouts(back) == bytes(data)
    assert layouts_digest(back) != layouts_digest(decode_layouts(SMALL))


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_layouts(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(kind="megasync.schema"), "expected a megasync.layouts"),
        (lambda d: d.update(format=2), "of format 2"),
        (lambda d: d.update(extra=1), "cannot be read"),
        (lambda d: d.update(rows=[d["rows"][0], d["rows"][0]]), "twice"),
        (lambda d: d.update(rows=d["rows"][::-1]), "one encoding"),
        (lambda d: d.update(storages=["s", "t", "u"]), "one encoding"),
        (lambda d: d.update(storages=["s"]), "tensor 'b'"),
        (lambda d: d["rows"][0][1].__setitem__(1, 3), "cannot be read"),
        (lambda d: d["rows"][0][1][5][0].__setitem__(0, [9, 0]), "tensor 'a'"),
        (lambda d: d["rows"][0][1][5][0].__setitem__(6, 1 << 60), "cannot be read"),
        (lambda d: d["rows"][0][1][5][0].__setitem__(5, [[0, 0, 1, 1]] * 9), "cannot be read"),
        (lambda d: d["rows"][0][1][5][0].__setitem__(7, "bit"), "cannot be read"),
        (lambda d: d["rows"][0][1][5][0].append(1), "cannot be read"),
    ],
)
def test_documents_that_break_the_rules_are_refused(change: Callable[[dict], None], message: str) -> None:
    document = msgspec.msgpack.decode(SMALL)
    change(document)
    data = msgspec.msgpack.encode(document, order="deterministic")
    with pytest.raises(FormatError, match=message):
        decode_layouts(data)

"""Writes layouts down: strict msgpack documents and the plan digest.

One value has one encoding, so equal plans have equal digests; the size does not depend on the number of elements.
Before it come layouts from `compose` or `probe`; after it a plan file, or the digest that trainer and receiver
compare. Nothing read is trusted. This module must import nothing of megasync but ``errors``, ``digest`` and ``layout``
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from megasync.digest import XXH3_128, content_digest
from megasync.errors import FormatError
from megasync.layout.modes import Digit, Layout, Remap
from megasync.layout.rules import MAX_DIGITS

FORMAT = 1
KIND = "megasync.layouts"
MAX_DOCUMENT_NBYTES = 1 << 28

_LIMIT = 1 << 52
_Size = Annotated[int, msgspec.Meta(ge=0, le=_LIMIT)]
_Signed = Annotated[int, msgspec.Meta(ge=-_LIMIT, le=_LIMIT)]
_Sizes = Annotated[list[_Size], msgspec.Meta(min_length=1, max_length=16)]
_Axis = Annotated[int, msgspec.Meta(ge=0, lt=16)]
_Axes = Annotated[list[_Axis], msgspec.Meta(min_length=1, max_length=16)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class _Digit(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    axis: _Axis
    extent: _Size
    src_stride: Annotated[int, msgspec.Meta(ge=1, le=_LIMIT)]
    dst_stride: _Signed


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    start: _Sizes
    stop: _Sizes
    origin: _Sizes
    local_shape: _Sizes
    merge: Annotated[list[_Axes], msgspec.Meta(min_length=1, max_length=16)]
    digits: Annotated[list[_Digit], msgspec.Meta(max_length=MAX_DIGITS)]
    base: _Signed
    unit: Literal["word", "nibble"]
    storage: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    primary: bool


class _Layout(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    shape: _Sizes
    word_nbytes: Literal[1, 2, 4, 8]
    start: _Sizes
    stop: _Sizes
    partial: bool
    records: Annotated[list[_Record], msgspec.Meta(max_length=1 << 16)]


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: _Name
    layout: _Layout


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    kind: str
    format: int
    storages: Annotated[list[_Name], msgspec.Meta(max_length=1 << 20)]
    rows: Annotated[list[_Row], msgspec.Meta(max_length=1 << 24)]


def encode_layouts(layouts: Mapping[str, Layout]) -> bytes:
    """Writes the layouts of a rank as one document.

    Args:
        layouts: Canonical name to layout; the order does not matter.

    Returns:
        msgpack bytes, the same for equal layouts.
    """
    storages = sorted({r.storage for layout in layouts.values() for r in layout.records})
    index = {name: i for i, name in enumerate(storages)}
    rows = [_Row(name, _layout_row(layouts[name], index)) for name in sorted(layouts)]
    return msgspec.msgpack.encode(_Document(KIND, FORMAT, storages, rows), order="deterministic")


def decode_layouts(data: bytes) -> dict[str, Layout]:
    """Reads a document of layouts.

    Args:
        data: What `encode_layouts` wrote, from anywhere.

    Returns:
        Canonical name to layout, by name.

    Raises:
        FormatError: The bytes are not exactly one such document in its one encoding, or a record breaks its contract.
            Whether the layouts fit the live storages is for `prove.validate_all` to say.
    """
    if len(data) > MAX_DOCUMENT_NBYTES:
        raise FormatError(f"layout document of {len(data)} bytes: at most {MAX_DOCUMENT_NBYTES} are read")
    try:
        document = msgspec.msgpack.decode(data, type=_Document, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise FormatError(f"layout document of {len(data)} bytes cannot be read: {e}; write it again") from e
    if document.kind != KIND or document.format != FORMAT:
        raise FormatError(
            f"expected a {KIND} document of format {FORMAT}, found {document.kind!r} of format {document.format}"
        )
    out: dict[str, Layout] = {}
    for row in document.rows:
        if row.name in out:
            raise FormatError(f"layout document lists {row.name!r} twice")
        try:
            out[row.name] = _layout_of(row.layout, document.storages)
        except (ValueError, IndexError) as e:
            raise FormatError(f"layout document, tensor {row.name!r}: {e}") from e
    if encode_layouts(out) != data:
        raise FormatError(
            "layout document is not in its one encoding (order, spare names or number widths); write it again"
        )
    return out


def layouts_digest(layouts: Mapping[str, Layout]) -> bytes:
    """The digest of the layouts of a rank.

    Args:
        layouts: Canonical name to layout.

    Returns:
        16 bytes: xxh3-128 of `encode_layouts`.
    """
    return content_digest(encode_layouts(layouts), XXH3_128)


def encode_layout(layout: Layout) -> bytes:
    """Writes one layout, as `encode_layouts` of a nameless tensor would."""
    return encode_layouts({"-": layout})


def decode_layout(data: bytes) -> Layout:
    """Reads what `encode_layout` wrote.

    Args:
        data: The bytes, from anywhere.

    Returns:
        The layout.

    Raises:
        FormatError: As `decode_layouts`, or the document is not of one nameless tensor.
    """
    layouts = decode_layouts(data)
    if list(layouts) != ["-"]:
        raise FormatError(f"expected a document of one nameless layout, found {len(layouts)} names")
    return layouts["-"]


def layout_digest(layout: Layout) -> bytes:
    """The digest of one layout: 16 bytes, xxh3-128 of `encode_layout`."""
    return layouts_digest({"-": layout})


def _layout_row(layout: Layout, index: Mapping[str, int]) -> _Layout:
    records = [
        _Record(
            list(r.start),
            list(r.stop),
            list(r.origin),
            list(r.local_shape),
            [list(g) for g in r.merge],
            [_Digit(d.axis, d.extent, d.src_stride, d.dst_stride) for d in r.digits],
            r.base,
            r.unit,
            index[r.storage],
            r.primary,
        )
        for r in layout.records
    ]
    return _Layout(
        list(layout.shape), _width(layout.word_nbytes), list(layout.start), list(layout.stop), layout.partial, records
    )


def _width(word_nbytes: int) -> Literal[1, 2, 4, 8]:
    assert word_nbytes in (1, 2, 4, 8)  # Layout checks it
    return word_nbytes  # type: ignore[return-value]


def _layout_of(row: _Layout, storages: list[str]) -> Layout:
    records = []
    for r in row.records:
        scale = 2 * row.word_nbytes if r.unit == "nibble" else 1
        records.append(
            Remap(
                shape=(*row.shape[:-1], row.shape[-1] * scale),
                start=tuple(r.start),
                stop=tuple(r.stop),
                origin=tuple(r.origin),
                local_shape=tuple(r.local_shape),
                merge=tuple(tuple(g) for g in r.merge),
                digits=tuple(Digit(d.axis, d.extent, d.src_stride, d.dst_stride) for d in r.digits),
                base=r.base,
                unit=r.unit,
                word_nbytes=1 if r.unit == "nibble" else row.word_nbytes,
                storage=storages[r.storage],
                primary=r.primary,
            )
        )
    return Layout(
        tuple(row.shape), row.word_nbytes, tuple(row.start), tuple(row.stop), tuple(records), partial=row.partial
    )

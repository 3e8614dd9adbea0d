"""The document of a probed plan: strict msgpack, one encoding per plan.

`plan` keeps what is read here and proves it. This module must import nothing of megasync but ``errors`` and ``layout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch

from megasync.errors import FormatError
from megasync.layout.encoding import decode_layouts, encode_layouts
from megasync.layout.live import LiveTensor, Specs
from megasync.layout.modes import Layout

FORMAT = 2
KIND = "megasync.probed-plan"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]


class _Live(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: _Name
    dtype: _Name
    shape: list[_Size]
    stride: list[_Size]
    offset: _Size
    storage: _Name
    storage_nbytes: _Size


class _Spec(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: _Name
    shape: list[_Size]
    dtype: _Name


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    kind: str
    format: int
    specs: list[_Spec]
    layouts: bytes
    live: list[_Live]
    unmapped: dict[_Name, str]
    derived: dict[_Name, str]
    sources: dict[_Name, list[_Name]]
    empty: list[_Name]
    absent: list[_Name]
    unstable: list[_Name]


def encode_plan(
    *,
    specs: Specs,
    layouts: Mapping[str, Layout],
    live: Sequence[LiveTensor],
    unmapped: Mapping[str, str],
    derived: Mapping[str, str],
    sources: Mapping[str, Sequence[str]],
    empty: Sequence[str],
    absent: Sequence[str],
    unstable: Sequence[str],
) -> bytes:
    """Writes the fields of a plan down; arguments as `ProbedPlan`.

    Returns:
        msgpack bytes, the same for equal plans.
    """
    document = _Document(
        kind=KIND,
        format=FORMAT,
        specs=[_Spec(n, list(s), str(d).removeprefix("torch.")) for n, (s, d) in sorted(specs.items())],
        layouts=encode_layouts(layouts),
        live=[
            _Live(r.name, r.dtype, list(r.shape), list(r.stride), r.offset, r.storage, r.storage_nbytes) for r in live
        ],
        unmapped=dict(unmapped),
        derived=dict(derived),
        sources={n: sorted(s) for n, s in sources.items()},
        empty=sorted(empty),
        absent=sorted(absent),
        unstable=sorted(unstable),
    )
    return msgspec.msgpack.encode(document, order="deterministic")


def decode_plan(data: bytes) -> dict[str, Any]:
    """Reads what `encode_plan` wrote, from anywhere.

    Args:
        data: The bytes.

    Returns:
        The arguments of `encode_plan`, which are the fields of a plan. Whether the layouts hold together is not
        checked.

    Raises:
        FormatError: The bytes are not exactly one plan in its one encoding.
    """
    try:
        d = msgspec.msgpack.decode(data, type=_Document, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise FormatError(f"probed plan of {len(data)} bytes cannot be read: {e}; probe again") from e
    if d.kind != KIND or d.format != FORMAT:
        raise FormatError(f"expected a {KIND} of format {FORMAT}, found {d.kind!r} of format {d.format}")
    fields: dict[str, Any] = {
        "specs": {s.name: (tuple(s.shape), _dtype(s.dtype)) for s in d.specs},
        "layouts": decode_layouts(d.layouts),
        "live": tuple(
            LiveTensor(r.name, r.dtype, tuple(r.shape), tuple(r.stride), r.offset, r.storage, r.storage_nbytes)
            for r in d.live
        ),
        "unmapped": d.unmapped,
        "derived": d.derived,
        "sources": {n: tuple(s) for n, s in d.sources.items()},
        "empty": tuple(d.empty),
        "absent": tuple(d.absent),
        "unstable": tuple(d.unstable),
    }
    if encode_plan(**fields) != data:
        raise FormatError("probed plan is not in its one encoding; probe again")
    return fields


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"probed plan names the dtype {name!r}, which this torch does not have")
    return dtype

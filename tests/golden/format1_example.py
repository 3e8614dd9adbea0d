"""The example of ``FORMAT.md``: the smallest run with an anchor and a delta, printed byte by byte.

No plane of it is long enough for Zstd to win, so it is the same with every version of the compression libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import megasync.schema
from megasync.digest import content_digest
from megasync.sinks.base import Sink
from megasync.sinks.memory import MemorySink
from megasync.versions.publication import PublicationReader
from tests.golden import format1_inputs as inputs
from tests.golden.format1_writer import Run

DOCUMENT = Path(megasync.schema.__file__).parent / "FORMAT.md"
OUTER = "zstd 1.5.7 level 1"
"""Fixed, since nothing of the example is in Zstd frames."""
BEGIN, END = "<!-- example: generated, do not edit -->\n", "<!-- end of example -->"
_BLOCK = re.compile(r"^Object `([^`]+)`, (\d+) bytes.*?^```hex\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_example(sink: Sink) -> Iterator[Run]:
    """Write the run ``example``."""
    run = Run.begin(sink, "example", inputs.EXAMPLE_ROWS, outer=OUTER)
    run.anchor(0, run.words, (0,))
    yield run
    run.delta(1, inputs.change(run.words, 1, inputs.EXAMPLE_STEP), ["sparse"])
    yield run


def example_objects() -> dict[str, bytes]:
    """Every object of the example by key, and its head under the key ``(head)``."""
    sink = MemorySink()
    for _ in write_example(sink):
        pass
    return {**{key: sink.read(key) for key in sink.keys("")}, "(head)": sink.read_head("example") or b""}


def objects_in(text: str) -> dict[str, bytes]:
    """The objects that a text prints in hexadecimal.

    Raises:
        ValueError: A block that does not have the size that it says.
    """
    out = {}
    for key, size, block in _BLOCK.findall(text):
        out[key] = bytes.fromhex("".join(line.split("|")[0] for line in block.splitlines()))
        if len(out[key]) != int(size):
            raise ValueError(f"{key}: {len(out[key])} bytes printed, {size} announced")
    return out


def with_example(text: str) -> str:
    """``FORMAT.md`` with its example written anew."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + example_text() + END + rest.split(END)[1]


def example_text() -> str:
    """The example as Markdown."""
    out = ["Its tensors, as words in hexadecimal (most significant digit first), row-major:\n\n```text\n"]
    for run in write_example(MemorySink()):
        for name, words in run.words.items():
            shown = " ".join(f"{w:0{2 * words.itemsize}x}" for w in words.tolist())
            out.append(f"version {run.lineage.version}, {name}: {shown}\n")
    out.append("```\n\n")
    for key, data in example_objects().items():
        out.append(f"Object `{key}`, {len(data)} bytes, xxh3-128 `{content_digest(data).hex()}`:\n\n")
        out.append("```hex\n" + "".join(_lines(data)) + "```\n\n")
        if key.endswith("000000000001/e000001/payload-00000"):
            out.append("Its frames and their planes:\n\n```text\n" + "".join(_planes(data)) + "```\n\n")
        if fields := _fields(key, data):
            out.append("Its fields:\n\n```text\n" + "".join(fields) + "```\n\n")
    return "".join(out)


def _lines(data: bytes) -> Iterator[str]:
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        shown = "".join(chr(b) if 32 <= b < 127 else "." for b in row)
        yield f"{row.hex(' '):<47} | {shown}".rstrip() + "\n"


def _planes(payload: bytes) -> Iterator[str]:
    """Every plane of the delta's payload."""
    sink = MemorySink()
    *_, run = write_example(sink)
    manifest = PublicationReader(sink, "example").newest()
    assert manifest is not None
    for i in range(len(manifest.frames)):
        record = manifest.frames.record(i)
        names = [run.schema.tensors[t].name for t in record.tensor_ids.tolist()]
        yield f"frame {i}, tiles {', '.join(f'{n}:{t}' for n, t in zip(names, record.tiles.tolist(), strict=True))}\n"
        w, at = record.word_nbytes, record.offset
        planes = ["counts", "gap-low", "gap-high", *(f"value {k}" for k in range(w)), *(f"dense {k}" for k in range(w))]
        for name, nbytes in zip(planes, record.plane_nbytes, strict=True):
            yield f"  {at:3} {name:<9} {_shown(payload[at : at + nbytes])}\n"
            at += nbytes


def _fields(key: str, data: bytes) -> list[str]:
    if "payload" in key or "/state/" in key:
        return []
    document = msgspec.msgpack.decode(data)
    if "body" in document:
        body = msgspec.msgpack.decode(document["body"])
        return [f"signature = {_shown(document['signature'])}\nbody:\n", *_listed(body, "  ")]
    return list(_listed(document, ""))


def _listed(document: dict[str, Any], indent: str) -> Iterator[str]:
    for name, value in document.items():
        if name == "tensors":
            yield f"{indent}tensors:\n"
            yield from (f"{indent}  {i}: {row}\n" for i, row in enumerate(value))
        elif name == "frames":
            yield f"{indent}frames:\n"
            yield from _listed(value, indent + "  ")
        else:
            yield f"{indent}{name} = {_shown(value)}\n"


def _shown(value: object) -> str:
    return (value.hex(" ") or "(empty)") if isinstance(value, bytes) else repr(value)

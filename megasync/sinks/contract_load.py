"""Checks of the sink contract under load: threads that race, and an object too large to be copied around.

Part of the suite of ``contract.py``. Must not import trainer, receiver or a test library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from megasync.errors import SinkConflictError
from megasync.sinks.contract_place import Place, expect, in_threads, peak, raises

_MIB = 1 << 20
# What may be in memory beside the object itself: pieces, buffers, the interpreter's own.
_SLACK_NBYTES = 16 * _MIB


def check_head_race(place: Place) -> None:
    """Threads that move one head at once: each move happens once, none is lost."""
    num_threads, num_moves = 8, 8

    def count(index: int) -> None:
        with place.open() as sink:
            for move in range(num_moves):
                while True:
                    found = sink.read_head("run")
                    number = int(found.split()[0]) if found else 0
                    try:
                        sink.swap_head("run", found, f"{number + 1} {index} {move}".encode())
                        break
                    except SinkConflictError:
                        continue

    in_threads(num_threads, count)
    with place.open() as sink:
        found = sink.read_head("run") or b"none"
        expect(found.split()[0] == b"%d" % (num_threads * num_moves), f"moves were lost: {found!r}")


def check_create_race(place: Place) -> None:
    """Threads that create one key at once: equal bytes all succeed, of different bytes one wins and stays whole."""
    num_threads = 6
    won: list[int] = []

    def create(index: int) -> None:
        with place.open() as sink:
            sink.create("run/same", [b"same" * 5000, b"tail"])
            try:
                sink.create("run/differs", [b"%d" % index * 20000, b"tail"])
                won.append(index)
            except SinkConflictError:
                pass

    in_threads(num_threads, create)
    with place.open() as sink:
        expect(len(won) == 1, f"{len(won)} creators of different bytes believe that they won")
        expect(sink.read("run/differs") == b"%d" % won[0] * 20000 + b"tail", "the winner's bytes are there")
        expect(sink.read("run/same") == b"same" * 5000 + b"tail", "equal bytes are there once")
        expect(list(sink.keys("run")) == ["run/differs", "run/same"], "a race left something")


def check_large_object(place: Place) -> None:
    """A large object (64 MiB) passes through, in memory once at most, and not at all where the sink need not hold it."""
    block = hashlib.sha256(b"block").digest() * (_MIB // 32)
    digest = hashlib.sha1(usedforsecurity=False)

    def parts() -> Iterator[bytes]:
        for number in range(place.large_mib):
            part = number.to_bytes(8, "little") + block[8:]
            digest.update(part)
            yield part

    total = place.large_mib * _MIB
    with place.open() as sink:
        with peak(place, total + _SLACK_NBYTES, "creating a large object"):
            expect(sink.create("run/large", parts()) == total, "all bytes were written")
        with place.open() as reader:
            out = bytearray(total)
            with peak(place, _SLACK_NBYTES, "reading a large object into memory"):
                reader.read_into("run/large", 0, memoryview(out))
            found = hashlib.sha1(out, usedforsecurity=False).digest()
            expect(found == digest.digest(), "a large object reads back as it was written")
            with peak(place, total + _SLACK_NBYTES, "reading a large object"):
                expect(reader.read("run/large") == out, "a large object reads back as it was written")
            with peak(place, _SLACK_NBYTES, "creating an equal object"):
                expect(sink.create("run/large", [out]) == total, "an equal large object is success")
            out[-1] ^= 1
            with raises(SinkConflictError, what="a large object that differs in its last byte"):
                sink.create("run/large", [out])

"""The suite that every sink passes; also for sinks that other packages bring.

Each check is a plain function of a ``Place``, a fresh and empty one for each check, and raises AssertionError where the
sink breaks the contract of ``base.py``. With pytest::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
    def test_my_sink(check, tmp_path):
        check(Place(lambda: MySink(tmp_path), url=f"mine://{tmp_path}"))

Checks that need other processes do nothing for a place without ``url``. Must not import trainer, receiver or a test library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from megasync.errors import RefetchError, SinkConflictError
from megasync.sinks.base import MAX_HEAD_NBYTES, Buffer
from megasync.sinks.contract_crash import check_killed_writers, check_process_race
from megasync.sinks.contract_load import check_create_race, check_head_race, check_large_object
from megasync.sinks.contract_place import Place, expect, raises

_MIB = 1 << 20
BAD_KEYS = (
    *("", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/..", ".", "./a", "a/./b", ".hidden", "a/.hidden/b"),
    *("a\\b", "a b", "a\nb", "a\0b", "a:b", "~", "a/~/b", "ключ", "a%2e", "-a", "a" * 201, "a/" * 500 + "a"),
)
BAD_RUNS = ("", "..", "a/b", "/a", ".a", "a\n", "a" * 201)


def check_create_and_read(place: Place) -> None:
    """What one sink object creates, another reads; parts of every kind of buffer are joined in order."""
    with place.open() as writer, place.open() as reader:
        body = bytes(range(256)) * 40
        grid = memoryview(body[100:200]).cast("H", (5, 10))
        parts: list[Buffer] = [body[:100], memoryview(grid), bytearray(body[200:300]), b"", memoryview(body)[300:]]
        expect(writer.create("run/v1/payload", iter(parts)) == len(body), "create returns the bytes written")
        expect(reader.read("run/v1/payload") == body, "an object reads back as it was written")
        expect(isinstance(reader.read("run/v1/payload"), bytes), "read returns bytes")
        expect(reader.size("run/v1/payload") == len(body), "size is the object's")
        with raises(KeyError, what="reading an object that does not exist"):
            reader.read("run/v1/other")
        with raises(KeyError, what="reading a folder"):
            reader.read("run/v1")
        with raises(KeyError, what="size of an object that does not exist"):
            reader.size("run/v1/other")
        with raises(KeyError, what="reading an object that does not exist into memory"):
            reader.read_into("run/v1/other", 0, memoryview(bytearray(1)))
        with raises(TypeError, what="a part that is not contiguous"):
            writer.create("run/v1/strided", [memoryview(body)[::2]])
        with raises(KeyError, what="a creation that raised left an object"):
            reader.size("run/v1/strided")
        expect(bool(writer.describe()), "a sink describes itself")


def check_exclusive_create(place: Place) -> None:
    """Equal bytes are success however they are cut; other bytes are a conflict and change nothing."""
    with place.open() as first, place.open() as second:
        first.create("run/v1/a", [b"one", b"two"])
        expect(second.create("run/v1/a", [b"onetwo"]) == 6, "creating the same again is success")
        expect(first.create("run/v1/a", [b"o", b"net", b"wo"]) == 6, "creating the same again is success")
        for other in (b"onetwO", b"onetw", b"onetwo+", b""):
            with raises(SinkConflictError, what=f"creating {other!r} over other bytes"):
                second.create("run/v1/a", [other])
        expect(first.read("run/v1/a") == b"onetwo", "a conflict changed the object")
        expect(list(first.keys("run")) == ["run/v1/a"], "a conflict left something behind")


def check_nothing_half_done(place: Place) -> None:
    """While an object is being created, and after its creation failed, nobody sees it."""
    with place.open() as writer, place.open() as reader:

        def parts() -> Iterator[bytes]:
            yield b"x" * 3 * _MIB
            with raises(KeyError, what="an object that is being created was visible"):
                reader.size("run/v1/a")
            expect(list(reader.keys("run")) == [], "an object that is being created was listed")
            yield b"y"

        def failing() -> Iterator[bytes]:
            yield b"x" * 3 * _MIB
            raise ZeroDivisionError("the parts broke")

        with raises(ZeroDivisionError, what="an error of the parts"):
            writer.create("run/v1/a", failing())
        with raises(KeyError, what="half an object was left"):
            reader.size("run/v1/a")
        writer.create("run/v1/a", parts())
        expect(reader.size("run/v1/a") == 3 * _MIB + 1, "the object is complete")


def check_ranges(place: Place) -> None:
    """Ranges are exact, and a range that passes the end is refused, never shortened."""
    with place.open() as sink:
        body = bytes(range(250)) * 4
        sink.create("run/a", [body[:10], body[10:600], body[600:]])
        for offset, nbytes in (
            (0, 1000),
            (0, 0),
            (1000, 0),
            (999, 1),
            (5, 20),
            (9, 2),
            (0, None),
            (1000, None),
            (7, None),
        ):
            end = len(body) if nbytes is None else offset + nbytes
            expect(sink.read("run/a", offset, nbytes) == body[offset:end], f"range {offset}, {nbytes}")
        out = bytearray(b"\xee" * 700)
        sink.read_into("run/a", 300, memoryview(out)[50:650])
        expect(bytes(out) == b"\xee" * 50 + body[300:900] + b"\xee" * 50, "read_into writes its range and nothing else")
        sink.read_into("run/a", 1000, memoryview(out)[:0])
        grid = memoryview(bytearray(64)).cast("I", (4, 4))
        sink.read_into("run/a", 3, grid)
        expect(grid.tobytes() == body[3:67], "read_into takes any contiguous memory")
        for offset, nbytes in ((0, 1001), (1000, 1), (1001, 0), (1001, None), (5000, 10), (1 << 62, 1)):
            with raises(RefetchError, what=f"a range past the end: {offset}, {nbytes}"):
                sink.read("run/a", offset, nbytes)
            if nbytes is not None:
                with raises(RefetchError, what=f"a range past the end: {offset}, {nbytes}"):
                    sink.read_into("run/a", offset, memoryview(bytearray(nbytes)))
        for offset, nbytes in ((-1, 1), (0, -1)):
            with raises(ValueError, what=f"a negative range: {offset}, {nbytes}"):
                sink.read("run/a", offset, nbytes)
        with raises(ValueError, what="a negative offset"):
            sink.read_into("run/a", -1, memoryview(bytearray(1)))
        with raises(TypeError, what="memory that cannot be written"):
            sink.read_into("run/a", 0, memoryview(b"read-only"))
        with raises(TypeError, what="memory that is not contiguous"):
            sink.read_into("run/a", 0, memoryview(bytearray(10))[::2])


def check_empty_object(place: Place) -> None:
    """An object without bytes exists, from no parts or from empty ones."""
    with place.open() as sink:
        nothing: list[Buffer] = [b"", bytearray()]
        for key, parts in (("run/none", nothing[:0]), ("run/empty", nothing)):
            expect(sink.create(key, parts) == 0, "an empty object has 0 bytes")
            expect(sink.size(key) == 0, "an empty object exists")
            expect(sink.read(key) == b"", "an empty object reads as nothing")
            expect(sink.create(key, [b""]) == 0, "creating it again is success")
            with raises(SinkConflictError, what="creating other bytes over an empty object"):
                sink.create(key, [b"x"])
            with raises(RefetchError, what="reading past the end of an empty object"):
                sink.read(key, 0, 1)
        expect(list(sink.keys("run")) == ["run/empty", "run/none"], "empty objects are listed")


def check_keys_refused(place: Place) -> None:
    """Keys that could leave the place, or mean two things, are refused before anything is opened."""
    with place.open() as sink:
        out = memoryview(bytearray(1))
        for key in BAD_KEYS:
            calls: tuple[Callable[[str], object], ...] = (
                lambda k: sink.create(k, [b"x"]),
                lambda k: sink.read(k),
                lambda k: sink.read_into(k, 0, out),
                lambda k: sink.size(k),
                lambda k: sink.delete(k),
                *([lambda k: list(sink.keys(k))] if key else []),
            )
            for call in calls:
                with raises(ValueError, what=f"key {key!r}"):
                    call(key)
        for run in BAD_RUNS:
            with raises(ValueError, what=f"run {run!r}"):
                sink.read_head(run)
            with raises(ValueError, what=f"run {run!r}"):
                sink.swap_head(run, None, b"x")
        expect(list(sink.keys("")) == [], "a refused key left something")


def check_listing(place: Place) -> None:
    """Keys below a prefix of whole parts, ascending as text, without heads."""
    with place.open() as sink:
        keys = ["a/b-c/x", "a/b.d", "a/b/x", "a/b/y/z", "a/b0", "ab/x", "a=1/x", "b/x", "A/x", "a/b_/x"]
        for key in keys:
            sink.create(key, [key.encode()])
        sink.swap_head("a", None, b"head")
        for prefix in ("", "a", "a/b", "a/b/y", "a/b/x", "nothing", "a/nothing"):
            wanted = sorted(k for k in keys if not prefix or k.startswith(prefix + "/"))
            expect(list(sink.keys(prefix)) == wanted, f"keys below {prefix!r}")


def check_delete(place: Place) -> None:
    """Deleting is idempotent, takes only its object, and makes the key free again."""
    with place.open() as sink, place.open() as other:
        for key in ("run/v1/a", "run/v1/b", "run/v2/a"):
            sink.create(key, [key.encode()])
        for key in ("run/v1/a", "run/v1/a", "run/v3/a", "never/was", "run/v1"):
            other.delete(key)
        expect(list(sink.keys("run")) == ["run/v1/b", "run/v2/a"], "delete took something else, or nothing")
        with raises(KeyError, what="reading a deleted object"):
            sink.read("run/v1/a")
        sink.create("run/v1/a", [b"new"])
        expect(other.read("run/v1/a") == b"new", "a deleted key can be created again")
        for key in list(sink.keys("run")):
            sink.delete(key)
        expect(list(other.keys("")) == [], "everything was deleted")
        sink.create("run/v1/a/deeper", [b"x"])
        expect(other.read("run/v1/a/deeper") == b"x", "a key that was an object can become a folder")


def check_head(place: Place) -> None:
    """The head moves only from what it is; any bytes come back raw; runs have heads of their own."""
    with place.open() as first, place.open() as second:
        expect(first.read_head("run") is None, "no head before a publisher")
        with raises(SinkConflictError, what="moving a head that does not exist"):
            first.swap_head("run", b"something", b"new")
        expect(second.read_head("run") is None, "a refused move made a head")
        first.swap_head("run", None, b"one")
        with raises(SinkConflictError, what="claiming a run that has a head"):
            second.swap_head("run", None, b"other")
        with raises(SinkConflictError, what="moving a head from an old document"):
            second.swap_head("run", b"on", b"other")
        with raises(SinkConflictError, what="an empty document is not the absence of one"):
            second.swap_head("run", b"", b"other")
        expect(second.read_head("run") == b"one", "a refused move changed the head")
        second.swap_head("run", b"one", b"two")
        expect(first.read_head("run") == b"two", "every sink object sees the head")
        expect(first.read_head("run2") is None, "another run has no head")
        first.swap_head("run2", None, b"x")
        expect(first.read_head("run") == b"two", "another run's head is another one")
        expect(second.heads() in ([], ["run", "run2"]), "a sink lists all runs that have a head, or none")
        first.create("run", [b"an object may have a run's name"])
        expect(first.read_head("run") == b"two", "an object is no head")


def check_head_is_raw(place: Place) -> None:
    """A head that nobody could parse, an empty one, and the largest come back as they are."""
    with place.open() as sink:
        before: bytes | None = None
        for document in (b"", b"\xff\xfe not a document \0", b"{", bytes(MAX_HEAD_NBYTES)):
            sink.swap_head("run", before, document)
            expect(sink.read_head("run") == document, f"a head of {len(document)} bytes comes back raw")
            before = document
        with raises(ValueError, what="a head that is too large"):
            sink.swap_head("run", before, bytes(MAX_HEAD_NBYTES + 1))
        expect(sink.read_head("run") == before, "a refused head changed the head")


def check_timeouts(place: Place) -> None:
    """Every call takes a timeout, and refuses one that is no number of seconds."""
    with place.open() as sink:
        sink.create("run/a", [b"x"], timeout_s=30.0)
        for timeout_s in (-1.0, float("nan"), float("inf")):
            calls: tuple[Callable[..., object], ...] = (
                partial(sink.create, "run/b", [b"x"]),
                partial(sink.read, "run/a"),
                partial(sink.read_into, "run/a", 0, memoryview(bytearray(1))),
                partial(sink.size, "run/a"),
                partial(sink.keys, "run"),
                partial(sink.delete, "run/c"),
                partial(sink.read_head, "run"),
                partial(sink.swap_head, "run", None, b"x"),
            )
            for call in calls:
                with raises(ValueError, what=f"timeout_s {timeout_s}"):
                    call(timeout_s=timeout_s)
        expect(sink.read_head("run") is None, "a refused call had an effect")
        sink.check_room(1)
        expect(sink.sweep() >= 0, "sweep returns bytes")
        expect(sink.read("run/a") == b"x", "sweeping took an object")
    sink.close()


CHECKS: tuple[Callable[[Place], None], ...] = (
    check_create_and_read,
    check_exclusive_create,
    check_nothing_half_done,
    check_ranges,
    check_empty_object,
    check_keys_refused,
    check_listing,
    check_delete,
    check_head,
    check_head_is_raw,
    check_head_race,
    check_create_race,
    check_large_object,
    check_process_race,
    check_killed_writers,
    check_timeouts,
)

"""A sink in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure.

Exclusive creation is a put that fails where the object exists (``If-None-Match: *``); the head moves by a put that
fails where the stored entity tag or generation has changed (``If-Match``). Needs the package obstore (extra ``s3``).
Comes after gather, before fetch. Must not import trainer or receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from megasync.errors import MissingPackageError, RefetchError, RetryError, SinkConflictError
from megasync.sinks.base import (
    DEFAULT_TIMEOUT_S,
    Buffer,
    Deadline,
    Sink,
    byte_views,
    check_head,
    check_key,
    check_prefix,
    check_range,
    check_run,
    describe_head,
    writable_view,
)
from megasync.sinks.loop import LoopThread

T = TypeVar("T")
_RANGE_NBYTES = 8 << 20
_PARALLEL_RANGES = 8
# One put request takes this much at S3 (5 GiB); Azure takes 5,000 MiB, Google more.
MAX_OBJECT_NBYTES = 5000 << 20


def _obstore() -> Any:
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise MissingPackageError(
            "an object store sink needs the package obstore: pip install 'megasync[s3]' (or pip install obstore)"
        ) from error


class ObjectStoreSink(Sink):
    """Objects in a bucket, below a prefix.

    *Memory*: a creation holds views of the parts, not copies; a read into memory holds at most 8 ranges of 8 MiB.
    """

    def __init__(
        self, store: Any, *, head_store: Any = None, name: str = "", max_object_nbytes: int = MAX_OBJECT_NBYTES
    ) -> None:
        """Take a store.

        Args:
            store: An ``obstore.store`` object with conditional puts; a prefix set there is the sink's.
            head_store: The same place through a client that never repeats a request by itself, for moving heads: a
                repeated conditional put meets its own first effect and cannot tell it from another publisher's.
            name: For messages; no credentials in it.
            max_object_nbytes: Largest object: what one put request takes.

        Raises:
            MissingPackageError: obstore is not installed.
        """
        self._obstore = _obstore()
        self._errors = importlib.import_module("obstore.exceptions")
        self._store = store
        self._head_store = head_store if head_store is not None else store
        self._name = name or type(store).__name__
        self._max_object_nbytes = max_object_nbytes
        self._loop = LoopThread("megasync-object-store")

    @classmethod
    def from_url(cls, url: str, *, max_object_nbytes: int = MAX_OBJECT_NBYTES, **config: Any) -> ObjectStoreSink:
        """Open a place.

        Args:
            url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://...`` as obstore reads it; no query.
            max_object_nbytes: Largest object.
            **config: Settings of obstore's store (``region``, ``endpoint``, ``access_key_id`` ...); what is not given
                comes from the cloud's usual places.

        Raises:
            MissingPackageError: obstore is not installed.
            ValueError: A setting that obstore does not know, or a URL that it cannot read.
        """
        _obstore()
        stores = importlib.import_module("obstore.store")
        # The client's own limit is off the table: each call's timeout_s is the limit, whatever the object's size.
        client = {
            "timeout": "7days",
            "connect_timeout": "5s",
            "allow_http": str(config.get("endpoint", "")).startswith("http://"),
        }
        try:
            store, head_store = (
                stores.from_url(url, client_options=client, retry_config=retry, **config)
                for retry in (None, {"max_retries": 0})
            )
        except Exception as error:
            raise ValueError(f"object store sink {url!r} with {sorted(config)}: {_first_line(error)}") from error
        return cls(store, head_store=head_store, name=url, max_object_nbytes=max_object_nbytes)

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.create``. ValueError above ``max_object_nbytes``."""
        check_key(key)
        what = f"create {key!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        views = list(byte_views(parts))
        nbytes = sum(view.nbytes for view in views)
        if nbytes > self._max_object_nbytes:
            raise ValueError(
                f"{what}: {nbytes} bytes, one object takes {self._max_object_nbytes}; spread it over more payloads"
            )
        try:
            self._do(lambda: self._obstore.put_async(self._store, key, views or b"", mode="create"), deadline, what)
        except self._errors.AlreadyExistsError:
            self._do(lambda: self._require_equal(key, views, nbytes, what), deadline, what)
        return nbytes

    async def _require_equal(self, key: str, views: list[memoryview], nbytes: int, what: str) -> None:
        size = (await self._obstore.head_async(self._store, key))["size"]
        equal, at = size == nbytes, 0
        for view in views if equal else []:
            for start in range(0, view.nbytes, _RANGE_NBYTES):
                # As bytes: that is a memcmp, while comparing memoryviews goes element by element.
                piece = bytes(view[start : start + _RANGE_NBYTES])
                stored = await self._obstore.get_range_async(self._store, key, start=at, length=len(piece))
                equal = equal and stored == piece
                at += len(piece)
        if not equal:
            raise SinkConflictError(
                f"{what}: it exists with {size} other bytes; another publisher uses this run: stop this one"
            )

    def read(
        self, key: str, offset: int = 0, nbytes: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """See ``Sink.read``. A small object that is read whole takes one request."""
        check_key(key)
        check_range(key, offset, nbytes, offset + (nbytes or 0))
        what = f"read {key!r} in {self.describe()}"
        return self._do(lambda: self._read(key, offset, nbytes), Deadline(timeout_s), what, key)

    async def _read(self, key: str, offset: int, nbytes: int | None) -> bytes:
        if not nbytes:
            found = await self._obstore.get_async(self._store, key)
            size = found.meta["size"]
            nbytes = check_range(key, offset, nbytes, size)
            if not offset and nbytes == size <= _RANGE_NBYTES:
                return bytes(await found.bytes_async())
        if not nbytes:
            return b""
        # BytesIO hands its bytes on without a copy, which a bytearray could not.
        buffer = io.BytesIO()
        buffer.seek(nbytes - 1)
        buffer.write(b"\0")
        with buffer.getbuffer() as view:
            await self._fill(key, offset, view)
        return buffer.getvalue()

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.read_into``. Large ranges are fetched in parallel."""
        view = writable_view(out)
        check_key(key)
        check_range(key, offset, view.nbytes, offset + view.nbytes)
        what = f"read {key!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        if view.nbytes:
            self._do(lambda: self._fill(key, offset, view), deadline, what, key)
        else:
            check_range(key, offset, 0, self.size(key, timeout_s=timeout_s))

    async def _fill(self, key: str, offset: int, view: memoryview) -> None:
        """Fetch a range in parallel pieces; when this ends, however it does, no piece is still under way."""
        turn = asyncio.Semaphore(_PARALLEL_RANGES)

        async def piece(start: int) -> None:
            length = min(_RANGE_NBYTES, view.nbytes - start)
            async with turn:
                try:
                    data = await self._obstore.get_range_async(self._store, key, start=offset + start, length=length)
                except self._errors.BaseError:
                    # Stores say in different ways that a range begins beyond the end.
                    check_range(key, offset, view.nbytes, (await self._obstore.head_async(self._store, key))["size"])
                    raise
            if len(data) != length:
                check_range(key, offset, view.nbytes, offset + start + len(data))
                raise RefetchError(f"range of {key!r}: {length} bytes asked for, {len(data)} came; fetch it again")
            view[start : start + length] = memoryview(data)

        pieces = [asyncio.ensure_future(piece(start)) for start in range(0, view.nbytes, _RANGE_NBYTES)]
        try:
            await asyncio.gather(*pieces)
        finally:
            for one in pieces:
                one.cancel()
            await asyncio.gather(*pieces, return_exceptions=True)

    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.size``."""
        what = f"size of {key!r} in {self.describe()}"
        check_key(key)
        found = self._do(lambda: self._obstore.head_async(self._store, key), Deadline(timeout_s), what, key)
        return int(found["size"])

    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """See ``Sink.keys``. Listed whole first, since not every store lists in order."""
        check_prefix(prefix)

        async def listing() -> list[str]:
            found: list[str] = []
            async for batch in self._obstore.list(self._store, prefix or None, chunk_size=1000):
                found += [entry["path"] for entry in batch if not entry["path"].startswith(".")]
            return sorted(found)

        return iter(self._do(listing, Deadline(timeout_s), f"list {prefix!r} in {self.describe()}"))

    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.delete``."""
        check_key(key)
        what = f"delete {key!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        with contextlib.suppress(KeyError):
            self._do(lambda: self._obstore.delete_async(self._store, key), deadline, what, key)

    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """See ``Sink.read_head``."""
        check_run(run)
        what = f"read the head of {run!r} in {self.describe()}"
        return self._do(lambda: self._read_head(run), Deadline(timeout_s), what)[0]

    async def _read_head(self, run: str) -> tuple[bytes | None, dict[str, str]]:
        """The document, and what a later conditional put must name."""
        try:
            found = await self._obstore.get_async(self._store, _head_key(run))
        except FileNotFoundError:
            return None, {}
        tags = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}
        return bytes(await found.bytes_async()), tags

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.swap_head``. RetryError too where the swap met a head that equals ``new`` already."""
        check_run(run)
        document = bytes(check_head(new))
        what = f"move the head of {run!r} in {self.describe()}"
        self._do(lambda: self._swap_head(run, expected, document, what), Deadline(timeout_s), what)

    async def _swap_head(self, run: str, expected: bytes | None, new: bytes, what: str) -> None:
        found, tags = await self._read_head(run)
        if found == expected:
            try:
                mode = "create" if found is None else tags
                await self._obstore.put_async(self._head_store, _head_key(run), new, mode=mode, use_multipart=False)
                return
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                found, _ = await self._read_head(run)
            if found == new:
                # Our own put, whose answer was lost on the way and which was sent again, or another publisher's.
                raise RetryError(f"{what}: whether this swap or another's moved it is unknown; read it and decide")
        raise SinkConflictError(
            f"{what}: expected {describe_head(expected)}, found {describe_head(found)}, nothing was changed; another "
            f"publisher moved it: read it again and stop the older publisher"
        )

    def describe(self) -> str:
        """What and where."""
        return f"object store sink {self._name}"

    def close(self) -> None:
        """Stop the thread that talks to the store."""
        self._loop.close()

    def _do(self, work: Callable[[], Awaitable[T]], deadline: Deadline, what: str, key: str | None = None) -> T:
        """Run work against the store within the deadline and turn its errors into ours."""
        try:
            return self._loop.run(work, deadline, what)
        except FileNotFoundError as error:
            if key is None:
                self._refused(error, what)
            raise KeyError(f"no object {key!r} in {self.describe()}") from None
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise
        except self._errors.BaseError as error:
            self._refused(error, what)

    def _refused(self, error: Exception, what: str) -> NoReturn:
        errors = self._errors
        if isinstance(error, errors.NotSupportedError | errors.InvalidPathError):
            raise ValueError(f"{what}: the store cannot do that: {_first_line(error)}") from error
        if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
            raise RetryError(f"{what}: credentials refused, renew them, then retry: {_first_line(error)}") from error
        raise RetryError(
            f"{what}: {_first_line(error)}; whether it took effect is unknown, read again and retry"
        ) from error


def _head_key(run: str) -> str:
    """Begins with a dot, as no object's key does."""
    return f".heads/{run}"


def _first_line(error: Exception) -> str:
    """obstore adds pages of debug output to its messages."""
    return (str(error) or type(error).__name__).splitlines()[0]

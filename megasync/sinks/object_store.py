"""A sink in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure.

Exclusive creation is a put that fails where the object exists (``If-None-Match: *``); the head moves by a put that
fails where the stored entity tag or generation has changed (``If-Match``). Needs the package obstore (extra ``s3``),
used through its blocking calls: measured, a process that ends while a thread of its asynchronous ones still hands a
result to Python may abort. Comes after gather, before fetch. Must not import trainer or receiver.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

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
    head_conflict,
    writable_view,
)

_RANGE_NBYTES = 8 << 20
_COMPARED_NBYTES = 4 << 20
_PARALLEL_RANGES = 8
_KEPT_CLIENTS = 8
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

    A request ends within the call's ``timeout_s``, and no new one begins after that: a call takes at most twice as long.

    *Memory*: a creation holds views of the parts, not copies; a read into memory holds at most 8 ranges of 8 MiB.
    """

    keeps_parts = True

    def __init__(self, store: Any, *, name: str = "", max_object_nbytes: int = MAX_OBJECT_NBYTES) -> None:
        """Take a store.

        Args:
            store: An ``obstore.store`` object with conditional puts, with time limits of its own; or what makes one from
                keyword arguments ``client_options`` and ``retry_config`` as obstore's stores take them. A prefix set
                there is the sink's.
            name: For messages; no credentials in it.
            max_object_nbytes: Largest object: what one put request takes.

        Raises:
            MissingPackageError: obstore is not installed.
        """
        self._obstore = _obstore()
        self._errors = importlib.import_module("obstore.exceptions")
        self._make: Callable[..., Any] = store if callable(store) else lambda **_: store
        self._name = name or type(store).__name__
        self._max_object_nbytes = max_object_nbytes
        self._lock = threading.Lock()
        self._stores: OrderedDict[tuple[float, bool], Any] = OrderedDict()

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
        plain = str(config.get("endpoint", "")).startswith("http://")

        def make(*, client_options: Mapping[str, Any], retry_config: Mapping[str, Any]) -> Any:
            client = {**client_options, "allow_http": plain}
            return stores.from_url(url, client_options=client, retry_config=retry_config, **config)

        sink = cls(make, name=url, max_object_nbytes=max_object_nbytes)
        try:
            sink._store(DEFAULT_TIMEOUT_S)
        except Exception as error:
            raise ValueError(f"object store sink {url!r} with {sorted(config)}: {_first_line(error)}") from error
        return sink

    def _store(self, timeout_s: float, *, repeats: bool = True) -> Any:
        """The client whose requests end within ``timeout_s``: obstore sets that limit per client, not per call."""
        with self._lock:
            found = self._stores.get((timeout_s, repeats))
            if found is None:
                limit = datetime.timedelta(seconds=max(timeout_s, 0.001))
                found = self._make(
                    client_options={"timeout": limit, "connect_timeout": min(limit, datetime.timedelta(seconds=10))},
                    retry_config={"retry_timeout": limit / 2, "max_retries": 10 if repeats else 0},
                )
                self._stores[timeout_s, repeats] = found
                if len(self._stores) > _KEPT_CLIENTS:
                    self._stores.popitem(last=False)
            self._stores.move_to_end((timeout_s, repeats))
            return found

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
        store = self._store(timeout_s)
        with self._refusals(what):
            try:
                self._obstore.put(store, key, views or b"", mode="create")
            except self._errors.AlreadyExistsError:
                self._require_equal(store, key, views, nbytes, deadline, what)
        return nbytes

    def _require_equal(
        self, store: Any, key: str, views: list[memoryview], nbytes: int, deadline: Deadline, what: str
    ) -> None:
        size = self._obstore.head(store, key)["size"]
        equal, at = size == nbytes, 0
        for view in views if equal else []:
            for start in range(0, view.nbytes, _COMPARED_NBYTES):
                deadline.check(what)
                # As bytes: that is a memcmp, while comparing memoryviews goes element by element.
                piece = bytes(view[start : start + _COMPARED_NBYTES])
                equal = equal and self._obstore.get_range(store, key, start=at, length=len(piece)) == piece
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
        deadline = Deadline(timeout_s)
        with self._refusals(what, key):
            if not nbytes:
                found = self._obstore.get(self._store(timeout_s), key)
                size = found.meta["size"]
                nbytes = check_range(key, offset, nbytes, size)
                if not offset and nbytes == size <= _RANGE_NBYTES:
                    return bytes(found.bytes())
            if not nbytes:
                return b""
            # BytesIO hands its bytes on without a copy, which a bytearray could not.
            buffer = io.BytesIO()
            buffer.seek(nbytes - 1)
            buffer.write(b"\0")
            with buffer.getbuffer() as view:
                self._fill(key, offset, view, deadline, what)
            return buffer.getvalue()

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.read_into``. Large ranges are fetched in parallel."""
        view = writable_view(out)
        check_key(key)
        check_range(key, offset, view.nbytes, offset + view.nbytes)
        what = f"read {key!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        if not view.nbytes:
            check_range(key, offset, 0, self.size(key, timeout_s=timeout_s))
            return
        with self._refusals(what, key):
            self._fill(key, offset, view, deadline, what)

    def _fill(self, key: str, offset: int, view: memoryview, deadline: Deadline, what: str) -> None:
        """Fetch a range in parallel pieces; when this ends, however it does, no piece is still under way."""
        store = self._store(deadline.timeout_s)

        def piece(start: int) -> None:
            deadline.check(what)
            length = min(_RANGE_NBYTES, view.nbytes - start)
            try:
                data = self._obstore.get_range(store, key, start=offset + start, length=length)
            except self._errors.BaseError:
                # Stores say in different ways that a range begins beyond the end.
                check_range(key, offset, view.nbytes, self._obstore.head(store, key)["size"])
                raise
            if len(data) != length:
                check_range(key, offset, view.nbytes, offset + start + len(data))
                raise RefetchError(f"range of {key!r}: {length} bytes asked for, {len(data)} came; fetch it again")
            view[start : start + length] = memoryview(data)

        starts = range(0, view.nbytes, _RANGE_NBYTES)
        if len(starts) == 1:
            piece(0)
            return
        with ThreadPoolExecutor(min(_PARALLEL_RANGES, len(starts)), "megasync-range") as pool:
            pieces = [pool.submit(piece, start) for start in starts]
            try:
                for one in pieces:
                    one.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.size``."""
        check_key(key)
        Deadline(timeout_s)
        with self._refusals(f"size of {key!r} in {self.describe()}", key):
            return int(self._obstore.head(self._store(timeout_s), key)["size"])

    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """See ``Sink.keys``. Listed whole first, since not every store lists in order."""
        check_prefix(prefix)
        what = f"list {prefix!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        found: list[str] = []
        with self._refusals(what):
            for batch in self._obstore.list(self._store(timeout_s), prefix or None, chunk_size=1000):
                found += [entry["path"] for entry in batch if not entry["path"].startswith(".")]
                deadline.check(what)
        return iter(sorted(found))

    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.delete``."""
        check_key(key)
        Deadline(timeout_s)
        with contextlib.suppress(KeyError), self._refusals(f"delete {key!r} in {self.describe()}", key):
            self._obstore.delete(self._store(timeout_s), key)

    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """See ``Sink.read_head``."""
        check_run(run)
        Deadline(timeout_s)
        with self._refusals(f"read the head of {run!r} in {self.describe()}"):
            return self._read_head(run, timeout_s)[0]

    def _read_head(self, run: str, timeout_s: float) -> tuple[bytes | None, dict[str, str]]:
        """The document, and what a later conditional put must name."""
        try:
            found = self._obstore.get(self._store(timeout_s), _head_key(run))
        except FileNotFoundError:
            return None, {}
        tags = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}
        return bytes(found.bytes()), tags

    def heads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See ``Sink.heads``."""
        what = f"list the heads in {self.describe()}"
        deadline = Deadline(timeout_s)
        found: list[str] = []
        with self._refusals(what):
            for batch in self._obstore.list(self._store(timeout_s), _head_key("").rstrip("/"), chunk_size=1000):
                found += [entry["path"].removeprefix(_head_key("")) for entry in batch]
                deadline.check(what)
        return sorted(run for run in found if run and "/" not in run)

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.swap_head``. RetryError too where the swap met a head that equals ``new`` already."""
        check_run(run)
        document = bytes(check_head(new))
        Deadline(timeout_s)
        what = f"move the head of {run!r} in {self.describe()}"
        # A client that repeats a conditional put by itself meets its own first effect, and takes it for another's.
        store = self._store(timeout_s, repeats=False)
        with self._refusals(what):
            found, tags = self._read_head(run, timeout_s)
            if found == expected:
                try:
                    mode = "create" if found is None else tags
                    self._obstore.put(store, _head_key(run), document, mode=mode, use_multipart=False)
                    return
                except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                    found, _ = self._read_head(run, timeout_s)
                if found == document:
                    raise RetryError(f"{what}: whether this swap or another's moved it is unknown; read it and decide")
        raise head_conflict(what, expected, found)

    def describe(self) -> str:
        """What and where."""
        return f"object store sink {self._name}"

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            self._stores.clear()

    @contextlib.contextmanager
    def _refusals(self, what: str, key: str | None = None) -> Iterator[None]:
        """Turn the store's errors into ours."""
        try:
            yield
        except FileNotFoundError as error:
            if key is not None:
                raise KeyError(f"no object {key!r} in {self.describe()}") from None
            self._refused(error, what)
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

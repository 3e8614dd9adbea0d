"""A sink in a directory of a file system that trainer and receivers share: local, NVMe, ``/dev/shm``, NFS, Lustre.

An object is written to a temporary file beside its place, made durable, then linked to its name, which fails if the
name exists: a reader finds all of an object or none. The head is swapped under a file lock by renaming a durable file
over it. Readers take no lock and write nothing, so a directory mounted read-only serves receivers. Comes after gather,
before fetch. Must not import trainer or receiver.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator

from megasync.errors import MemoryPlanError, SinkConflictError
from megasync.sinks import local_files as files
from megasync.sinks.base import (
    DEFAULT_TIMEOUT_S,
    MAX_HEAD_NBYTES,
    Buffer,
    Deadline,
    Sink,
    check_head,
    check_key,
    check_prefix,
    check_range,
    check_run,
    head_conflict,
    writable_view,
)

_HEADS = ".heads"
_CREATE_LOCK = ".create.lock"
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def _nothing(point: str) -> None:
    """Default of ``LocalSink.reached``."""


class LocalSink(Sink):
    """Objects as files under a directory.

    Nothing is made before the first write; a directory that does not exist yet reads as an empty sink. A call that the
    kernel itself blocks (a hung NFS mount) is not interrupted: timeouts hold between system calls. Over NFS the lock
    is the server's, and a client cut off while it holds it may lose it: keep heads of such runs to one publisher.

    Attributes:
        directory: Absolute path.
        reached: Called with the name of each step of a write that was just completed (``opened``, ``written``,
            ``durable``, ``linked``, ``unlinked``, ``locked``, ``head durable``, ``head moved``); drills put a crash
            there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Name the directory.

        Args:
            directory: Relative to the current one, or absolute; may be a symbolic link, its contents may not.
        """
        self.directory = os.path.abspath(os.fspath(directory))  # noqa: PTH100
        self.reached: Callable[[str], None] = _nothing

    def create(self, key: str, parts: Iterable[Buffer], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.create``. ValueError where the directory is not writable."""
        *folders, name = check_key(key).split("/")
        what = f"create {key!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        with files.os_errors(what):
            while True:
                with self._folders(folders, create=True, key=key) as chain:
                    written = self._create_in(chain, name, parts, deadline, what)
                    if written is not None:
                        return written
                # The folder was deleted as empty between being opened and being used: make it again.
                deadline.check(what)

    def _create_in(
        self, chain: list[int], name: str, parts: Iterable[Buffer], deadline: Deadline, what: str
    ) -> int | None:
        """Create in an open folder; None where the folder is gone, before any part was read."""
        folder = chain[-1]
        found = files.find_object(name, folder)
        if found is not None:
            with files.closing(found):
                return _require_equal(found, parts, chain, what)
        try:
            temp, descriptor = files.open_temp(folder)
        except FileNotFoundError:
            return None
        try:
            self.reached("opened")
            written = files.write_parts(descriptor, parts, deadline, what)
            self.reached("written")
            os.fsync(descriptor)
            self.reached("durable")
            try:
                self._link(temp, name, chain, deadline, what)
            except FileExistsError:
                return _require_same_file(name, descriptor, chain, what)
            self.reached("linked")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp, dir_fd=folder)
            os.close(descriptor)
        self.reached("unlinked")
        files.make_durable(chain)
        return written

    def _link(self, temp: str, name: str, chain: list[int], deadline: Deadline, what: str) -> None:
        """Give the temporary file its name; FileExistsError where the name is taken."""
        folder = chain[-1]
        try:
            os.link(temp, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            return
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        # A file system without hard links: renaming replaces what is there, so look first, one creator at a time.
        with files.locked(_CREATE_LOCK, chain[0], deadline, what):
            if files.exists(name, folder):
                raise FileExistsError(errno.EEXIST, "exists", name)
            os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)

    def read(
        self, key: str, offset: int = 0, nbytes: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """See ``Sink.read``."""
        deadline = Deadline(timeout_s)
        with self._reading(key) as (descriptor, size, what):
            wanted = check_range(key, offset, nbytes, size)
            data = os.pread(descriptor, wanted, offset) if wanted else b""
            if len(data) < wanted:
                # One system call gives 2 GiB at most. BytesIO hands its bytes on without a second copy.
                buffer = io.BytesIO(data)
                buffer.seek(wanted - 1)
                buffer.write(b"\0")
                with buffer.getbuffer() as view:
                    files.read_range(descriptor, offset, view, deadline, what)
                data = buffer.getvalue()
        return data

    def read_into(self, key: str, offset: int, out: memoryview, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.read_into``."""
        deadline = Deadline(timeout_s)
        view = writable_view(out)
        with self._reading(key) as (descriptor, size, what):
            check_range(key, offset, view.nbytes, size)
            files.read_range(descriptor, offset, view, deadline, what)

    def open_file(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | None:
        """See ``Sink.open_file``."""
        Deadline(timeout_s)
        with self._reading(key) as (descriptor, _, _):
            return os.dup(descriptor)

    def size(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """See ``Sink.size``."""
        Deadline(timeout_s)
        with self._reading(key) as (_, size, _):
            return size

    def keys(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[str]:
        """See ``Sink.keys``. Folder by folder, so a sink of any size is listed in little memory."""
        folders = check_prefix(prefix).split("/") if prefix else []
        return self._walk(folders, prefix and prefix + "/", Deadline(timeout_s))

    def _walk(self, folders: list[str], prefix: str, deadline: Deadline) -> Iterator[str]:
        what = f"list {prefix!r} in {self.describe()}"
        with files.os_errors(what):
            try:
                chain = files.open_chain(self.directory, folders, create=False)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                with os.scandir(chain[-1]) as entries:
                    names = sorted(_listed(entry) for entry in entries if not entry.name.startswith("."))
            finally:
                files.close_all(chain)
        deadline.check(what)
        for name in names:
            if name.endswith("/"):
                yield from self._walk([*folders, name[:-1]], prefix + name, deadline)
            elif name:
                yield prefix + name

    def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.delete``. Folders that are empty then go too."""
        *folders, name = check_key(key).split("/")
        Deadline(timeout_s)
        with files.os_errors(f"delete {key!r} in {self.describe()}"):
            try:
                chain = files.open_chain(self.directory, folders, create=False)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                files.refuse_link(name, chain[-1])
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=chain[-1])
                    os.fsync(chain[-1])
                with contextlib.suppress(OSError):
                    for parent, folder in reversed(list(zip(chain, folders, strict=False))):
                        os.rmdir(folder, dir_fd=parent)
            finally:
                files.close_all(chain)

    def read_head(self, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bytes | None:
        """See ``Sink.read_head``. Takes no lock: the file is only ever replaced as a whole."""
        check_run(run)
        Deadline(timeout_s)
        with files.os_errors(f"read the head of {run!r} in {self.describe()}"):
            try:
                chain = files.open_chain(self.directory, [_HEADS], create=False)
            except FileNotFoundError:
                return None
            try:
                return _read_head(run, chain[-1])
            finally:
                files.close_all(chain)

    def heads(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
        """See ``Sink.heads``."""
        Deadline(timeout_s)
        with files.os_errors(f"list the heads in {self.describe()}"):
            try:
                chain = files.open_chain(self.directory, [_HEADS], create=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            try:
                with os.scandir(chain[-1]) as entries:
                    names = [_listed(entry) for entry in entries if not entry.name.startswith(".")]
            finally:
                files.close_all(chain)
        return sorted(name.removesuffix(".head") for name in names if name.endswith(".head"))

    def swap_head(self, run: str, expected: bytes | None, new: bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """See ``Sink.swap_head``."""
        check_run(run)
        check_head(new)
        what = f"move the head of {run!r} in {self.describe()}"
        deadline = Deadline(timeout_s)
        with files.os_errors(what), self._folders([_HEADS], create=True, key=_HEADS) as chain:
            folder = chain[-1]
            with files.locked(f"{run}.lock", folder, deadline, what):
                self.reached("locked")
                found = _read_head(run, folder)
                if found != expected:
                    raise head_conflict(what, expected, found)
                files.replace_file(f"{run}.head", folder, new, deadline, what, self.reached)
                files.make_durable(chain)

    def check_room(self, nbytes: int) -> None:
        """See ``Sink.check_room``: free space and rights of the directory, or of where it would be made."""
        place = self.directory
        while not os.path.isdir(place) and os.path.dirname(place) != place:  # noqa: PTH112, PTH120
            place = os.path.dirname(place)  # noqa: PTH120
        with files.os_errors(f"check the room in {self.describe()}"):
            found = os.statvfs(place)
        free = found.f_bavail * found.f_frsize
        if nbytes > free or (found.f_files and not found.f_favail):
            raise MemoryPlanError(
                f"{self.describe()} needs {nbytes} bytes, {place} has {free} bytes and {found.f_favail} files free of "
                f"{found.f_blocks * found.f_frsize} bytes in all; make room there "
                f"(/dev/shm in a container: raise its size limit), or point the sink elsewhere"
            )
        if not os.access(place, os.W_OK | os.X_OK):
            raise ValueError(f"{self.describe()} cannot be written: no right to write in {place}")

    def sweep(self, *, min_age_s: float = 3600.0) -> int:
        """See ``Sink.sweep``. A temporary file whose writer lives is locked by it and stays."""
        if not os.path.isdir(self.directory):  # noqa: PTH112
            return 0
        with files.os_errors(f"sweep {self.describe()}"):
            return sum(
                files.sweep_folder(folder, min_age_s)
                for _, _, _, folder in os.fwalk(self.directory, follow_symlinks=False)
            )

    def leftovers(self, prefix: str, *, min_age_s: float = 3600.0) -> list[str]:
        """See ``Sink.leftovers``. By age alone, so that it works where nothing may be locked or written."""
        folder = os.path.join(self.directory, *check_prefix(prefix).split("/"))  # noqa: PTH118
        if os.path.isdir(self.directory) and not os.path.isdir(folder):  # noqa: PTH112
            return []
        with files.os_errors(f"list what was left behind in {self.describe()}"):
            return sorted(
                os.path.relpath(os.path.join(path, name), self.directory)  # noqa: PTH118
                for path, _, _, opened in os.fwalk(folder, follow_symlinks=False)
                for name in files.stale_files(opened, min_age_s)
            )

    def describe(self) -> str:
        """What and where."""
        return f"local sink {self.directory}"

    @contextlib.contextmanager
    def _folders(self, folders: list[str], *, create: bool, key: str) -> Iterator[list[int]]:
        try:
            chain = files.open_chain(self.directory, folders, create=create)
        except NotADirectoryError as error:
            raise ValueError(f"key {key!r} is below the key of an object in {self.describe()}; refused") from error
        try:
            yield chain
        finally:
            files.close_all(chain)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[tuple[int, int, str]]:
        """Open an object: descriptor, bytes, and words for messages."""
        *folders, name = check_key(key).split("/")
        what = f"read {key!r} in {self.describe()}"
        with files.os_errors(what):
            try:
                chain = files.open_chain(self.directory, folders, create=False)
                try:
                    descriptor = files.open_object(name, chain[-1])
                finally:
                    files.close_all(chain)
            except (FileNotFoundError, NotADirectoryError):
                raise KeyError(f"no object {key!r} in {self.describe()}") from None
            with files.closing(descriptor):
                yield descriptor, os.fstat(descriptor).st_size, what


def _listed(entry: os.DirEntry[str]) -> str:
    """Name as it sorts among keys (a folder with its ``/``); empty for what is no object."""
    if entry.is_dir(follow_symlinks=False):
        return entry.name + "/"
    return entry.name if entry.is_file(follow_symlinks=False) else ""


def _require_equal(found: int, parts: Iterable[Buffer], chain: list[int], what: str) -> int:
    """An existing object must have these bytes; durable on return, whoever wrote it."""
    equal, at = files.holds_parts(found, parts)
    if not equal:
        raise SinkConflictError(
            f"{what}: it exists with {os.fstat(found).st_size} other bytes (equal up to about byte {at}); "
            f"another publisher uses this run: stop this one"
        )
    files.make_durable(chain)
    return at


def _require_same_file(name: str, written: int, chain: list[int], what: str) -> int:
    """Another writer was first: its file must hold what was just written to the descriptor."""
    found = files.find_object(name, chain[-1])
    if found is None:
        raise ValueError(f"{what}: the key is the folder of other objects; a key cannot be both")
    with files.closing(found):
        return _require_equal(found, files.file_pieces(written), chain, what)


def _read_head(run: str, folder: int) -> bytes | None:
    found = files.find_object(f"{run}.head", folder)
    if found is None:
        return None
    with files.closing(found):
        return os.pread(found, MAX_HEAD_NBYTES + 1, 0)

"""File system calls of the local sink: folders without symbolic links, temporary files, locks, comparisons.

Every path is walked one part at a time from the sink's own directory, relative to an open folder and without following
links, so that nothing planted below the directory can lead out of it. ``local.py`` builds the sink from these. Must
import nothing of megasync but errors and the sink contract.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from megasync.errors import FormatError, RefetchError, RetryError
from megasync.sinks.base import Buffer, Deadline, byte_views

TEMP_PREFIX = ".tmp-"
_PIECE_NBYTES = 1 << 20
_WRITE_NBYTES = 64 << 20
_ATTEMPTS = 100
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Turn what the operating system says into what the caller should do next.

    Args:
        what: The operation, its key and its place.

    Raises:
        ValueError: The place refuses writing: a receiver's view of a sink, or wrong rights.
        RetryError: The disk is full, or the place failed or vanished for now.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            raise ValueError(
                f"{what}: refused by the file system ({error.strerror}); check its owner and mount"
            ) from error
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"{what}: a name is too long for this file system; nothing was stored") from error
        if error.errno in _FULL:
            raise RetryError(
                f"{what}: no space left ({error.strerror}), nothing was stored; make room, then retry"
            ) from error
        raise RetryError(f"{what}: {error}; whether it took effect is unknown, read again and retry") from error


def open_chain(root: str, folders: Sequence[str], *, create: bool) -> list[int]:
    """Open a folder below ``root`` without following a symbolic link.

    Args:
        root: The sink's directory; it may itself be reached through links.
        folders: Checked parts of a key.
        create: Make what is missing, and make it durable.

    Returns:
        Open descriptors of ``root`` and each folder; the caller closes them.

    Raises:
        FileNotFoundError: A folder does not exist.
        NotADirectoryError: An object is where a folder should be.
        ValueError: ``root`` is a file.
        FormatError: A symbolic link is where a folder should be.
    """
    for attempt in range(_ATTEMPTS):
        chain: list[int] = []
        try:
            chain.append(_open_root(root, create=create))
            for part in folders:
                chain.append(_open_folder(part, chain[-1], create=create))
            return chain
        except FileNotFoundError:
            close_all(chain)
            # While we make folders, ``delete`` may remove the empty one that we are in: begin again.
            if not create or attempt == _ATTEMPTS - 1:
                raise
        except BaseException:
            close_all(chain)
            raise
    raise AssertionError("unreachable")


def _open_root(root: str, *, create: bool) -> int:
    try:
        if create and not os.path.isdir(root):  # noqa: PTH112
            os.makedirs(root, exist_ok=True)  # noqa: PTH103
        return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (NotADirectoryError, FileExistsError) as error:
        raise ValueError(f"{root} is no directory, or is below a file: it cannot be a sink") from error


def _open_folder(part: str, parent: int, *, create: bool) -> int:
    try:
        return os.open(part, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        if not create:
            raise
    except NotADirectoryError:
        refuse_link(part, parent)
        raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, dir_fd=parent)
    return os.open(part, _FOLDER, dir_fd=parent)


def make_durable(chain: Sequence[int]) -> None:
    """Make names durable: the file's, and those of folders that another writer may have made a moment ago."""
    for descriptor in reversed(chain):
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems know no such call on a folder: there the server answers for names.
            if error.errno != errno.EINVAL:
                raise


def replace_file(
    name: str, folder: int, data: bytes, deadline: Deadline, what: str, reached: Callable[[str], None]
) -> None:
    """Put a file in place of another at once; the caller then makes the folder durable."""
    temp, descriptor = open_temp(folder)
    try:
        write_parts(descriptor, [data], deadline, what)
        os.fsync(descriptor)
        reached("head durable")
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)
    reached("head moved")


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of a block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors, each once."""
    for descriptor in descriptors:
        os.close(descriptor)


def refuse_link(name: str, folder: int) -> None:
    """Raise FormatError where ``name`` is a symbolic link: nothing that megasync writes is one."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise FormatError(
                f"{name!r} in the sink's directory is a symbolic link, which could lead out of it: refused; "
                f"remove it and find out who made it"
            )


def open_object(name: str, folder: int) -> int:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: Nothing there, or no regular file.
        FormatError: A symbolic link is there.
    """
    try:
        # Not blocking: opening a planted FIFO would wait for its writer for ever.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(name, folder)
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise FileNotFoundError(errno.ENOENT, "no regular file", name) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "no regular file", name)
    return descriptor


def find_object(name: str, folder: int) -> int | None:
    """Like ``open_object``, but None where there is no such file."""
    try:
        return open_object(name, folder)
    except FileNotFoundError:
        return None


def exists(name: str, folder: int) -> bool:
    """Whether anything has the name, links included."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def open_temp(folder: int) -> tuple[str, int]:
    """Make a temporary file, locked for as long as its writer lives so that ``sweep`` can tell.

    Returns:
        Name and descriptor.
    """
    name = TEMP_PREFIX + secrets.token_hex(12)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    # A file system without locks leaves only the age to tell the leftovers of the dead from the work of the living.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return name, descriptor


def write_parts(descriptor: int, parts: Iterable[Buffer], deadline: Deadline, what: str) -> int:
    """Write the parts one after the other; returns the bytes written."""
    written = 0
    for view in byte_views(parts):
        at = 0
        while at < view.nbytes:
            at += os.write(descriptor, view[at : at + _WRITE_NBYTES])
            deadline.check(what)
        written += at
    return written


def read_range(descriptor: int, offset: int, out: memoryview, deadline: Deadline, what: str) -> None:
    """Fill ``out`` without a copy in between.

    Raises:
        RefetchError: The file ended before ``out`` was full.
    """
    at = 0
    while at < out.nbytes:
        got = os.preadv(descriptor, [out[at:]], offset + at)
        if not got:
            raise RefetchError(f"{what}: the file ended at {offset + at}: it was cut while being read, fetch it again")
        at += got
        if at < out.nbytes:
            deadline.check(what)


def holds_parts(descriptor: int, parts: Iterable[Buffer]) -> tuple[bool, int]:
    """Compare a file with the parts, a piece at a time; returns whether they are equal and the bytes compared."""
    at = 0
    for view in byte_views(parts):
        for start in range(0, view.nbytes, _PIECE_NBYTES):
            # Compared as bytes: that is a memcmp, while comparing memoryviews goes element by element.
            piece = bytes(view[start : start + _PIECE_NBYTES])
            if os.pread(descriptor, len(piece), at) != piece:
                return False, at
            at += len(piece)
    return os.fstat(descriptor).st_size == at, at


def file_pieces(descriptor: int) -> Iterator[bytes]:
    """The bytes of a file, a piece at a time."""
    at = 0
    while piece := os.pread(descriptor, _PIECE_NBYTES, at):
        yield piece
        at += len(piece)


@contextlib.contextmanager
def locked(name: str, folder: int, deadline: Deadline, what: str) -> Iterator[None]:
    """Hold a lock file; the lock of a process that died is free at once, the file stays.

    Raises:
        RetryError: Another process held it for all of the deadline.
    """
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    try:
        pause_s = 0.0005
        while not _try_lock(descriptor):
            deadline.check(f"{what}: another process holds the lock {name}")
            time.sleep(min(pause_s, deadline.left_s()))
            pause_s = min(2 * pause_s, 0.02)
        try:
            yield
        finally:
            # Unlocked, not only closed: a child forked meanwhile shares the descriptor and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise ValueError(
                "the file system of the sink has no file locks, without which a head cannot move safely: "
                "mount it with locks (flock), or take another sink"
            ) from error
        raise
    return True


def sweep_folder(folder: int, min_age_s: float) -> int:
    """Remove the temporary files of dead writers from one folder; returns the bytes removed."""
    removed = 0
    for name in stale_files(folder, min_age_s):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not _has_writer(name, folder):
                os.unlink(name, dir_fd=folder)
                removed += found.st_size
    return removed


def stale_files(folder: int, min_age_s: float) -> list[str]:
    """Temporary files of one folder that nobody wrote to for so long."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.startswith(TEMP_PREFIX) and e.is_file(follow_symlinks=False)]
    stale = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime >= min_age_s:
                stale.append(name)
    return stale


def _has_writer(name: str, folder: int) -> bool:
    descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return False

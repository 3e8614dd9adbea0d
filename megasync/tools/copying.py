"""Copying a checkpoint folder for ``megasync apply``: all of it or nothing, whatever else happens to the target.

The copy is made in a folder of this call alone, beside the target, and is renamed to the target when it is whole.
Before rebuild, which writes into the copy. Must import nothing of megasync but errors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megasync.errors import FormatError

_STALE_S = 3600.0
_PIECE_NBYTES = 1 << 26
_PLAIN_NBYTES = 1 << 20
_NO_RANGE_COPY = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ETXTBSY)
"""What ``copy_file_range`` says where the two file systems cannot do it together: then bytes are read and written."""

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


@dataclass
class Listing:
    """What a checkpoint holds.

    Attributes:
        root: The folder.
        folders: Folders below it, parents first, relative.
        files: Regular files and links to them, relative.
    """

    root: Path
    folders: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def listing_of(base: Path) -> Listing:
    """List a checkpoint before anything is made or copied; links are followed.

    Args:
        base: Its folder, or its one file.

    Raises:
        FormatError: It holds what is neither a regular file nor a folder (a FIFO, a socket, a device), a link that leads
            nowhere, or one that leads back to a folder that it is in; all are named.
    """
    if not base.is_dir():
        return Listing(base.parent, [], [Path(base.name)])
    out, wrong = Listing(base), list[str]()
    _list(base, Path(), (), out, wrong)
    if wrong:
        raise FormatError(
            f"{base} cannot be copied: {'; '.join(wrong[:10])}; nothing was written. Remove them, or give a folder without them"
        )
    return out


def _list(base: Path, at: Path, above: tuple[tuple[int, int], ...], out: Listing, wrong: list[str]) -> None:
    here = (base / at).stat()
    inside = (*above, (here.st_dev, here.st_ino))
    for name in sorted(os.listdir(base / at)):  # noqa: PTH208
        path = at / name
        try:
            found = (base / path).stat()
        except OSError as e:
            wrong.append(f"{path} is a link that leads nowhere ({e.strerror})")
            continue
        if stat.S_ISREG(found.st_mode):
            out.files.append(path)
        elif not stat.S_ISDIR(found.st_mode):
            wrong.append(f"{path} is neither a regular file nor a folder")
        elif (found.st_dev, found.st_ino) in inside:
            wrong.append(f"{path} is a link back to a folder that it is in")
        else:
            out.folders.append(path)
            _list(base, path, inside, out, wrong)


def copy(listing: Listing, out: Path) -> None:
    """Copy what was listed into an empty folder; holes stay holes.

    Raises:
        FormatError: A file was cut meanwhile.
    """
    for folder in listing.folders:
        (out / folder).mkdir()
    for file in listing.files:
        copy_file(listing.root / file, out / file)


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file to a new name, by the kernel where it can, else by reading and writing.

    Raises:
        OSError: Naming both files where the system names none.
        FormatError: The source was cut meanwhile.
    """
    try:
        _copy_file(source, target)
    except OSError as e:
        if e.filename is not None:
            raise
        raise OSError(e.errno, e.strerror, str(source), None, str(target)) from e


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb") as a, target.open("xb") as b:
        size = os.fstat(a.fileno()).st_size
        b.truncate(size)
        at = 0
        while at < size:
            start, at = _data_after(a.fileno(), at, size)
            _copy_range(a.fileno(), b.fileno(), start, at, source)


def _data_after(source: int, at: int, size: int) -> tuple[int, int]:
    """The next stretch of data; everything up to the end where the file system knows no holes."""
    try:
        start = os.lseek(source, at, os.SEEK_DATA)
        return start, min(os.lseek(source, start, os.SEEK_HOLE), size)
    except OSError as e:
        if e.errno == errno.ENXIO:  # no data behind ``at``: the rest is a hole
            return size, size
        return at, size


def _copy_range(source: int, target: int, start: int, stop: int, name: Path) -> None:
    plain = False
    while start < stop:
        try:
            if plain:
                done = os.pwrite(target, os.pread(source, min(stop - start, _PLAIN_NBYTES), start), start)
            else:
                done = os.copy_file_range(source, target, min(stop - start, _PIECE_NBYTES), start, start)
        except OSError as e:
            if plain or e.errno not in _NO_RANGE_COPY:
                raise
            plain = True
            continue
        if not done and plain:
            raise FormatError(f"{name} ends at byte {start}: it was cut while it was copied; nothing was kept")
        plain = plain or not done  # some file systems answer 0 instead of an error
        start += done


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """A new folder that takes the target's name when the block ends without an error; else nothing of it is left.

    What killed calls for the same target left behind more than an hour ago is removed.

    Args:
        target: Where the folder shall appear; must not exist.

    Yields:
        An empty folder beside it, this call's alone.

    Raises:
        FileExistsError: The target exists, or came to exist meanwhile.
        OSError: Of the block, naming the target where the system names nothing, or a file in the folder that is gone then.
    """
    _refuse_existing(target)
    new_parents = [p for p in target.parents if not p.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    folder = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}")
    try:
        folder.mkdir()
        with _held(folder):
            yield folder
            # Renaming would replace an empty folder, or a link, that another one made meanwhile.
            _refuse_existing(target)
            try:
                folder.rename(target)
            except OSError as e:
                if e.errno in _TAKEN:
                    raise FileExistsError(
                        f"{target} came to exist meanwhile and was left as it is: give another --out"
                    ) from e
                raise
    except BaseException as e:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(e, OSError) and e.errno and _is_unnamed(e, folder):
            raise OSError(e.errno, f"{os.strerror(e.errno)}; nothing was kept", str(target)) from e
        raise


def _is_unnamed(error: OSError, folder: Path) -> bool:
    """Whether an error names no file, or one in a folder whose name means nothing to who gave the target."""
    names = [str(n) for n in (error.filename, error.filename2) if n is not None]
    return not names or any(n == str(folder) or n.startswith(f"{folder}{os.sep}") for n in names)


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists: give a new directory for --out")


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}.megasync-apply-"


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, by which others see that its maker lives; where there are no locks, its age has to do."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(target: Path) -> None:
    ours = re.compile(re.escape(_prefix(target)) + "[0-9a-f]{16}")
    for found in target.parent.iterdir():
        if not ours.fullmatch(found.name):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(found, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime >= _STALE_S:
                    shutil.rmtree(found, ignore_errors=True)
            finally:
                os.close(descriptor)

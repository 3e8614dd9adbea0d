"""The status file of one engine rank: which version it holds, and whether it may serve.

Written before the first byte of an update (``updating``) and after its proof (``serving``): a restart that finds
anything but ``serving`` knows that the weights may be torn. JSON, replaced whole: temporary file, fsync, rename, fsync
of the directory. Must import nothing above errors.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megasync.errors import FormatError, RetryError

State = Literal["new", "behind", "serving", "updating", "tainted"]
_STATES = ("new", "behind", "serving", "updating", "tainted")
FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of one engine rank.

    Attributes:
        run: Name of the run.
        state: ``new`` (never joined), ``behind`` (joined at an older version, takes no traffic yet), ``serving``,
            ``updating`` (bytes may be torn), ``tainted`` (bytes are in an unknown state: never serves again).
        version: Version that was last proven, -1 where none was.
        manifest: Manifest digest of that version, hex.
        target: Version that an update was leading to while ``updating``, else -1.
        reason: Why, for people.
    """

    run: str
    state: State = "new"
    version: int = -1
    manifest: str = ""
    target: int = -1
    reason: str = ""

    @property
    def torn(self) -> bool:
        """Whether the weights may be neither the old version's nor the new one's."""
        return self.state in ("updating", "tainted")


class StatusFile:
    """The status of one engine rank, durable where it has a path.

    Args:
        run: Name of the run.
        path: The file; its directory must exist. None keeps the status in memory only: a restart then knows nothing.

    Raises:
        FormatError: The file is there but cannot be read: treat the engine as torn, load an anchor or remove the file.
        ValueError: The file is of another run, is a directory, or its directory does not exist.

    Attributes:
        path: The file.
        found: What it said when it was opened.
        now: The status.
        asleep: Version that the engine's ``resume`` failed for, None while it is awake; of this process only.
    """

    def __init__(self, run: str, path: Path | str | None = None) -> None:
        path = None if path is None else Path(path)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            fault = "is a directory" if path.is_dir() else f"cannot be written: there is no directory {path.parent}"
            raise ValueError(f"status file {path} {fault}: give each rank a file of its own in a directory that exists")
        self.path = path
        self.asleep: int | None = None
        self.found = _read(path) if path is not None and path.exists() else None
        if self.found is not None and self.found.run != run:
            raise ValueError(
                f"status file {path} is of run {self.found.run!r}, expected {run!r}: give each run and rank its own file"
            )
        self.now = self.found or Status(run)

    def set(self, *, durable: bool = True, **changes: object) -> Status:
        """Replace fields of the status; durable when this returns.

        Raises:
            RetryError: The file cannot be written.

        Args:
            durable: Raise where the file cannot be written. False where the file says less than is true until then
                (``updating`` after a proof): the failure is logged, and the status in memory is replaced.
            changes: Fields of `Status`. ``target`` and ``reason`` are cleared where not given.
        """
        fresh: dict[str, object] = {"target": -1, "reason": ""}
        status = replace(self.now, **(fresh | changes))  # type: ignore[arg-type]
        if self.path is not None:
            try:
                _write(self.path, status)
            except OSError as e:
                if durable:
                    raise RetryError(
                        f"status file {self.path} cannot be written ({e}): nothing was touched. Make room, or make it writable, "
                        "then try again"
                    ) from e
                said = (
                    ""
                    if self.now.state == status.state
                    else f": it still says {self.now.state!r}, not {status.state!r}"
                )
                _log.error("status file %s cannot be written%s: %s", self.path, said, e)
        self.now = status
        return status


def _read(path: Path) -> Status:
    try:
        fields = json.loads(path.read_bytes())
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        status = Status(**fields)
        typed = isinstance(status.version, int) and isinstance(status.run, str) and isinstance(status.reason, str)
        if status.state not in _STATES or not typed:
            raise ValueError("fields out of range")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FormatError(
            f"status file {path} is unreadable ({e}): whether the weights are whole is unknown. Load the weights anew and "
            "remove the file, or load an anchor"
        ) from e
    return status


def _write(path: Path, status: Status) -> None:
    data = json.dumps({"format": FORMAT, **asdict(status)}, indent=1).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""Where the results of a benchmark go, and whether they can, which is known before anything is measured.

``out`` (``--out``) means the same to every benchmark: a path that ends in ``.jsonl`` is the file of its rows, any other is the
folder in which that file gets the benchmark's own name. What else a benchmark writes lies beside the file. Nothing is made
here. Between the command line (entry) and rows; must not import torch.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

ROWS = ".jsonl"


def result_file(out: str | Path, name: str) -> Path:
    """The file of rows that ``out`` asks for.

    Args:
        out: Of a command line.
        name: The file's own name, for an ``out`` that is a folder.
    """
    path = Path(out)
    return path if path.suffix == ROWS else path / name


def out_fault(name: str, out: str) -> str:
    """Why rows cannot be written to ``out``; empty where they can.

    Args:
        name: As the command line has it: ``out=`` or ``--out ``.
        out: What was given.
    """
    path = Path(out)
    is_file = path.suffix == ROWS
    if not out:
        why = "an empty path"
    elif is_file and (said := _no_file(path)):
        why = said
    else:
        why = _unwritable(path.parent if is_file else path)
    wanted = f"give a folder that can be written to, or a path in one that ends in {ROWS} for the file itself"
    return f"{name}{out}: {why}: {wanted}" if why else ""


def folder_fault(name: str, folder: str) -> str:
    """Why files cannot be made in a folder, which need not be there yet; empty where they can. See ``out_fault``."""
    why = _unwritable(Path(folder)) if folder else "an empty path"
    return f"{name}{folder}: {why}: give a folder that can be written to" if why else ""


def emptied_fault(name: str, folder: str, mark: str) -> str:
    """Why a folder cannot be emptied and written to; empty where it can. See ``out_fault``.

    Args:
        name: As the command line has it.
        folder: What was given.
        mark: What an earlier run has left in it (a local sink has ``.heads``): a folder with other things and without this one
            is somebody else's.
    """
    if fault := folder_fault(name, folder):
        return fault
    path = Path(folder)
    if path.is_dir() and any(path.iterdir()) and not (path / mark).exists():
        return f"{name}{folder}: would be emptied, and holds what no earlier run has left: give a folder of its own"
    return ""


def trace_fault(name: str, path: str) -> str:
    """Why a trace cannot be written to a path; empty where it can. See ``out_fault``."""
    if not path.endswith(".json.gz") or Path(path).is_dir():
        return f"{name}{path}: expected a file that ends in .json.gz, which is what trace viewers open"
    why = _unwritable(Path(path).parent)
    return f"{name}{path}: {why}: give a path in a folder that can be written to" if why else ""


def _no_file(path: Path) -> str:
    """Why a path cannot be a file's, whatever its folder is."""
    try:
        return "is a folder" if stat.S_ISDIR(os.stat(path).st_mode) else ""  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as e:  # a name that is too long
        return str(e.strerror or e)


def _unwritable(folder: Path) -> str:
    """Tried where the folder would be made: access bits say little to root and on odd file systems."""
    at = folder
    if str(folder).startswith("~"):
        return "~ is no folder, and no shell put one in its place: write $HOME"
    try:
        at = folder.absolute()
        while not os.path.lexists(at):
            at = at.parent
        if not at.is_dir():
            return f"{at} is no folder"
        with tempfile.TemporaryFile(dir=at):
            return ""
    except OSError as e:
        return f"nothing can be made in {at} ({e.strerror or e})"

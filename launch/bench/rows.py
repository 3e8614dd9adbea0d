"""Result rows: one JSON line a sample, with the machine, the versions and the commit in each; and tables made from them.

Every benchmark writes through ``RowWriter``, so that one reader makes all tables and figures. Raw samples stay in the
repository. Must import no megasync module that needs a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

import numpy as np

T = TypeVar("T")
Row = dict[str, Any]

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("megasync", "torch", "triton", "numpy", "zstandard", "cramjam", "xxhash", "msgspec")


@dataclass(frozen=True, slots=True)
class Timed:
    """What one piece of work took.

    Attributes:
        seconds: Wall time.
        cpu_s: Processor time of this process, all threads: what counts where other processes share the cores.
    """

    seconds: float
    cpu_s: float

    def __add__(self, other: Timed) -> Timed:
        return Timed(self.seconds + other.seconds, self.cpu_s + other.cpu_s)


def timed(work: Callable[[], T]) -> tuple[T, Timed]:
    """Run work on the host and time it."""
    cpu, wall = time.process_time(), time.perf_counter()
    out = work()
    return out, Timed(time.perf_counter() - wall, time.process_time() - cpu)


def environment() -> Row:
    """Device, driver, versions and commit: where samples were taken."""
    found: Row = {"cpu": _cpu_name(), "cores": os.cpu_count(), "device": _cpu_name(), "driver": ""}
    found |= _gpu()
    found["python"] = platform.python_version()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"commit": _commit()}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> Row:
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        driver = []
    cuda = torch.version.cuda or ""
    return {"device": torch.cuda.get_device_name(), "driver": driver[0] if driver else "", "cuda": cuda}


def _commit() -> str:
    """Commit of the checkout, with ``+`` where files of it were changed; ``none`` outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return (head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")) or "none"
    except OSError:
        return "none"


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of ``path`` at the end of the block: until then, and where it breaks off, it is named ``.part``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w") as out:
        yield out
    part.replace(path)


class RowWriter:
    """Writes the rows of one run to one file, ``replacing`` it when the run is over.

    Args:
        path: The file, named by what was measured and where: ``payload-cpu.jsonl``.
        stage: What is measured; a column of every row.
        kept: Rows of earlier runs that stay in the file, before the new ones.
    """

    def __init__(self, path: Path, stage: str, kept: Sequence[Row] = ()) -> None:
        self.path, self.stage, self._kept = path, stage, kept
        self.rows: list[Row] = []
        self._where = environment()

    def __enter__(self) -> RowWriter:
        self._replacing = replacing(self.path)
        self._file = self._replacing.__enter__()
        self._file.writelines(json.dumps(row) + "\n" for row in self._kept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._replacing.__exit__(kind, error, at)

    def add(
        self,
        case: str,
        *,
        nbytes_in: int,
        nbytes_out: int,
        density: float | None = None,
        sample: int = 0,
        took: Timed | None = None,
        **more: Any,
    ) -> Row:
        """Write one sample.

        Args:
            case: What was worked on, and how.
            nbytes_in: Bytes taken in.
            nbytes_out: Bytes given out.
            density: Changed bytes / all bytes.
            sample: Number of the sample.
            took: Wall and processor seconds; None where only sizes are measured.
            more: Further columns.
        """
        row: Row = {"stage": self.stage, "case": case, "sample": sample, "density": density}
        row |= {"nbytes_in": nbytes_in, "nbytes_out": nbytes_out}
        if took is not None:
            row |= {"seconds": round(took.seconds, 6), "cpu_s": round(took.cpu_s, 6)}
            row["load"] = round(os.getloadavg()[0], 2)  # above the cores in use, wall time counts others' work too
        row |= more | self._where
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self.rows.append(row)
        return row


def read_rows(path: Path) -> list[Row]:
    """All rows of a result file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def middle(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    p20, p50, p80 = np.percentile(np.array(list(values), dtype=np.float64), (20, 50, 80)).tolist()
    return p50, p20, p80


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for a terminal and for Markdown: first column left, others right."""
    rows = [list(header), *(list(line) for line in lines)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(header))]

    def text(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([text(rows[0]), rule, *(text(r) for r in rows[1:])])

"""Shows that the case tests bite: each guard is taken out of a copy of the tree, and its test must then fail.

``python tests/mutations.py`` copies the tree to a temporary folder, runs every test named in mutations.toml there once as it
is, then makes one change after the other, each alone, runs only the test that goes with it, and prints what became of it.
The checkout itself is never written and nothing
of it is imported. Not part of the test suite (minutes); launch/nightly.sh runs it.

Exit status: 0 when every mutant was killed, 1 when one survived, was out of date or could not be judged, 2 when a test
fails without any mutation.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
COPIED = ("megasync", "launch", "configs", "tests", "pyproject.toml", "README.md")
_PROGRESS = re.compile(r"[.sxX]*[FE]")  # pytest's marks, of which one is a failure
_FAILED, _PASSED = 1, 0  # exit statuses of pytest; others mean that it could not run the test
_WARM = ("torch", "torch.distributed", "numpy", "msgspec", "xxhash", "zstandard", "cramjam")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one file.

    Attributes:
        file: Path in the tree.
        old: Text that must be there exactly once.
        new: What takes its place.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutation:
    """A guard taken out, and the test that must notice.

    Attributes:
        case: Number in cases.md, or a word for what has none.
        guard: What is taken out.
        test: pytest id, from the root of the tree.
        edits: The changes, made together.
    """

    case: str
    guard: str
    test: str
    edits: tuple[Edit, ...]

    @property
    def title(self) -> str:
        """For people."""
        return f"case {self.case}: {self.guard}" if self.case[0].isdigit() else f"{self.case}: {self.guard}"


def read_table(path: Path) -> list[Mutation]:
    """The mutations of a table.

    Args:
        path: TOML file of ``[[mutation]]`` with ``case``, ``guard``, ``test`` and either ``file``, ``old``, ``new`` or a
            list ``edit`` of such.

    Raises:
        ValueError: A row without what it needs.
    """
    found = []
    for row in tomllib.loads(path.read_text())["mutation"]:
        edits = row.pop("edit", None) or [{k: row.pop(k) for k in ("file", "old", "new") if k in row}]
        try:
            found.append(Mutation(edits=tuple(Edit(**e) for e in edits), **row))
        except TypeError as e:
            raise ValueError(f"{path.name}: {row.get('guard', row)}: {e}") from e
    return found


def copy_tree(folder: Path) -> None:
    """Copy what the tests need; no caches, no results, no environment."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results", ".*"))
        else:
            shutil.copy2(ROOT / name, folder / name)


def stale(mutation: Mutation, folder: Path) -> str:
    """Why a mutation cannot be made in this tree, empty where it can."""
    for e in mutation.edits:
        times = (folder / e.file).read_text().count(e.old) if (folder / e.file).is_file() else -1
        if times != 1:
            return f"{e.file}: its text is there {max(times, 0)} times, expected once"
    return ""


@contextmanager
def mutated(mutation: Mutation, folder: Path) -> Iterator[None]:
    """The tree with a mutation, put back afterwards."""
    before = {f: (folder / f).read_text() for f in {e.file for e in mutation.edits}}
    try:
        for e in mutation.edits:
            path = folder / e.file
            path.write_text(path.read_text().replace(e.old, e.new))
        _forget_bytecode(folder, before)
        yield
    finally:
        for file, text in before.items():
            (folder / file).write_text(text)
        _forget_bytecode(folder, before)


def _forget_bytecode(folder: Path, files: Sequence[str] | dict[str, str]) -> None:
    """Compiled code is found by whole seconds and sizes: a quick change of equal length would not be seen."""
    for file in files:
        Path(importlib.util.cache_from_source(str(folder / file))).unlink(missing_ok=True)


def run_tests(folder: Path, tests: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Run some tests of the copy in a fork of this process, which has everything but the copy imported.

    Args:
        folder: The copy.
        tests: pytest ids.
        timeout_s: Seconds for each test, and with some more for all of them.

    Returns:
        pytest's exit status, None where it had to be killed, and what it said.
    """
    arguments = ["-q", "-p", "no:cacheprovider", f"--timeout={timeout_s:g}", *tests]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os._exit(_in_copy(folder, lambda: int(pytest.main(arguments))))
        status = _wait(child, 60 + timeout_s * len(tests))
        said.seek(0)
        return status, said.read()


def _in_copy(folder: Path, work: Callable[[], int]) -> int:
    """Body of a forked process: work in the copy, and nothing of the checkout."""
    status = 99
    try:
        os.chdir(folder)
        sys.path[:] = [str(folder), *(p for p in sys.path if p and Path(p) not in (ROOT, ROOT / "tests"))]
        os.environ |= {"PYTHONPATH": str(folder)} | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        imported = [importlib.import_module(name).__path__[0] for name in ("megasync", "launch")]
        if all(Path(path).is_relative_to(folder) for path in imported):
            status = work()
        else:
            print(f"the copy in {folder} is not what Python imports: {imported}")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _wait(child: int, timeout_s: float) -> int | None:
    """Exit status of a forked process; it and what it started are killed where it takes too long."""
    handle = os.pidfd_open(child)
    try:
        done = bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
    if not done:
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if done else None


def judge(mutation: Mutation, folder: Path, timeout_s: float) -> tuple[str, str]:
    """Make one mutation and run its test.

    Returns:
        ``killed``, ``SURVIVED``, ``STALE`` or ``BROKEN``, and details.
    """
    if why := stale(mutation, folder):
        return "STALE", why
    with mutated(mutation, folder):
        for e in mutation.edits:
            try:
                compile((folder / e.file).read_text(), e.file, "exec")
            except SyntaxError as error:
                return "BROKEN", f"{e.file} is no Python with it: {error}"
        status, said = run_tests(folder, [mutation.test], timeout_s)
        if status is None and _PROGRESS.match(said):
            status = _FAILED  # it failed, and what it left did not end
    if status == _FAILED:
        lines = [line for line in said.splitlines() if re.match(r"E  +\S", line)]
        return "killed", lines[-1][1:].strip()[:160] if lines else ""
    if status == _PASSED:
        return "SURVIVED", mutation.test
    return "BROKEN", f"pytest ended with {status}: {said[-600:]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutations; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="PATTERN", help="regular expression; matched with title, test and files")
    parser.add_argument("--timeout", type=float, default=90.0, metavar="S", help="seconds for each test (default: 90)")
    parser.add_argument("--list", action="store_true", help="only show the table")
    parser.add_argument("--verbose", action="store_true", help="say what each killed mutant was killed by")
    arguments = parser.parse_args(argv)
    chosen = [
        m
        for m in read_table(TABLE)
        if not arguments.only
        or re.search(arguments.only, " ".join((m.title, m.test, *(e.file for e in m.edits))), re.IGNORECASE)
    ]
    if arguments.list or not chosen:
        for m in chosen:
            print(f"{m.title}\n    {', '.join(dict.fromkeys(e.file for e in m.edits))} -> {m.test}")
        print(f"{len(chosen)} mutations")
        return 0 if chosen else 2
    verdicts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="megasync-mutations-") as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        for module in _WARM:
            importlib.import_module(module)
        tests = list(dict.fromkeys(m.test for m in chosen))
        start = time.monotonic()
        status, said = run_tests(folder, tests, arguments.timeout)
        print(
            f"{len(tests)} tests without a mutation: {'pass' if status == 0 else 'FAIL'}, {time.monotonic() - start:.0f} s"
        )
        if status:
            print(said[-6000:])
            return 2
        for number, m in enumerate(chosen, 1):
            start = time.monotonic()
            verdict, details = judge(m, folder, arguments.timeout)
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            print(f"{number:3}/{len(chosen)} {verdict:8} {time.monotonic() - start:5.1f} s  {m.title}", flush=True)
            if verdict != "killed" or (arguments.verbose and details):
                print(f"        {details}", flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items())))
    return 0 if set(verdicts) == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main())

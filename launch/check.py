"""Composes and checks the configuration before anything starts, and makes the output folder ready.

    python launch/check.py [overrides]

Prints the number of trainer ranks and the output folder for launch/demo.sh. Exit status 2: the configuration cannot run,
with what to do on stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.checks import check
from launch.compose import compose, unusable

_MARK = ".megasync-demo"
"""File by which an output folder is known for one of a demo."""

_FOLDERS = ("samples", "sink")
_FILES = ("trainer.jsonl", "rollout.jsonl", "trainer.log", "rollout.log", "report.json", "picture.svg", "picture.png")


def clear(out: Path) -> None:
    """Make the output folder and remove what an earlier run left in it, and nothing else.

    Raises:
        ValueError: Something of these names is there, and no demo has been.
    """
    there = [name for name in (*_FOLDERS, *_FILES) if os.path.lexists(out / name)]
    if there and not (out / _MARK).exists():
        raise ValueError(
            f"out={out} holds {', '.join(there)}, which no demo put there (there is no {_MARK}) and this one would remove: give "
            "another folder, or move them away"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).touch()
    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in _FILES:
        (out / name).unlink(missing_ok=True)


def main(overrides: list[str]) -> int:
    """Check, clear, print.

    Returns:
        Exit status.
    """
    try:
        s = check(compose(overrides))
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    try:
        clear(Path(s.out))
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    except OSError as e:
        print(unusable(s.out, e), file=sys.stderr)
        return 2
    print(s.parallel.ranks, s.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command line: ``megasync diff | apply | inspect | verify``, for people by default and for machines with ``--json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasync import __version__
from megasync.codecs.choice import AUTO
from megasync.codecs.registry import codecs
from megasync.errors import MegasyncError
from megasync.sinks import open_sink
from megasync.tools.diff import diff
from megasync.tools.examine import examine, runs_of, verify
from megasync.tools.rebuild import rebuild

EXIT_FAULT = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        Exit status: 0 done, 1 something is wrong with what was read, 2 the call was wrong.
    """
    arguments = _parser().parse_args(argv)
    try:
        with open_sink(arguments.sink) as sink:
            result, status = arguments.work(arguments, sink)
    except (MegasyncError, OSError) as e:
        return _complain(arguments, e, EXIT_FAULT)
    except (ValueError, TypeError, KeyError) as e:
        return _complain(arguments, e, EXIT_USAGE)
    if arguments.json:
        print(json.dumps(result, indent=2, sort_keys=True))
    else:
        print(_text(result))
    return int(status)


def _complain(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    if arguments.json:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=2))
    print(f"megasync: {type(error).__name__}: {error}", file=sys.stderr)
    return status


def _diff(a: argparse.Namespace, sink: Any) -> tuple[dict[str, Any], int]:
    return asdict(diff(a.base, a.new, sink, run=a.run, codec=a.codec)), 0


def _apply(a: argparse.Namespace, sink: Any) -> tuple[dict[str, Any], int]:
    return asdict(rebuild(a.base, sink, a.out, run=a.run, version=a.version)), 0


def _inspect(a: argparse.Namespace, sink: Any) -> tuple[dict[str, Any], int]:
    return {"sink": sink.describe(), "runs": [examine(sink, run) for run in _runs(a, sink)]}, 0


def _verify(a: argparse.Namespace, sink: Any) -> tuple[dict[str, Any], int]:
    reports = [verify(sink, run) for run in _runs(a, sink)]
    good = bool(reports) and not any(r.faults for r in reports)
    return {"good": good, "runs": [asdict(r) for r in reports]}, 0 if good else EXIT_FAULT


def _runs(a: argparse.Namespace, sink: Any) -> list[str]:
    found = [a.run] if a.run else runs_of(sink)
    if not found:
        raise ValueError(f"{sink.describe()} holds no run; name it with --run if it was claimed but never published")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megasync", description="XOR deltas between versions of a model's weights.")
    parser.add_argument("--version", action="version", version=f"megasync {__version__}")
    sub = parser.add_subparsers(required=True, metavar="COMMAND")
    names = [*(n for n in codecs() if n != "anchor"), AUTO]

    def command(name: str, work: Any, help: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=help, description=help)
        p.set_defaults(work=work)
        p.add_argument("--json", action="store_true", help="print JSON for machines")
        return p

    p = command("diff", _diff, "publish the difference of two checkpoints")
    p.add_argument(
        "base", metavar="BASE_DIR", type=Path, help="checkpoint of the run's head (version 0 of a fresh run)"
    )
    p.add_argument("new", metavar="NEW_DIR", type=Path, help="the same tensors, other bytes")
    p.add_argument("--sink", required=True, help="directory or URL to publish to")
    p.add_argument("--run", default="run", help="name of the run (default: run)")
    p.add_argument("--codec", default="sparse", choices=names, metavar="C", help=f"one of {', '.join(names)}")
    p = command("apply", _apply, "rebuild the checkpoint of a version")
    p.add_argument("base", metavar="BASE_DIR", type=Path, help="checkpoint of any version of the run")
    p.add_argument("--sink", required=True, help="directory or URL of the run")
    p.add_argument("--run", default="run", help="name of the run (default: run)")
    p.add_argument("--version", type=int, metavar="V", help="wanted version (default: the head's)")
    p.add_argument("--out", required=True, type=Path, help="new directory")
    for name, work, help in (
        ("inspect", _inspect, "show the versions of a run"),
        ("verify", _verify, "read everything and compare all digests; the exit status says whether all is whole"),
    ):
        p = command(name, work, help)
        p.add_argument("sink", metavar="SINK", help="directory or URL")
        p.add_argument("--run", help="only this run")
    return parser


def _text(value: Any, indent: int = 0) -> str:
    """Nested dicts and lists as indented lines; lists of flat rows as a table."""
    pad = " " * indent
    if isinstance(value, dict):
        lines = []
        for k, v in value.items():
            if (isinstance(v, dict) and v) or (isinstance(v, list) and v and isinstance(v[0], dict)):
                lines.append(f"{pad}{k}:\n{_text(v, indent + 2)}")
            else:
                lines.append(f"{pad}{k}: {_flat(v)}")
        return "\n".join(lines)
    if isinstance(value, list):
        return f"\n{pad}--\n".join(_text(v, indent) for v in value)
    return f"{pad}{_flat(value)}"


def _flat(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(str, value[:20])) + (f" ... ({len(value)} in all)" if len(value) > 20 else "") or "none"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())

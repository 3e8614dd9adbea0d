"""The command line: ``megasync diff | apply | inspect | verify``, for people by default and for machines with ``--json``.

Nothing heavy is imported before ``main`` runs, so that an interruption at any moment ends in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from megasync import __version__
from megasync.errors import MegasyncError

if TYPE_CHECKING:
    from megasync.sinks import Sink

EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
EXIT_TERMINATED = 143
_OWN_MEMORY = ("memory://", "pg://")
_GIVEN = {
    "base": "BASE_DIR is empty, expected a checkpoint's directory or file",
    "new": "NEW_DIR is empty, expected a checkpoint's directory or file",
    "sink": "the sink is empty, expected a directory or a URL",
    "out": "--out is empty, expected a new directory",
    "run": "--run is empty, expected a run's name",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        Exit status: 0 done, 1 something is wrong with what was read or cannot be written, 2 the call was wrong, 130
        interrupted (Ctrl-C), 143 terminated, 141 whoever read the output went away. Nothing half-made is left by any.
    """
    try:
        with _terminable():
            return _run(sys.argv[1:] if argv is None else list(argv))
    except _TerminatedError:
        _say(sys.stderr, "megasync: terminated; nothing half-made was left")
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        _say(sys.stderr, "megasync: interrupted; nothing half-made was left")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _give_up_output()
        return EXIT_PIPE
    except _OutputError as e:
        _give_up_output()
        _say(sys.stderr, f"megasync: the output could not be written: {e}")
        return EXIT_FAULT


def _run(argv: list[str]) -> int:
    arguments = _parser("--json" in argv).parse_args(argv)
    try:
        _require_given(arguments)
        result, status = arguments.work(arguments)
    except (MegasyncError, OSError) as e:
        return _complain(arguments.json, e, EXIT_FAULT)
    except (ValueError, TypeError, KeyError) as e:
        return _complain(arguments.json, e, EXIT_USAGE)
    from megasync.tools.text import text_of

    _print(json.dumps(result, indent=2, sort_keys=True) if arguments.json else text_of(result))
    return int(status)


def _require_given(a: argparse.Namespace) -> None:
    """Refuse empty names: a path made of one is the working directory, an empty run would be all of them."""
    for name, fault in _GIVEN.items():
        if isinstance(given := getattr(a, name, None), str) and not given.strip():
            raise ValueError(f"{fault}: is a variable of the shell not set? Nothing was touched")


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM came: like Ctrl-C, all that was begun is undone on the way out."""


class _OutputError(Exception):
    """Standard output took no more."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM end the block by an exception, where this may be asked for and nobody else asked for something."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield
        return

    def terminate(number: int, frame: object) -> NoReturn:
        raise _TerminatedError

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _print(text: str) -> None:
    """Write to standard output, now: what fails only at exit ends in a traceback.

    Raises:
        BrokenPipeError, _OutputError: It was not written.
    """
    try:
        print(_encodable(text, sys.stdout), flush=True)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise _OutputError(str(e)) from e


def _say(stream: TextIO, text: str) -> None:
    """Write a message; a stream that is closed is no reason for another one."""
    with contextlib.suppress(OSError, ValueError):
        print(_encodable(text, stream), file=stream, flush=True)


def _encodable(text: str, stream: TextIO) -> str:
    """Text with what the stream cannot encode (surrogates, letters outside its character set) written as escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _give_up_output() -> None:
    """Point standard output nowhere, so that what Python still flushes at exit fails no more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _complain(as_json: bool, error: Exception, status: int) -> int:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    _say(sys.stderr, f"megasync: {type(error).__name__}: {text}")
    if as_json:
        _print(json.dumps({"error": type(error).__name__, "message": text}, indent=2))
    return status


def _diff(a: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from dataclasses import asdict

    from megasync.tools.diff import diff

    with _sink(a) as sink:
        return asdict(diff(Path(a.base), Path(a.new), sink, run=a.run, codec=a.codec)), 0


def _apply(a: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from dataclasses import asdict

    from megasync.tools.rebuild import rebuild

    with _sink(a) as sink:
        return asdict(rebuild(Path(a.base), sink, Path(a.out), run=a.run, version=a.version)), 0


def _inspect(a: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from megasync.tools.examine import examine

    with _sink(a) as sink:
        shown = [examine(sink, run) for run in _runs(a, sink)]
        return {"sink": sink.describe(), "runs": shown}, EXIT_FAULT if any(r["faults"] for r in shown) else 0


def _verify(a: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from dataclasses import asdict

    from megasync.tools.examine import verify

    with _sink(a) as sink:
        reports = [verify(sink, run) for run in _runs(a, sink)]
    good = bool(reports) and not any(r.faults for r in reports)
    return {"good": good, "runs": [asdict(r) for r in reports]}, 0 if good else EXIT_FAULT


def _sink(a: argparse.Namespace) -> Sink:
    from megasync.sinks import open_sink

    if a.sink.lower().startswith(_OWN_MEMORY):
        raise ValueError(
            f"sink {a.sink!r} lives in the processes of a job: this command would see an empty one and lose what it writes; "
            "give a directory or an object store"
        )
    return open_sink(a.sink)


def _runs(a: argparse.Namespace, sink: Sink) -> list[str]:
    from megasync.tools.examine import runs_of

    if a.run and sink.read_head(a.run) is None and a.run not in (known := runs_of(sink)):
        raise ValueError(f"{sink.describe()} holds no run {a.run!r}; it holds {known or 'none'}")
    found = [a.run] if a.run else runs_of(sink)
    if not found:
        raise ValueError(f"{sink.describe()} holds no run; name it with --run if it was claimed but never published")
    return found


class _Parser(argparse.ArgumentParser):
    """Tells a wrong call as JSON too, where JSON is asked for."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        """Complain and exit with 2."""
        _say(sys.stderr, f"{self.format_usage()}{self.prog}: error: {message}")
        if self.as_json:
            _print(json.dumps({"error": "UsageError", "message": message}, indent=2))
        raise SystemExit(EXIT_USAGE)


def _parser(as_json: bool = False) -> argparse.ArgumentParser:
    from megasync.codecs.choice import codec_names

    names = codec_names()
    kind: type[_Parser] = type("_Parser", (_Parser,), {"as_json": as_json})
    parser = kind(prog="megasync", description="XOR deltas between versions of a model's weights.")
    parser.add_argument("--version", action="version", version=f"megasync {__version__}")
    sub = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=kind)

    def command(name: str, work: Any, help: str) -> argparse.ArgumentParser:
        p = sub.add_parser(name, help=help, description=help)
        p.set_defaults(work=work)
        p.add_argument("--json", action="store_true", help="print JSON for machines")
        return p

    p = command("diff", _diff, "publish the difference of two checkpoints")
    p.add_argument("base", metavar="BASE_DIR", help="checkpoint of the run's head (version 0 of a fresh run)")
    p.add_argument("new", metavar="NEW_DIR", help="the same tensors, other bytes")
    p.add_argument("--sink", required=True, help="directory or URL to publish to")
    p.add_argument("--run", default="run", help="name of the run (default: run)")
    p.add_argument("--codec", default="sparse", choices=names, metavar="C", help=f"one of {', '.join(names)}")
    p = command("apply", _apply, "rebuild the checkpoint of a version")
    p.add_argument(
        "base",
        metavar="BASE_DIR",
        help="checkpoint of the wanted version or an earlier one; any one of the model where the run starts with an anchor",
    )
    p.add_argument("--sink", required=True, help="directory or URL of the run")
    p.add_argument("--run", default="run", help="name of the run (default: run)")
    p.add_argument(
        "--version", type=int, metavar="V", help="wanted version, not before the base's (default: the head's)"
    )
    p.add_argument("--out", required=True, help="new directory")
    for name, work, help in (
        ("inspect", _inspect, "show the versions of a run, from its documents alone (verify reads the payloads)"),
        ("verify", _verify, "read everything and compare all digests; the exit status says whether all is whole"),
    ):
        p = command(name, work, help)
        p.add_argument("sink", metavar="SINK", help="directory or URL")
        p.add_argument("--run", help="only this run")
    return parser


if __name__ == "__main__":
    sys.exit(main())

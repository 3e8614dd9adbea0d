"""Checks of the sink contract with several processes: heads that race, and writers that are killed.

Part of the suite of ``contract.py``; does nothing for a place that other processes cannot open. The other processes run
this module; what they are to do comes on their standard input, so that a secret is in no list of processes. Must not
import trainer, receiver or a test library.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from megasync.errors import SinkConflictError
from megasync.sinks.base import Sink
from megasync.sinks.contract_place import Place, expect
from megasync.sinks.faulty import Fault, FaultySink
from megasync.sinks.registry import open_sink

_NUM_PROCESSES, _NUM_MOVES = 3, 12
# (operation, which one, before or after its effect): every place between two operations of a publication.
_DEATHS = [("create", n, when) for n in (1, 2, 3) for when in ("before", "after")]
_DEATHS += [("swap_head", 1, "before"), ("swap_head", 1, "after")]
_OLD, _NEW = b"v1 run/v1/manifest", b"v2 run/v2/manifest"


def check_process_race(place: Place) -> None:
    """Processes that move one head at once: each move happens once, none is lost."""
    if not place.url:
        return
    jobs = [{"job": "count", "index": index} for index in range(_NUM_PROCESSES)]
    codes = _run_all(place, jobs)
    expect(codes == [0] * _NUM_PROCESSES, f"a process that moves a head failed: exit codes {codes}")
    with place.open() as sink:
        found = sink.read_head("run") or b"none"
        expect(found.split()[0] == b"%d" % (_NUM_PROCESSES * _NUM_MOVES), f"moves were lost: {found!r}")


def check_killed_writers(place: Place) -> None:
    """A writer killed between any two operations leaves a head whose publication is whole, and the next one goes on."""
    if not place.url:
        return
    runs = [f"run{number}" for number in range(len(_DEATHS))]
    with place.open() as sink:
        for run in runs:
            publish(sink, run, 1, None, _OLD)
    codes = _run_all(place, [{"job": "die", "deaths": list(zip(runs, _DEATHS, strict=True))}])
    expect(codes == [0], f"the process that has writers killed failed: exit code {codes}")
    with place.open() as sink:
        for run, death in zip(runs, _DEATHS, strict=True):
            head = sink.read_head(run)
            moved = death == ("swap_head", 1, "after")
            expect(head == (_NEW if moved else _OLD), f"{run}, killed at {death}: head {head!r}")
            for version in (1, 2) if moved else (1,):
                for key, body in objects(run, version).items():
                    expect(sink.read(key) == body, f"{run}, killed at {death}: {key} is not whole")
            for key in sink.keys(run):
                version = int(key.split("/")[1][1:])
                expect(sink.read(key) == objects(run, version)[key], f"{run}, killed at {death}: {key} is half done")
            publish(sink, run, 2, head, _NEW)
            expect(sink.read_head(run) == _NEW, f"{run}, killed at {death}: the next publisher is stuck")


def objects(run: str, version: int) -> dict[str, bytes]:
    """The objects of a small publication, in the order in which they are created."""
    folder = f"{run}/v{version}"
    return {
        f"{folder}/payload-0": b"payload 0 of %d " % version * 1000,
        f"{folder}/payload-1": b"payload 1 of %d " % version * 500,
        f"{folder}/manifest": b"manifest of %d" % version,
    }


def publish(sink: Sink, run: str, version: int, expected: bytes | None, head: bytes) -> None:
    """Publish as a trainer does: payloads, manifest, head."""
    for key, body in objects(run, version).items():
        sink.create(key, [body[:100], body[100:]])
    sink.swap_head(run, expected, head)


def _run_all(place: Place, jobs: list[dict[str, Any]]) -> list[int]:
    """Run jobs in processes, at once; returns their exit codes."""
    command = [sys.executable, "-c", "from megasync.sinks import contract_crash; contract_crash.main()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps({"url": place.url, "options": dict(place.options), **job}).encode())
            process.stdin.close()
        return [process.wait(60) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def main() -> None:
    """Do the job of a child process."""
    order = json.load(sys.stdin)
    jobs: dict[str, Callable[[dict[str, Any]], None]] = {"count": _count, "die": _die}
    jobs[order["job"]](order)


def _count(order: dict[str, Any]) -> None:
    with open_sink(order["url"], **order["options"]) as sink:
        for move in range(_NUM_MOVES):
            while True:
                found = sink.read_head("run")
                number = int(found.split()[0]) if found else 0
                try:
                    sink.swap_head("run", found, f"{number + 1} {order['index']} {move}".encode())
                    break
                except SinkConflictError:
                    continue


def _die(order: dict[str, Any]) -> None:
    """Fork a writer for each death: a fork costs less than an interpreter, and this process has one thread only."""
    children = []
    for run, (operation, nth, when) in order["deaths"]:
        child = os.fork()
        if not child:
            fault = Fault(operation, nth=nth, when=when, action=lambda: os.kill(os.getpid(), signal.SIGKILL))
            publish(FaultySink(open_sink(order["url"], **order["options"]), [fault]), run, 2, _OLD, _NEW)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if codes != [-signal.SIGKILL] * len(codes):
        sys.exit(f"writers were to be killed, but ended with {codes}")

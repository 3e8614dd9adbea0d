"""What lies under a run's name, by its keys alone, and whether a head was lost that all of it hung from.

Asked where a run has no head: by who claims one, and by the tools. Must not import trainer or receiver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from megasync.sinks.base import DEFAULT_TIMEOUT_S, Sink

_OBJECT = re.compile(r"v([0-9]{12,19})/e([0-9]{6,19})/(manifest\Z|payload-)")


@dataclass
class Objects:
    """What lies under a run's name, by its keys alone.

    Attributes:
        manifests: Version and epoch of each manifest, newest first.
        payloads: Payloads.
        schemas: Schemas.
        state_tables: Tables of state digests.
    """

    manifests: list[tuple[int, int]] = field(default_factory=list)
    payloads: int = 0
    schemas: int = 0
    state_tables: int = 0

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.manifests or self.payloads or self.schemas or self.state_tables)

    def __str__(self) -> str:
        """In words; "nothing" where there is nothing."""
        versions = {version for version, _ in self.manifests}
        parts = [f"{'manifests' if len(versions) > 1 else 'a manifest'} of {spans(versions)}"] if versions else []
        for count, one, many in (
            (self.payloads, "payload", "payloads"),
            (self.schemas, "schema", "schemas"),
            (self.state_tables, "table of state digests", "tables of state digests"),
        ):
            parts += [f"{count} {one if count == 1 else many}"] if count else []
        return ", ".join(parts) or "nothing"


def objects_of(sink: Sink, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Objects:
    """List what lies under a run's name."""
    out = Objects()
    for key in sink.keys(run, timeout_s=timeout_s):
        rest = key.removeprefix(f"{run}/")
        if rest.startswith("schema/"):
            out.schemas += 1
        elif rest.startswith("state/"):
            out.state_tables += 1
        elif found := _OBJECT.match(rest):
            if found[3] == "manifest":
                out.manifests.append((int(found[1]), int(found[2])))
            else:
                out.payloads += 1
    out.manifests.sort(reverse=True)
    return out


def spans(versions: Iterable[int]) -> str:
    """Versions in words, such as ``versions 0 to 4, 7``."""
    numbers = sorted(set(versions))
    parts: list[list[int]] = []
    for v in numbers:
        if parts and parts[-1][-1] == v - 1:
            parts[-1] = [parts[-1][0], v]
        else:
            parts.append([v])
    listed = ", ".join(" to ".join(map(str, p)) for p in parts)
    return f"version{'s' if len(numbers) > 1 else ''} {listed}"


def lost_head(sink: Sink, run: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
    """What to say of a run that has versions, or parts of some, and no head; empty where that is not so.

    The head is asked last: a publisher claims it before it writes anything, so that whatever was listed had one.
    """
    there = objects_of(sink, run, timeout_s=timeout_s)
    if not (there.manifests or there.payloads) or sink.read_head(run, timeout_s=timeout_s) is not None:
        return ""
    return without_head(sink, run, there)


def without_head(sink: Sink, run: str, there: Objects) -> str:
    """The same in words, for what was listed of a run that has no head."""
    where = sink.describe()
    if there.manifests:
        return (
            f"the head of run {run!r} is missing from {where}, though {there} are there: it was deleted or never copied along, "
            "and without it nobody finds these versions. Put the head back from a copy of the sink"
        )
    if not there:
        return f"run {run!r} has no publication in {where}: nothing lies there under its name. Look at the name and the place"
    return (
        f"run {run!r} has neither a head nor a manifest in {where}, only {there}, which nothing names: left of a run that was "
        "deleted in part. Put head and manifests back from a copy of the sink, or delete the rest"
    )

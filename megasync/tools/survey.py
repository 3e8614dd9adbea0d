"""What of a run can be read, whatever of it is damaged: the head's chain, and below a break whatever else lies there.

Before it comes a sink; after it examine.py shows and verifies what is found here. Reads documents only, no payload. Must not import diff, rebuild or examine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megasync.errors import MegasyncError
from megasync.manifest import Head, Manifest, manifest_key
from megasync.sinks.base import Sink
from megasync.versions.inventory import Objects, objects_of, spans, without_head
from megasync.versions.publication import PublicationReader


@dataclass
class Survey:
    """What was found of a run.

    Attributes:
        reader: Of the run.
        head: Its head; None where it is missing or cannot be read.
        chains: Manifests that can be read, each list oldest first and linked by digests. The first one ends at the version
            that the head names, unless that cannot be read.
        reached: Digests of the manifests that the head leads to.
        started: Digests of those that an anchor or a checkpoint leads to.
        unreadable: Versions whose manifest is named or lies there, and is damaged, gone or refused.
        faults: What is wrong with head and manifests; empty for a run whose head's chain is whole, or that was claimed and
            has no version yet.
        objects: What lies there; None where the head's chain is whole, since then nobody has to look.
    """

    reader: PublicationReader
    head: Head | None = None
    chains: list[list[Manifest]] = field(default_factory=list)
    reached: set[bytes] = field(default_factory=set)
    started: set[bytes] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    objects: Objects | None = None
    _told: set[str] = field(default_factory=set, repr=False)

    @property
    def manifests(self) -> list[Manifest]:
        """All manifests that can be read, by version."""
        return sorted((m for chain in self.chains for m in chain), key=lambda m: (m.version, m.epoch))

    def link_of(self, manifest: Manifest) -> str:
        """How a manifest hangs together with the others: ``whole``, ``unchained`` (no anchor or checkpoint leads to it),
        ``unreached`` (the head does not lead to it), or the last two.
        """
        lacks = ["unchained"] if manifest.digest not in self.started else []
        lacks += ["unreached"] if manifest.digest not in self.reached else []
        return ", ".join(lacks) or "whole"

    def _tell(self, key: str, error: MegasyncError) -> None:
        """Add a fault, with the key that it is about; what is wrong with many (a schema that is gone) is said once."""
        text = str(error)
        if text not in self._told:
            self._told.add(text)
            self.faults.append(text if key in text else f"{key}: {text}")

    def _walk(self, newest: Manifest, known: set[bytes]) -> list[Manifest]:
        """Follow the bases from a manifest down to an anchor, a checkpoint, what is known already, or a break."""
        chain, broken = [newest], ""
        while (last := chain[-1]).what == "delta" and last.base_digest not in known:
            try:
                chain.append(self.reader.base_of(last))
            except MegasyncError as e:
                broken = str(e)
                self.unreadable.add(last.base_version)
                break
        chain.reverse()
        digests = {m.digest for m in chain}
        if broken:
            self.faults.append(
                f"{broken}. Until it is back, {spans(m.version for m in chain)} cannot be chained: no anchor or checkpoint "
                "leads there"
            )
        elif chain[0].what != "delta" or chain[0].base_digest in self.started:
            self.started |= digests
        self.chains.append(chain)
        known |= digests
        return chain


def survey(sink: Sink, run: str, *, key: bytes | None = None) -> Survey:
    """Find every version of a run that can be read.

    From the head down by digests. Where that breaks off, what else lies there is read by its keys, newest first, and
    linked by digests in turn; of several epochs of a version the newest that can be read counts.

    Args:
        sink: Where.
        run: Which run.
        key: Shared key of signed manifests.

    Raises:
        ValueError: A run name that cannot be part of a key.
        RetryError: The sink does not answer.
    """
    out = Survey(PublicationReader(sink, run, key))
    try:
        out.head = out.reader.head()
    except MegasyncError as e:
        out.faults.append(f"the head of run {run!r} cannot be read: {e}")
    known: set[bytes] = set()
    newest = -1
    if out.head is not None and out.head.version >= 0:
        newest = out.head.version
        if (named := _read(out, newest, out.head.epoch, out.head.digest)) is not None:
            out.reached |= {m.digest for m in out._walk(named, known)}
        if not out.faults:
            return out
    out.objects = objects_of(sink, run)
    if out.head is None and not out.faults:
        if sink.read_head(run) is not None:
            return survey(sink, run, key=key)  # its publisher began meanwhile
        out.faults.append(without_head(sink, run, out.objects))
    elif out.head is not None and newest < 0 and out.objects.manifests:
        out.faults.append(
            f"run {run!r} was claimed (fence {out.head.fence}) and its head names no version, though {out.objects} are in "
            f"{sink.describe()}: a publisher is about to move it or was stopped before, or an earlier head was lost. Look "
            "again; put the earlier head back from a copy of the sink where there was one"
        )
    _read_the_rest(out, known, newest)
    return out


def _read_the_rest(out: Survey, known: set[bytes], newest: int) -> None:
    """Manifests that the head's chain did not come to; none above the head, which nobody has published yet."""
    assert out.objects is not None
    have = {m.version for m in out.manifests}
    below = min(have, default=newest + 1 if newest >= 0 else None)
    # What lies at a version that was looked for by its digest has another one, and that is told already.
    missed = set(out.unreadable)
    for version, epoch in out.objects.manifests:
        if version in have or version in missed or (below is not None and version >= below):
            continue
        if (found := _read(out, version, epoch, None)) is None:
            continue
        chain = out._walk(found, known)
        have |= {m.version for m in chain}
        if chain[0].what == "delta" and chain[0].base_digest not in known:
            missed.add(chain[0].base_version)


def _read(out: Survey, version: int, epoch: int, digest: bytes | None) -> Manifest | None:
    try:
        return out.reader.manifest(version, epoch, digest)
    except MegasyncError as e:
        out.unreadable.add(version)
        out._tell(manifest_key(out.reader.run, version, epoch), e)
        return None

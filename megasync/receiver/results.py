"""What an applier reports: frozen records, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from megasync.manifest import Manifest
from megasync.schema import Schema


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one call of ``update``, ``rollback`` or ``join`` did.

    Attributes:
        run: Name of the run.
        from_version: Version held before, -1 where it was none.
        version: Version held now.
        versions: Versions that were applied one after the other; empty where nothing was to do.
        pause_s: Seconds of pause, all applies together.
        stage_s: Seconds of staging, beside serving.
        total_s: Seconds of the call.
        fetched_nbytes: Bytes read from the sink for frames.
        num_refetched: Frames that were bad the first time.
        num_changed: Changed words of the publications; of a rollback those of the publication that it undid.
        num_written: Canonical words that were changed on this rank.
        density: Changed bytes over canonical bytes of the run, of the last publication applied or undone. An anchor counts
            all that it carries; how much of that was other than before is ``num_written``.
        backend: What ran.
        proofs: What was proven, by name.
        derived: Derivations that ran.
        excluded: Canonical tensors that no rank of the engine holds.
    """

    run: str
    from_version: int
    version: int
    versions: tuple[int, ...] = ()
    pause_s: float = 0.0
    stage_s: float = 0.0
    total_s: float = 0.0
    fetched_nbytes: int = 0
    num_refetched: int = 0
    num_changed: int = 0
    num_written: int = 0
    density: float = 0.0
    backend: str = ""
    proofs: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageResult:
    """What ``Applier.stage`` made ready.

    Attributes:
        version: The version that was staged.
        ahead: Whether its base is not live yet, so that its proof is left to its own apply.
        stage_s: Seconds.
        fetched_nbytes: Bytes read.
        nbytes: Memory that it takes.
        num_changed: Changed words on this rank.
    """

    version: int
    ahead: bool
    stage_s: float
    fetched_nbytes: int
    nbytes: int
    num_changed: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What ``Applier.audit`` found; a difference is an error instead.

    Attributes:
        version: Version that all live tensors were found to be.
        num_tensors: Tensors compared.
        nbytes: Canonical bytes read on this rank.
        audit_s: Seconds.
        excluded: Tensors that no rank holds.
    """

    version: int
    num_tensors: int
    nbytes: int
    audit_s: float
    excluded: tuple[str, ...]


def density_of(schema: Schema, manifest: Manifest) -> float:
    """Changed bytes over canonical bytes of the run."""
    columns = manifest.frames.columns
    changed = int((columns["num_changed"].astype("int64") * columns["word_nbytes"]).sum())
    return changed / max(schema.nbytes, 1)

"""What every rank holds, made known to all: the schema of the run and the boxes with their holders.

Between exporter and plan. Ranks with equal descriptions are a class, and only its lowest rank sends bytes. The first rank
puts them together (plan_merge.py) and broadcasts the result once, so nothing is padded to ranks x largest, and no rank can
come to another result. No pickle. Must not import an adapter or receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megasync.digest import content_digest
from megasync.schema import Schema
from megasync.trainer.agree import DEFAULT_TIMEOUT_S, agree, all_gather_bytes, broadcast_bytes, gather_bytes, rank_of
from megasync.trainer.exporter import Exporter, Piece
from megasync.trainer.plan_holdings import Holdings, require
from megasync.trainer.plan_merge import decode_merged, describe, encode_merged, merge, refusal
from megasync.types import DTYPE_NBYTES, TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def exchange(
    run: str, exporter: Exporter, group: ProcessGroup | None, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[Schema, Holdings]:
    """Make known to all ranks what each holds.

    *Collective*: over ``group``; every rank must call it.

    Args:
        run: Name of the run.
        exporter: This rank's weights; only names, boxes, shapes and dtypes are looked at.
        group: Gloo group of all trainer ranks, or None alone. Ranks in the result are ranks inside it.
        timeout_s: Seconds to wait for the other ranks.

    Returns:
        The schema and the holdings, equal on every rank.

    Raises:
        RankFailedError: On every rank, when an exporter failed on one, or one did not come.
        PlanError: On every rank: ranks disagree about a tensor, naming it and the ranks.
    """
    description = b""
    error: Exception | None = None
    try:
        description = describe_pieces(exporter.specs(), exporter.pieces())
    except Exception as e:
        error = e
    agree(group, error, "exporting", timeout_s)
    return exchange_descriptions(run, description, group, timeout_s=timeout_s)


def exchange_descriptions(
    run: str, description: bytes, group: ProcessGroup | None, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[Schema, Holdings]:
    """``exchange`` for a description at hand (``describe``); same collective, result and errors."""
    digests = all_gather_bytes(group, content_digest(description), "classes of equal ranks", timeout_s)
    classes: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        classes.setdefault(bytes(digest), []).append(rank)
    leads = any(ranks[0] == rank_of(group) for ranks in classes.values())
    blobs = gather_bytes(group, description if leads else b"", "descriptions", timeout_s)
    document: bytes | None = None
    if blobs is not None:
        try:
            document = encode_merged(*merge(run, [(ranks, blobs[ranks[0]]) for ranks in classes.values()]))
        except Exception as e:  # raised on every rank by decode_merged, or the others would wait for the broadcast
            document = refusal(e)
    return decode_merged(broadcast_bytes(group, document, "schema and holdings", timeout_s))


def describe_pieces(specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> bytes:
    """Describe what an exporter gave, after checking each view against its box.

    Raises:
        PlanError: As ``describe``, and listing views of another shape or word size than their box.
    """
    sizes = {t.name: DTYPE_NBYTES.get(t.dtype, 0) for t in specs}
    faults: list[str] = []
    for p in pieces:
        if tuple(p.data.shape) != p.box.extent:
            faults.append(f"{p.name}: the view has shape {list(p.data.shape)}, its box {list(p.box.extent)}")
        elif p.data.element_size() != sizes.get(p.name, p.data.element_size()):
            faults.append(f"{p.name}: the view has {p.data.dtype}, the spec words of {sizes[p.name]} bytes")
    require(faults, f"{len(faults)} pieces do not fit their spec", "Correct the exporter; nothing was published")
    return describe(specs, ((p.name, p.box) for p in pieces))

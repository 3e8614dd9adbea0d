"""The Exporter for Megatron-core: local parameters as boxes of canonical tensors, over live memory.

First stop of the trainer side (exporter -> plan -> snapshot -> encode -> gather -> publish). megatron_leaves.py reads
the chunks, names.py says what the leaves are called in a checkpoint, megatron_rows.py takes fused rows apart and
megatron_plan.py puts them together, once; this module is the live object. Nothing is copied and no weights cross ranks:
global shapes and offsets come from Megatron's own ``sharded_state_dict()``. The device is the parameters' own. Must not
import receiver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megasync.adapters.megatron_arguments import check_choices, checked_chunks
from megasync.adapters.megatron_leaves import ddp_of, unwrap
from megasync.adapters.megatron_plan import Anchorage, ExportPlan, plan_export
from megasync.adapters.names import NameTable
from megasync.adapters.transformer_engine import StoredExporter
from megasync.errors import PlanError
from megasync.quant.checkpoint import Checkpoint
from megasync.trainer.exporter import Exporter, Piece
from megasync.types import Box, TensorSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger(__name__)

KEYS_METADATA: Mapping[str, Any] = {"non_homogeneous_layers": True}
"""What the adapter asks ``sharded_state_dict`` for: one key a layer. Other spellings are understood too."""


class MegatronExporter(Exporter):
    """Exports the model chunks of one Megatron rank.

    Works for any mix of tensor, sequence, pipeline (virtual too), context, data and expert parallelism, with or without
    the distributed optimizer, on any device. Parameters that TransformerEngine keeps quantised (``fp8_param``,
    ``fp4_param``) are exported as the codes and scales that they are, beside plain ones. Refused by name: FSDP and GTP
    sharding, other tensor subclasses, fused layouts that no table describes, parameters that no table maps.

    Args:
        chunks: Model chunks of this rank in virtual stage order, as trained: in DistributedDataParallel, if they are.
        names: Naming table of the checkpoint (names_hf.py has those of model families).
        vocab_size: Vocabulary rows of the checkpoint; Megatron pads its own. Needed where the table cuts padding off.
        metadata: For ``sharded_state_dict``, where ``KEYS_METADATA`` does not suit a model. Equal on every rank.
        checkpoint: Whose names and shapes quantised parameters take; FP8 blocks always take ``deepseek``'s.
        group: Process group of all ranks of the run, its own, for the check that all parts of a quantised weight share one
            amax. Needed on every rank where any rank has quantised parameters; None: this rank is alone.

    Raises:
        TypeError: An argument of another kind: one chunk instead of a list, a table's name, what is no Megatron-core model.
        ValueError: No chunks, an impossible vocabulary, or an unknown checkpoint.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        names: NameTable,
        *,
        vocab_size: int | None = None,
        metadata: Mapping[str, Any] = KEYS_METADATA,
        checkpoint: Checkpoint = "modelopt",
        group: ProcessGroup | None = None,
    ) -> None:
        self._chunks = checked_chunks(chunks)
        check_choices(names, vocab_size, metadata, checkpoint)
        self._models = [unwrap(c) for c in self._chunks]
        self._names = names
        self._vocab_size = None if vocab_size is None else int(vocab_size)
        self._metadata = metadata
        self._checkpoint: Checkpoint = checkpoint
        self._group = group
        self._plan: ExportPlan | None = None
        self._quantised: StoredExporter | None = None

    def specs(self) -> list[TensorSpec]:
        """Specs of every tensor this rank holds a part of, in name order.

        Returns:
            One spec a canonical tensor, with global shape, layer, cut axis and aliases (tied and MTP copies).

        Raises:
            PlanError: Listing everything that cannot be exported: parameters that no rule maps or no leaf covers,
                copies, unsupported sharding and storage, an unknown vocabulary.
        """
        found = dict(self._planned().specs)
        for spec in self._stored().specs():
            if found.setdefault(spec.name, spec) != spec:
                raise PlanError(f"{spec.name} is made from a quantised parameter, and exists as another tensor")
        return [found[name] for name in sorted(found)]

    def pieces(self) -> list[Piece]:
        """The local boxes, views of live memory, in chunk and leaf order.

        Returns:
            The pieces. Fused QKV gives one a query group and tensor; buffers (a router's expert bias) are volatile. Those
            of quantised parameters follow: codes and scales where they lie, global scales in memory of the exporter.

        Raises:
            PlanError: See ``specs``.
        """
        return [*self._planned().pieces, *self._stored().pieces()]

    def own(self, boxes: Sequence[tuple[str, Box]], specs: Sequence[TensorSpec]) -> list[Piece]:
        """See ``Exporter.own``. With quantised parameters anywhere in the run, ``settle`` makes their global scales."""
        self._stored().own([], specs)
        self.settle_always = self._stored().num_compared > 0
        return super().own(boxes, specs)

    def settle(self) -> float:
        """Make every parameter current: forced gathers, then the global scales of quantised parameters.

        *Collective*: over the data parallel groups, then over ``group``; every rank must call it at the same step end.
        *Stream*: the current one; on return the gathers have finished.

        Returns:
            Seconds that it took; 0 when no chunk overlaps the gather and nothing is quantised.

        Raises:
            PlanError: On every rank: parts of a quantised weight, or fused ones, have different amaxes.
        """
        took = self._gather()
        if self.settle_always:
            took += self._stored().settle()
        return took

    def _gather(self) -> float:
        """Force the parameter all-gather that ``overlap_param_gather`` leaves to the next forward pass.

        Without it a rank sees old values outside its own part of the distributed optimizer, and parameters of modules
        that the forward pass does not use stay old. The next forward pass then gathers nothing again.

        *Collective*: over the data parallel groups; every rank must call it at the same step end.
        *Stream*: the current one; on return the gathers have finished.

        Returns:
            Seconds that it took; 0 when no chunk overlaps the gather.
        """
        late = [d for d in map(ddp_of, self._chunks) if d is not None and _overlaps(d)]
        if not late:
            return 0.0
        start = time.perf_counter()
        for ddp in late:
            ddp.start_param_sync(force_sync=True)
        for device in {p.device for m in self._models for p in m.parameters() if p.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        took = time.perf_counter() - start
        _log.debug("forced the parameter gather of %d model chunks in %.3f s", len(late), took)
        return took

    def late_chunks(self) -> tuple[int, ...]:
        """Chunks that overlap their parameter gather with the next forward pass; see ``Exporter.late_chunks``."""
        return tuple(i for i, c in enumerate(self._chunks) if (ddp := ddp_of(c)) is not None and _overlaps(ddp))

    def after_forward(self, chunk: int, call: Callable[[], None]) -> Callable[[], None]:
        """See ``Exporter.after_forward``; passes in evaluation mode do not count, they may run on old weights."""

        def hook(module: Any, args: Any, output: Any) -> None:
            if module.training:
                call()

        remove: Callable[[], None] = self._chunks[chunk].register_forward_hook(hook).remove
        return remove

    def num_open_gathers(self, chunk: int) -> int:
        """Bucket groups of a chunk whose parameter gather since the last step has not finished.

        Args:
            chunk: Index of the chunk.

        Returns:
            0 when the chunk's parameters are current.
        """
        return sum(_is_open(g) for g in self._bucket_groups(chunk))

    def finish_chunk(self, chunk: int) -> None:
        """Gather the bucket groups that a chunk's forward pass did not use; see ``Exporter.finish_chunk``."""
        for group in self._bucket_groups(chunk):
            if _is_open(group):
                group.start_param_sync(force_sync=True)

    def settle_before_step(self) -> float:
        """See ``Exporter.settle_before_step``. A group keeps its mark, or Megatron would not gather after the step."""
        groups = [g for i in range(len(self._chunks)) for g in self._bucket_groups(i)]
        marks = [g.param_gather_dispatched for g in groups]
        took = self.settle()
        for group, mark in zip(groups, marks, strict=True):
            group.param_gather_dispatched = mark
        return took

    def check_alive(self) -> None:
        """Check that the parameters still are where the pieces look.

        Raises:
            PlanError: Naming the tensors that moved or went; make a new exporter and plan.
        """
        self._stored().check_alive()
        now = {
            (i, name): tensor
            for i, model in enumerate(self._models)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        moved: list[str] = []
        for was in self._planned().anchorages:
            tensor = now.get((was.chunk, was.name))
            if tensor is None:
                moved.append(f"{was.name} of chunk {was.chunk} (gone)")
            elif Anchorage.of(was.chunk, was.name, tensor) != was:
                moved.append(f"{was.name} of chunk {was.chunk} (new memory, shape or dtype)")
        if moved:
            raise PlanError(
                f"{len(moved)} live tensors moved since the export was planned: {', '.join(moved)}; "
                "make a new exporter and plan again"
            )

    def _bucket_groups(self, chunk: int) -> list[Any]:
        """Bucket groups of a chunk that overlaps its gather; none where it does not."""
        ddp = ddp_of(self._chunks[chunk])
        if ddp is None or not _overlaps(ddp):
            return []
        return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]

    def _stored(self) -> StoredExporter:
        """The exporter of the quantised parameters, with none where there are none: its collectives need every rank."""
        if self._quantised is None:
            self._quantised = StoredExporter(self._planned().stored, checkpoint=self._checkpoint, group=self._group)
        return self._quantised

    def _planned(self) -> ExportPlan:
        if self._plan is None:
            self._plan = plan_export(self._chunks, self._models, self._names, self._vocab_size, self._metadata)
        return self._plan


def _is_open(group: Any) -> bool:
    """Whether a bucket group's gather since the last step was not begun, or not waited for."""
    return not group.param_gather_dispatched or group.param_gather_handle is not None


def _overlaps(ddp: Any) -> bool:
    return bool(getattr(ddp.ddp_config, "overlap_param_gather", False))

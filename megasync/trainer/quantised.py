"""An exporter of quantised bytes over an exporter of full-precision weights: mixed formats in one delta.

Sits between an adapter's exporter and the ownership plan. Tensors that a rule selects become codes, scales and a global
scale (``quant.checkpoint``); all others pass through untouched. The quantised bytes are not in the trainer's memory, so
``pieces()`` describes them on the meta device, ``own()`` allocates buffers for what this rank owns and nothing else
(0.5625 byte an element for NVFP4), and every ``settle()`` fills them in two passes with one exchange between:

    inner.settle -> amax of the owned codes' weights -> MAX over the group -> codes and scales of the owned boxes

A rank reads only weights that it holds, each weight enters the amax on one rank only, and nothing but amax scalars
crosses ranks. Must not import adapters or receiver.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from megasync.errors import NonFiniteError, PlanError
from megasync.quant.blocks import check_box
from megasync.quant.checkpoint import FUSED_PARTNERS, Member, QuantisedWeight, select
from megasync.quant.exchange import exchange_amax
from megasync.quant.jobs import Owned, jobs_of
from megasync.quant.passes import Job, Passes, ScalarJob
from megasync.quant.rules import QuantRule, require_used
from megasync.trainer.exporter import Exporter, Piece
from megasync.types import DTYPE_NBYTES, Box, TensorSpec

_TORCH_DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.uint8, "F8_E8M0": torch.uint8, "F32": torch.float32}
_ALIGN_NBYTES = 256


class QuantisedExporter(Exporter):
    """Makes quantised bytes of selected weights on their owners.

    Args:
        inner: Exporter of the full-precision weights; its pieces of selected weights must be cut at block multiples.
        rules: Which weights take which formula; the first match wins, the rest pass through.
        group: Process group of all ranks of the run for the exchange of amaxes, its own; None: this rank is alone.
        partners: Module names that share a global scale.
        input_scales: Static activation scales by canonical name (``....input_scale``, or ``....input_global_scale``), for the
            weights whose rule has ``input_scale``: float32, one element, any device; read from the checkpoint that the
            engines load. They are frozen: in the root, never published.

    Raises:
        PlanError: Listing every weight that the rules cannot hold (``pieces``: every piece that cuts a block; ``own``: rules
            that select no weight of any rank), and activation scales that are asked for and not given.
        ValueError: An activation scale that is no float32 scalar.
    """

    settle_always = True

    def __init__(
        self,
        inner: Exporter,
        rules: Sequence[QuantRule],
        *,
        group: dist.ProcessGroup | None = None,
        partners: Sequence[tuple[str, ...]] = FUSED_PARTNERS,
        input_scales: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._inner = inner
        self._group = group
        self._sources = inner.specs()
        self._rules = tuple(rules)
        self._weights = select(self._sources, rules, partners)
        self._members: dict[str, tuple[QuantisedWeight, Member]] = {
            m.spec.name: (w, m) for w in self._weights.values() for m in w.members
        }
        self._input_scales = _checked_scales(self._members, input_scales or {})
        self._groups: dict[str, int] = {}
        self._passes = Passes([], [], 0, "cpu")
        self._exchange_s = 0.0
        self._owned_nbytes = 0

    @property
    def sources(self) -> Exporter:
        """The weights that are quantised, as they are: what a replica check compares in place of the quantised bytes."""
        return _Sources(self._inner, frozenset(self._weights))

    @property
    def exchange_s(self) -> float:
        """Seconds that the last exchange of amaxes took."""
        return self._exchange_s

    @property
    def passes(self) -> Passes:
        """The two passes over what this rank owns, made by ``own()``; ``settle`` runs them with the exchange between."""
        return self._passes

    @property
    def owned_nbytes(self) -> int:
        """Bytes of the buffers that ``own()`` allocated."""
        return self._owned_nbytes

    def specs(self) -> list[TensorSpec]:
        """Specs of the canonical tensors: quantised ones in place of the selected weights, the others as they are."""
        out: list[TensorSpec] = []
        for spec in self._sources:
            weight = self._weights.get(spec.name)
            out += [spec] if weight is None else [m.spec for m in weight.members]
        return out

    def pieces(self) -> list[Piece]:
        """Local boxes; those of quantised tensors have no bytes yet (meta device), see ``own``.

        Raises:
            PlanError: Listing the pieces that cut a block.
        """
        out: list[Piece] = []
        wrong: list[str] = []
        scalars: set[str] = set()
        for piece in self._inner.pieces():
            weight = self._weights.get(piece.name)
            if weight is None:
                out.append(piece)
                continue
            try:
                check_box(piece.box, weight.source.shape, weight.formula, piece.name)
            except PlanError as e:
                wrong.append(str(e))
                continue
            for member in weight.members:
                if member.spec.name in scalars:
                    continue
                if not member.step:  # every piece of the weight would give the same one
                    scalars.add(member.spec.name)
                box = weight.member_box(member, piece.box)
                if member.role == "input":
                    given = self._input_scales[member.spec.name]
                    out.append(Piece(member.spec.name, box, given.reshape(box.extent), chunk=piece.chunk))
                    continue
                data = torch.empty(box.extent, dtype=_TORCH_DTYPES[member.spec.dtype], device="meta")
                out.append(Piece(member.spec.name, box, data, chunk=piece.chunk))
        if wrong:
            raise PlanError(f"{len(wrong)} pieces cannot be quantised: " + "; ".join(wrong[:20]))
        return out

    def own(self, boxes: Sequence[tuple[str, Box]], specs: Sequence[TensorSpec]) -> list[Piece]:
        """Allocate buffers for the owned quantised boxes; see ``Exporter.own``.

        Raises:
            PlanError: Boxes in no piece of this rank; on every rank: rules that select no weight of the run.

        *Memory*: one arena that belongs to this exporter, which overwrites it in ``settle()``.
        """
        require_used(self._rules, specs)
        plain = iter(self._inner.own([b for b in boxes if b[0] not in self._members], specs))
        self._groups = {g: i for i, g in enumerate(sorted({s.group for s in specs if s.formula and not s.frozen}))}
        held: dict[str, list[Piece]] = {}
        for piece in self._inner.pieces():
            held.setdefault(piece.name, []).append(piece)
        found: list[Piece | None] = []
        lost: list[str] = []
        for name, box in boxes:
            weight, member = self._members.get(name, (None, None))
            if weight is None or member is None:
                found.append(None)
                continue
            region = weight.source_box(member, box)
            whole = next((p for p in held.get(weight.source.name, ()) if _covers(p.box, region, member)), None)
            if whole is None or weight.group not in self._groups:
                lost.append(f"{name} {list(box.start)}+{list(box.extent)}")
            found.append(whole)
        if lost:
            raise PlanError(f"{len(lost)} owned boxes lie in no piece of this rank: " + "; ".join(lost[:20]))
        buffers = iter(self._allocate([(n, b) for n, b in boxes if n in self._members], found))
        out: list[Piece] = []
        owned: dict[str, list[Owned]] = {}
        scalars: list[ScalarJob] = []
        for (name, box), whole in zip(boxes, found, strict=True):
            if whole is None:
                out.append(next(plain))
                continue
            buffer = next(buffers)
            out.append(Piece(name, box, buffer, chunk=whole.chunk))
            weight, member = self._members[name]
            if not member.step:
                scalars.append(ScalarJob(weight.formula, self._groups[weight.group], buffer, weight.reciprocal))
                continue
            region = weight.source_box(member, box)
            check_box(region, weight.source.shape, weight.formula, weight.source.name)
            owned.setdefault(weight.source.name, []).append(Owned(member, box, region, buffer))
        jobs: list[Job] = []
        for source, mine in owned.items():
            weight = self._weights[source]
            local = [(p.box, p.data) for p in held[source]]
            jobs += jobs_of(weight, self._groups[weight.group], mine, local)
        device = next((p.data.device for p in found if p is not None), torch.device("cpu"))
        self._passes = Passes(jobs, scalars, len(self._groups), device)
        return out

    def settle(self) -> float:
        """Make the weights current and fill the owned buffers from them; see ``Exporter.settle``.

        Returns:
            Seconds on the host: the inner exporter's, the exchange and the launches. ``exchange_s`` has the exchange's.

        Raises:
            NonFiniteError: On every rank, naming the tensors with NaN or infinity; no buffer was written.

        *Collective*: every rank of the exchange's group, at the same step end.
        *Stream*: the current stream, synchronised around the exchange; the quantising pass is only enqueued.
        """
        start = time.perf_counter()
        self._inner.settle()
        amaxes, self._exchange_s = exchange_amax(self._passes.amax(), self._group)
        finite = torch.isfinite(amaxes).cpu()
        if not bool(finite.all()):
            names = [name for name, i in self._groups.items() if not finite[i]]
            raise NonFiniteError(
                f"NaN or infinity among the weights of {len(names)} groups: {', '.join(names[:20])}; they cannot be "
                "quantised and nothing was published: skip the step or restore the trainer"
            )
        self._passes.fill(amaxes)
        return time.perf_counter() - start

    def check_alive(self) -> None:
        """See ``Exporter.check_alive``; the buffers of this exporter never move."""
        self._inner.check_alive()

    def _allocate(self, boxes: Sequence[tuple[str, Box]], found: Sequence[Piece | None]) -> list[torch.Tensor]:
        """One zeroed buffer a box, cut from one arena a device."""
        devices = [p.data.device for p in found if p is not None]
        sizes = [prod(box.extent) * DTYPE_NBYTES[self._members[name][1].spec.dtype] for name, box in boxes]
        self._owned_nbytes = sum(sizes)
        used: dict[torch.device, int] = {}
        offsets: list[int] = []
        for device, size in zip(devices, sizes, strict=True):
            offsets.append(used.get(device, 0))
            used[device] = offsets[-1] + -(-size // _ALIGN_NBYTES) * _ALIGN_NBYTES
        arenas = {device: torch.zeros(n, dtype=torch.uint8, device=device) for device, n in used.items()}
        out: list[torch.Tensor] = []
        for (name, box), device, offset, size in zip(boxes, devices, offsets, sizes, strict=True):
            dtype = _TORCH_DTYPES[self._members[name][1].spec.dtype]
            out.append(arenas[device][offset : offset + size].view(dtype).reshape(box.extent))
        return out


def _checked_scales(
    members: Mapping[str, tuple[QuantisedWeight, Member]], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The activation scales of this rank's weights, on the host."""
    wanted = [name for name, (_, m) in members.items() if m.role == "input"]
    if lost := [n for n in wanted if n not in given]:
        raise PlanError(
            f"rules with input_scale ask for {len(lost)} activation scales that are not given: {', '.join(lost[:20])}; read "
            "them from the checkpoint that the engines load and pass input_scales=, or leave input_scale out where the engine "
            "does not load them"
        )
    for name in wanted:
        if not isinstance(given[name], torch.Tensor) or given[name].dtype != torch.float32 or given[name].numel() != 1:
            raise ValueError(f"activation scale {name} must be a float32 tensor of one element, got {given[name]!r}")
    return {n: given[n].detach().cpu().clone() for n in wanted}


def _covers(whole: Box, part: Box, member: Member) -> bool:
    """Whether a piece can make a box of a member; any piece of the weight can make its scalar."""
    return not member.step or whole.intersect(part) == part


class _Sources(Exporter):
    """Some tensors of an exporter, for a look at their bytes."""

    def __init__(self, inner: Exporter, names: frozenset[str]) -> None:
        self._inner, self._names = inner, names

    def specs(self) -> list[TensorSpec]:
        return [s for s in self._inner.specs() if s.name in self._names]

    def pieces(self) -> list[Piece]:
        return [p for p in self._inner.pieces() if p.name in self._names]

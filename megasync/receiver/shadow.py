"""Canonical shadows: canonical bytes of tensors whose live form is a value transform, and the transform itself.

A shadow is one more storage that layouts point into, so XOR, digests and undo treat it like live weights. After the
XOR, in the pause, the live outputs of every touched group are derived again, once, at the address they have. Comes
between bind and apply. Must import nothing above the Engine port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megasync.errors import BaseMismatchError, LiveMismatchError, MemoryPlanError, PlanError
from megasync.layout.compose import arrange
from megasync.layout.evaluate import gather
from megasync.layout.modes import Layout
from megasync.receiver.engine import TORCH_DTYPES, Derivation, Engine, Tensors
from megasync.schema import Schema
from megasync.types import Box, TensorSpec

PREFIX = "shadow:"
"""What the storage name of a shadow starts with; live names never have a colon in front of a canonical name."""

_SHOWN = 8


@dataclass
class Shadows:
    """The shadows of one engine rank.

    Attributes:
        schema: The run's schema.
        derivations: All groups.
        layouts: By tensor id, of the shadowed inputs.
        storages: uint8 by storage name, CPU, contiguous: canonical bytes of each slice.
        held: By tensor id, layouts of the inputs that the engine holds as they are.
    """

    schema: Schema
    derivations: tuple[Derivation, ...] = ()
    layouts: dict[int, Layout] = field(default_factory=dict)
    storages: dict[str, torch.Tensor] = field(default_factory=dict)
    held: dict[int, Layout] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all shadows."""
        return sum(s.numel() for s in self.storages.values())

    def touched(self, ids: Iterable[int]) -> list[Derivation]:
        """The groups that read a touched tensor."""
        if not self.derivations:  # most engines: a set of 100,000 ids takes longer than an update writes
            return []
        found = set(map(int, ids))
        return [d for d in self.derivations if any(self.schema.ids[n] in found for n in d.inputs)]

    def inputs(self, derivation: Derivation, live: Tensors) -> dict[str, torch.Tensor]:
        """Canonical slices that a group reads: copies of the shadows, or gathered through the layout.

        Copies, so that a transform that writes what it reads cannot change the canonical bytes.

        Args:
            derivation: The group.
            live: uint8 whole storages by name, shadows included (`Binding.storages`).
        """
        out = {}
        for name in derivation.inputs:
            tensor_id = self.schema.ids[name]
            spec = self.schema.tensors[tensor_id]
            layout = self.layouts.get(tensor_id)
            data = self.storages[PREFIX + spec.name].clone() if layout else gather(self.held[tensor_id], live)
            shape = (layout or self.held[tensor_id]).slice_shape
            out[name] = data.view(TORCH_DTYPES[spec.dtype]).view(shape if spec.shape else ())
        return out

    def derive(self, derivation: Derivation, live: Tensors) -> dict[str, torch.Tensor]:
        """New values of a group's outputs, in fresh memory.

        Raises:
            BaseMismatchError: The transform failed, wrote its inputs, or did not give exactly the tensors it promised.
            PlanError: The transform raised it.
        """
        inputs = self.inputs(derivation, live)
        versions = {n: t._version for n, t in inputs.items()}
        who = f"derivation {derivation.name} of {', '.join(derivation.inputs[:_SHOWN])}"
        try:
            with torch.no_grad():
                found = dict(derivation.derive(inputs))
        except PlanError as e:
            raise PlanError(f"{who}: {e}") from e
        except Exception as e:
            raise BaseMismatchError(f"{who} failed with {type(e).__name__}: {e}; fix the adapter") from e
        if written := [n for n, t in inputs.items() if t._version != versions[n]]:
            raise BaseMismatchError(
                f"{who} wrote its input {', '.join(written)}: fix the adapter, it must write nothing"
            )
        if odd := [n for n, t in found.items() if not isinstance(t, torch.Tensor)]:
            raise BaseMismatchError(
                f"{who} gave {type(found[odd[0]]).__name__} for {odd[0]}, not a tensor: fix the adapter"
            )
        if found.keys() != set(derivation.outputs):
            raise BaseMismatchError(
                f"derivation {derivation.name} gave {sorted(found)}, promised {sorted(derivation.outputs)}: fix the adapter"
            )
        return found

    def write_(self, derivation: Derivation, values: Tensors, tensors: Tensors) -> None:
        """Write values into live tensors, in place; dtype and shape must be theirs, so that nothing is converted.

        Args:
            derivation: The group.
            values: By live name.
            tensors: The engine's live tensors.

        Raises:
            BaseMismatchError: Another dtype or shape; nothing of the group was written.
        """
        for name in derivation.outputs:
            new, old = values[name], tensors[name]
            if new.dtype != old.dtype or new.shape != old.shape:
                raise BaseMismatchError(
                    f"derivation {derivation.name}: {name} is live {old.dtype}{list(old.shape)}, derived "
                    f"{new.dtype}{list(new.shape)}: fix the adapter"
                )
        with torch.inference_mode():
            for name in derivation.outputs:
                tensors[name].detach().copy_(values[name])

    def backup(self, derivations: Sequence[Derivation], tensors: Tensors) -> dict[str, torch.Tensor]:
        """Copies of live outputs, taken before an update so that undo restores them exactly."""
        return {name: tensors[name].detach().clone() for d in derivations for name in d.outputs}

    def check(self, tensors: Tensors, live: Tensors) -> None:
        """Derive everything into scratch and compare with the live tensors, as bytes.

        Raises:
            LiveMismatchError: Naming the live tensors that are not the derivation of their canonical bytes.
        """
        wrong = []
        for d in self.derivations:
            values = self.derive(d, live)
            wrong += [n for n in d.outputs if not same_bytes(values[n], tensors[n])]
        if wrong:
            raise LiveMismatchError(
                f"live tensors are not what is derived from their canonical bytes: {', '.join(wrong[:20])}; load the "
                "weights anew, or fix the adapter's derivation"
            )

    def seed(self, engine: Engine) -> None:
        """Fill the shadows from live tensors where the transform can be turned around, else from the engine's seed.

        Raises:
            PlanError: Listing the tensors that neither gives, or naming the derivation that failed.
        """
        tensors = engine.tensors()
        lost: list[str] = []
        for d in self.derivations:
            mine = [n for n in d.inputs if self.schema.ids[n] in self.layouts]
            recovered: Mapping[str, torch.Tensor] = {}
            if mine and d.recover is not None:
                try:
                    with torch.no_grad():
                        recovered = dict(d.recover({n: tensors[n].detach() for n in d.outputs}))
                except Exception as e:
                    raise PlanError(
                        f"derivation {d.name}: recovering {', '.join(mine[:_SHOWN])} from live "
                        f"{', '.join(d.outputs[:_SHOWN])} failed with {type(e).__name__}: {e}; fix the adapter"
                    ) from e
            for name in mine:
                spec = self.schema.tensors[self.schema.ids[name]]
                layout = self.layouts[self.schema.ids[name]]
                words = recovered.get(name)
                if words is None:
                    words = engine.seed(spec.name, Box(layout.start, layout.slice_shape))
                if words is None or words.numel() * words.element_size() != layout.slice_nbytes:
                    lost.append(name)
                    continue
                self.storages[PREFIX + spec.name].copy_(words.contiguous().reshape(-1).view(torch.uint8))
        if lost:
            raise PlanError(
                f"no canonical bytes for {', '.join(lost[:50])}: their live form is a value transform that cannot be turned "
                "around; give the engine's seed() access to the checkpoint that it was loaded from"
            )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal dtype, shape and bytes (NaN equals itself, -0.0 is not 0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    one, two = (t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in (a, b))
    return bool(torch.equal(one, two))


def plan_shadows(
    schema: Schema, derivations: Sequence[Derivation], held: Mapping[int, Layout], limit_nbytes: int
) -> Shadows:
    """Allocate the shadows of an engine rank.

    Args:
        schema: The run's schema.
        derivations: The engine's groups; names must be known to the schema.
        held: Layouts of the tensors that the engine holds as they are, by id.
        limit_nbytes: Host bytes that all shadows may take.

    Raises:
        MemoryPlanError: Too large, with the largest tensors named; nothing was allocated.
        PlanError: A tensor is wanted in two different slices.
    """
    layouts: dict[int, Layout] = {}
    for d in derivations:
        for name in d.inputs:
            tensor_id = schema.ids[name]
            if tensor_id in held:
                continue
            layout = _identity(schema.tensors[tensor_id], d.slices.get(name), d.primary)
            if layouts.setdefault(tensor_id, layout) != layout:
                raise PlanError(
                    f"derivations want two different slices of {name}: one rank keeps one shadow of a tensor"
                )
    need = {i: x.slice_nbytes for i, x in layouts.items()}
    if sum(need.values()) > limit_nbytes:
        largest = sorted(need, key=lambda i: -need[i])[:10]
        listed = ", ".join(f"{schema.tensors[i].name} ({need[i]} bytes)" for i in largest)
        raise MemoryPlanError(
            f"canonical shadows of {len(need)} tensors need {sum(need.values())} bytes, shadow_limit_nbytes is "
            f"{limit_nbytes}; the largest are {listed}. Raise the limit, or keep these weights in their canonical form"
        )
    storages = {
        PREFIX + schema.tensors[i].name: torch.zeros(x.slice_nbytes, dtype=torch.uint8) for i, x in layouts.items()
    }
    return Shadows(schema, tuple(derivations), layouts, storages, dict(held))


def _identity(spec: TensorSpec, part: Box | None, primary: bool) -> Layout:
    shape = spec.shape or (1,)
    start = part.start if part else (0,) * len(shape)
    stop = tuple(a + n for a, n in zip(start, part.extent if part else shape, strict=True))
    return arrange(shape, word_nbytes=spec.word_nbytes, start=start, stop=stop).to(PREFIX + spec.name, primary=primary)


def widening(name: str, live: str, spec: TensorSpec, dtype: torch.dtype, *, part: Box | None = None) -> Derivation:
    """The derivation of a live tensor that holds a canonical float tensor in a wider float dtype.

    Args:
        name: Canonical name.
        live: Live name.
        spec: Of the canonical tensor.
        dtype: Live dtype; every value of the canonical dtype is exact in it.
        part: Slice that this rank holds; the whole tensor by default.

    Raises:
        PlanError: The cast would lose values.
    """
    source = TORCH_DTYPES[spec.dtype]
    if not is_widening(source, dtype):
        raise PlanError(
            f"{live} is {dtype}, canonical {name} is {source}: the cast loses bits, so what the engine computes with is not "
            "the published weight; load it in its own dtype"
        )

    def recover(tensors: Tensors) -> Tensors:
        return {name: narrowed(tensors[live], source)}

    slices = {name: part} if part is not None else {}
    return Derivation(f"cast of {name}", (name,), (live,), lambda x: {live: x[name].to(dtype)}, recover, slices)


def is_widening(source: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every finite value of ``source`` is exact in ``wide`` (both float dtypes)."""
    if not (source.is_floating_point and wide.is_floating_point) or source == wide:
        return False
    a, b = torch.finfo(source), torch.finfo(wide)
    return b.bits > a.bits and b.eps <= a.eps and b.max >= a.max and b.smallest_normal <= a.smallest_normal


def narrowed(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A widened tensor cast back, with the bits it had before.

    Args:
        wide: Any float dtype and shape, all of whose values are exact in ``dtype``.
        dtype: What it was cast from.
    """
    if (wide.dtype, dtype) == (torch.float32, torch.bfloat16):
        # A cast would make every NaN the same one; bfloat16 is the upper half of float32, so its bits are taken.
        halves = wide.contiguous().view(torch.int16).view(*wide.shape, 2)
        return halves[..., 1].contiguous().view(dtype)
    return wide.to(dtype)

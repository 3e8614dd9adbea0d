"""The Engine port: what an engine adapter must tell, and let happen, for live weights to be updated in place.

An adapter (``megasync.adapters``) implements it for one rank of one engine; ``bind`` checks what it says against the
run's schema, ``apply`` uses the hooks. ``contract`` is a test suite that every implementation must pass. Must not
import an adapter, a trainer or an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megasync.layout.modes import Layout
from megasync.schema import Schema
from megasync.types import Box

Tensors = Mapping[str, torch.Tensor]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
    "F6_E2M3": torch.uint8,
    "F6_E3M2": torch.uint8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Torch dtype of canonical words; packed and sub-byte ones are bytes."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """Live tensors that are a value transform of canonical ones: a cast, a maximum over shards, a reciprocal.

    XOR does not pass through such a transform. The receiver keeps the canonical bytes of the inputs (the canonical
    shadow; inputs that the engine also holds as they are, are read from there), XORs those, and derives the outputs
    again.

    Attributes:
        name: Of the group, for messages.
        inputs: Canonical names, all that the transform reads: outputs are derived once, after the last of them.
        outputs: Live names that are written, at the address they have.
        derive: Canonical slices by name -> new values by live name, of the live dtype and shape. Exact and
            deterministic: equal inputs give equal bytes. It must not write its inputs or live memory.
        recover: Live tensors by name -> canonical slices by name, where the transform loses nothing (a widening cast);
            None where the shadow must be seeded from elsewhere (`Engine.seed`).
        slices: Part of an input that this rank needs; inputs not listed are needed whole.
        primary: False where another rank of the engine holds the primary shadow of the same inputs.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    derive: Callable[[Tensors], Tensors]
    recover: Callable[[Tensors], Tensors] | None = None
    slices: Mapping[str, Box] = field(default_factory=dict)
    primary: bool = True


class Engine(ABC):
    """One rank of an engine whose weights are live.

    Attributes:
        name: For messages and results.
        rank: Rank among the engine's ranks, each of which runs its own applier over its own slices.
        num_ranks: Ranks of the engine.
    """

    name: str = "engine"
    rank: int = 0
    num_ranks: int = 1

    @abstractmethod
    def layouts(self, schema: Schema) -> Mapping[str, Layout]:
        """Where the canonical tensors lie on this rank. Called once, at plan time.

        Args:
            schema: The run's schema.

        Returns:
            By canonical name or alias. Storages of records are keys of `tensors`; offsets count from the start of the
            untyped storage under the live tensor. Tensors that only derivations read are left out.

        Raises:
            PlanError: Listing everything that cannot be placed.
        """

    @abstractmethod
    def tensors(self) -> Tensors:
        """The live tensors by name, as they are now. Called before every update: must be cheap and must not copy."""

    def derivations(self, schema: Schema) -> Sequence[Derivation]:
        """Live tensors that are value transforms of canonical ones. Called once, at plan time."""
        return ()

    def excluded(self, schema: Schema) -> Mapping[str, str]:
        """Canonical tensors that no rank of this engine loads on purpose, with the reason (no draft model, say).

        They are named in every result; any other tensor that no rank holds is an error at plan time.
        """
        return {}

    def seed(self, name: str, box: Box) -> torch.Tensor | None:
        """Canonical words that the engine was loaded with, for a shadow that cannot be recovered from live tensors.

        Args:
            name: Canonical name.
            box: The slice wanted.

        Returns:
            The words in the box's shape, any dtype of the canonical word size, CPU; None where they are not known.
        """
        return None

    def check_ready(self) -> None:  # noqa: B027
        """Refuse updates now where weights are asleep, merged with an adapter, rebalanced ...

        Raises:
            BaseMismatchError: With the state found and what to do first.
        """

    def pause(self) -> None:  # noqa: B027
        """Stop making tokens at a token boundary and let running kernels end. Called on every rank before any write.

        Raises:
            RetryError: It does not come to rest now. Nothing was touched; the engine goes on and the update is tried again.
        """

    def resume(self, version: int) -> None:  # noqa: B027
        """Make tokens again; weights are proven to be ``version``'s, after an undo the old one's.

        Caches that hold results of other weights are the adapter's to flush or tag here, before the first token. Where it
        raises, the weights stay as they are, and the next update calls it again.
        """

    def holds(self, version: int) -> None:  # noqa: B027
        """The weights are ``version``'s without a write: so they were loaded, or nothing changed. Nothing was
        paused. -1: they are no known version's any more (an audit found other bytes)."""

    def quarantine(self, reason: str) -> None:  # noqa: B027
        """The weights are in an unknown state: stay stopped for good, take no traffic. Never followed by `resume`."""

    def observe(self) -> bytes | None:
        """Output of the engine for a fixed input, for the self-test (flip, observe, flip back); None skips the test."""
        return None

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order. *Collective*: every rank of the engine must call it, in the same order.

        Engines of one rank need not override it. Must have a timeout: a rank that never comes is an error, not a hang.
        """
        if self.num_ranks != 1:
            raise TypeError(f"{type(self).__name__} has {self.num_ranks} ranks and must override gather()")
        return [data]

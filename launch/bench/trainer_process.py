"""The trainer of the end-to-end benchmark: one rank of 64, a process of its own that publishes what the others have made.

``MegasyncCallback`` with the mask stage of its device runs over its own share of the weights; the 63 other owners' payloads
lie in the sink already, and what they would tell the head writer of theirs (frame tables and digest sums) is at hand. So it
does all that a rank and a head writer do, at the full model's size, but for waiting for the others' metadata. Requests are
JSON lines on standard input, answers lines that begin with ``@``. Before it: trainer_share, stamps. After it:
bench_end_to_end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from launch.bench.stamps import StampedSink, StampedTelemetry
from launch.bench.trainer_share import block_nbytes, kind_of, schema_of, share_of
from launch.bench.workload import Shape
from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import GatherKind, PublishConfig, SnapshotPlace
from megasync.kernels.planes import WORD_DTYPES
from megasync.sinks.local import LocalSink
from megasync.tiles import tile_grid
from megasync.trainer import publish as publish_module
from megasync.trainer.callback import MegasyncCallback
from megasync.trainer.device_snapshot import make_snapshot
from megasync.trainer.groups import Groups
from megasync.trainer.plan import OwnershipPlan
from megasync.trainer.publishing import Outcome
from megasync.trainer.regions import Region
from megasync.trainer.seed import fill_from_live
from megasync.trainer.start import Started
from megasync.types import Box
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.encode import read_contribution
from megasync.versions.head import claim
from megasync.versions.lineage import mix_table, start_lineage

CHANGED = 0.00085
TIMEOUT_S = 120.0

Answer = dict[str, Any]


class ShareTrainer:
    """A trainer rank over its share.

    Args:
        shape: Sizes of the model.
        tp: Ranks of the engine.
        device: Where its weights live.
    """

    def __init__(self, shape: Shape, tp: int, device: str) -> None:
        self.shape, self.device = shape, torch.device(device)
        self.schema = schema_of(shape)
        self._share = share_of(shape, tp)
        self._layers = [-1, *range(shape.num_layers)]
        sizes = [block_nbytes(self._share[kind_of(shape, layer)]) for layer in self._layers]
        self._at = dict(zip(self._layers, np.concatenate(([0], np.cumsum(sizes)[:-1])).tolist(), strict=True))
        self.arena = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        self.nbytes = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._regions = self._make_regions()
        self.mix = mix_table(self.schema)
        self.telemetry = StampedTelemetry()
        self.outcome: Outcome | None = None

    def _make_regions(self) -> list[Region]:
        regions = []
        first = {layer: int(np.searchsorted(self.schema.layers, layer)) for layer in self._layers}
        for layer in self._layers:
            kind = kind_of(self.shape, layer)
            for number, part in enumerate(self._share[kind]):
                spec = part.placed.spec
                tensor_id = self.schema.ids[spec.name] + first[layer] - first[kind]
                begin = self._at[layer] + part.offset
                data = self.arena[begin : begin + part.nbytes].view(WORD_DTYPES[spec.word_nbytes]).view(part.box.extent)
                self._tensors[f"{self.schema.tensors[tensor_id].name}@{number}"] = data
                self.nbytes += part.nbytes
                starts, extents = tile_grid(spec).boxes(part.tiles)
                for tile, start, extent in zip(part.tiles.tolist(), starts.tolist(), extents.tolist(), strict=True):
                    inner = tuple(
                        slice(a - b, a - b + n) for a, b, n in zip(start, part.box.start, extent, strict=True)
                    )
                    box, whole = Box(tuple(start), tuple(extent)), Box((0,) * len(extent), tuple(extent))
                    regions.append(Region(tensor_id, tile, box, whole, data[inner], True, False, 0))
        return sorted(regions, key=lambda r: (r.tensor_id, r.tile))

    def start(self, directory: Path, base: Mapping[int, np.ndarray], table: np.ndarray, others: Path) -> int:
        """Fill the weights, claim the run and publish version 0.

        Args:
            directory: Of the sink.
            base: Bytes of a layer's share by kind, as the engine holds them.
            table: State digests of version 0, uint8 ``[num_tensors, 16]``.
            others: What the other owners tell, in two versions.

        Returns:
            The fencing epoch.
        """
        for layer in self._layers:
            block = torch.from_numpy(base[kind_of(self.shape, layer)])
            self.arena[self._at[layer] : self._at[layer] + len(block)] = block.to(self.device)
        self._others: list[list[bytes]] = msgspec.msgpack.decode(others.read_bytes(), type=list[list[bytes]])
        self.sink = StampedSink(LocalSink(directory))
        config = PublishConfig(
            run=self.schema.run, snapshot=SnapshotPlace.DEVICE, gather=GatherKind.DIRECT, timeout_s=TIMEOUT_S
        )
        exporter = TensorExporter(self._tensors)
        self.callback = MegasyncCallback(exporter, self.sink, config, on_outcome=self._settled)
        self.callback.telemetry = self.telemetry
        snapshot = make_snapshot(self.schema, self._regions, config.snapshot, self.device)
        fill_from_live(snapshot)
        states = np.ascontiguousarray(table).view("<u8").astype(np.uint64)
        lineage = start_lineage(self.schema, claim(self.sink, config.run), states - self.mix)
        lineage = publish_checkpoint(self.sink, lineage)
        plan: OwnershipPlan = None  # type: ignore[assignment]  # of 64 ranks; after the start only replicas need it
        started = Started(self.schema, plan, snapshot, lineage.head, lineage, False, self.device, False)
        self.callback._enter(exporter, started, Groups(None, None, None), None)
        self._join_others()
        return lineage.head.fence

    def _join_others(self) -> None:
        """Let the exchange of metadata find what the other owners would tell."""
        alone = publish_module._exchange

        def joined(p: Any, delta: Any, error: Any, version: int) -> Any:
            parts = alone(p, delta, error, version)
            if not isinstance(parts, dict):
                parts = [*parts, *(read_contribution(told) for told in self._others[1 - version % 2])]
            self.telemetry.ended["gather"] = time.monotonic_ns()
            return parts

        publish_module._exchange = joined
        self._restore = lambda: setattr(publish_module, "_exchange", alone)

    def _settled(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def step(self) -> Answer:
        """An optimizer step that changes random bytes, and its publication.

        Returns:
            Moments in ns, and sizes.

        Raises:
            RuntimeError: It did not become durable.
        """
        self.callback.before_optimizer_step()
        num = int(self.nbytes * CHANGED)
        at = torch.randint(0, len(self.arena), (num,), device=self.device)
        self.arena[at] ^= torch.randint(1, 256, (num,), dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        entry = time.monotonic_ns()
        self.callback.step_end()
        returned = time.monotonic_ns()
        self.callback.before_optimizer_step()
        self.callback.flush()
        outcome, spans, done = self.outcome, self.telemetry.ended, self.sink.ended
        if outcome is None or not outcome.durable:
            raise RuntimeError(f"the publication failed: {outcome}")
        return {
            "version": outcome.version,
            "payload_nbytes": outcome.payload_nbytes,
            "manifest_nbytes": outcome.manifest_nbytes,
            "num_changed": outcome.num_changed,
            "entry": entry,
            "returned": returned,
            "masked": spans.get("landing", spans["mask"]),
            "encoded": spans["encode"],
            "gathered": spans["gather"],
            "payload": done["create payload"],
            "manifest": done["create manifest"],
            "head": done["swap_head"],
        }

    def block(self, kind: int) -> np.ndarray:
        """Bytes of the share of the layer that stands for a kind, as they are now."""
        num = block_nbytes(self._share[kind])
        return self.arena[self._at[kind] : self._at[kind] + num].cpu().numpy()

    def close(self) -> None:
        """Stop. Idempotent."""
        if hasattr(self, "_restore"):
            self._restore()
            self.callback.close()


class Role:
    """Answers requests: ``prepare``, ``start``, ``step``, ``block``."""

    def __init__(self) -> None:
        self.trainer: ShareTrainer | None = None

    def handle(self, request: Answer) -> Answer:
        """Do one request; its ``do`` says what."""
        what = request["do"]
        if what == "prepare":
            self.trainer = ShareTrainer(Shape(**request["shape"]), request["tp"], request["device"])
            return {"nbytes": self.trainer.nbytes, "schema": self.trainer.schema.digest.hex()}
        trainer = self.trainer
        assert trainer is not None, "prepare comes first"
        if what == "start":
            base = {int(kind): np.load(path) for kind, path in request["base"].items()}
            table = np.load(request["table"])
            return {"epoch": trainer.start(Path(request["directory"]), base, table, Path(request["others"]))}
        if what == "step":
            return trainer.step()
        if what == "block":
            np.save(request["path"], trainer.block(request["kind"]))
            return {}
        raise ValueError(f"unknown request {what!r}")


class Here:
    """A trainer in this process, for tests."""

    def __init__(self) -> None:
        self._role = Role()
        self._answers: deque[Answer] = deque()

    def send(self, request: Answer) -> None:
        """Do a request."""
        self._answers.append(self._role.handle(request))

    def receive(self) -> Answer:
        """The answer to the oldest request without one."""
        return self._answers.popleft()

    def close(self) -> None:
        """End it."""
        if self._role.trainer is not None:
            self._role.trainer.close()


class Remote:
    """A trainer in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "launch.bench.trainer_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, request: Answer) -> None:
        """Ask; it begins at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Answer:
        """The answer to the oldest request without one.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: Answer = json.loads(line[1:])
                return answer
            print(line, end="", flush=True)
        raise RuntimeError(f"the trainer ended with status {self._process.wait()}")

    def close(self) -> None:
        """End it and wait. Idempotent."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


Trainer = Here | Remote


def prepare(trainer: Trainer, shape: Shape, tp: int, device: str) -> None:
    """Ask a trainer to make its tables, which takes a while."""
    trainer.send({"do": "prepare", "shape": asdict(shape), "tp": tp, "device": device})


def main() -> None:
    """Answer requests until the input ends."""
    role = Role()
    for line in sys.stdin:
        print("@" + json.dumps(role.handle(json.loads(line))), flush=True)
    if role.trainer is not None:
        role.trainer.close()


if __name__ == "__main__":
    main()

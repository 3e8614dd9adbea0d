"""Joining with fresh weights whose dtype is not the run's: the anchor overwrites them, whatever they are a cast of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasync import Applier, TorchModuleEngine
from megasync.adapters.torch_trainer import TensorExporter
from megasync.config import ApplyConfig, PublishConfig
from megasync.errors import BaseMismatchError
from megasync.sinks.memory import MemorySink
from megasync.trainer.callback import MegasyncCallback
from megasync.versions.anchor import publish_checkpoint
from megasync.versions.head import claim
from megasync.versions.lineage import start_lineage
from megasync.versions.publication import PublicationReader


class Net(torch.nn.Module):
    """Two parameters with random values that no bf16 number has."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(40, 30))
        self.norm = torch.nn.Parameter(torch.randn(30))


def test_float32_weights_from_nowhere_take_the_anchor_of_a_bf16_run() -> None:
    values = {"w": torch.randn(40, 30).bfloat16(), "norm": torch.randn(30).bfloat16()}
    sink, net = MemorySink(), Net()
    callback = MegasyncCallback(TensorExporter(values), sink, PublishConfig(run="r"))
    callback.on_train_start()
    applier = Applier(TorchModuleEngine(net), sink, ApplyConfig(run="r", workers=1))
    assert applier.join().version == 0
    assert applier.ready
    values["w"].view(torch.int16)[0, :7] ^= 1
    callback.step_end()
    callback.on_train_end()
    assert applier.update().version == 1
    for name, value in values.items():
        assert torch.equal(getattr(net, name), value.float())
    applier.audit()
    applier.close()


def test_where_there_is_no_anchor_they_are_refused() -> None:
    values = {"w": torch.randn(40, 30).bfloat16(), "norm": torch.randn(30).bfloat16()}
    sink, other, net = MemorySink(), MemorySink(), Net()
    callback = MegasyncCallback(TensorExporter(values), other, PublishConfig(run="r"))
    callback.on_train_start()
    callback.on_train_end()
    reader = PublicationReader(other, "r")
    newest = reader.newest()
    assert newest is not None
    schema = reader.schema(newest.schema_digest)
    sums = np.ones((len(schema.tensors), 2), dtype=np.uint64)
    publish_checkpoint(sink, start_lineage(schema, claim(sink, "r"), sums))
    before = net.w.detach().clone()
    with pytest.raises(BaseMismatchError, match="not what is derived from their canonical bytes"):
        Applier(TorchModuleEngine(net), sink, ApplyConfig(run="r", workers=1)).join()
    assert torch.equal(net.w, before)

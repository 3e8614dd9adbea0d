"""Arguments of the wrong kind for the adapters: told at once, with what came, what is expected and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megasync.adapters.megatron import MegatronExporter
from megasync.adapters.names_hf import LLAMA
from megasync.adapters.registry import make_engine
from megasync.adapters.torch_module import TorchModuleEngine, rename
from megasync.adapters.torch_module_hf import TransformersEngine
from megasync.adapters.torch_trainer import TensorExporter

NET = torch.nn.Linear(3, 2)
TENSORS = {"w": torch.zeros(3)}


class Chunk(torch.nn.Linear):
    """As much of a Megatron-core model as the constructor looks at."""

    def sharded_state_dict(self, prefix: str = "", metadata: Any = None) -> dict[str, Any]:
        return {}


class Wrapped(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


CHUNK = Chunk(3, 2)


@pytest.mark.parametrize(
    "make",
    [TorchModuleEngine, TransformersEngine, lambda m: make_engine("hugging_face", m)],
    ids=["torch", "hf", "name"],
)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            NET.state_dict(),
            "got OrderedDict for its module, expected a torch.nn.Module: give the live model itself, not its state",
        ),
        ({}, "got dict for its module"),
        (
            torch.nn.Linear,
            "got the class Linear for its module, expected a torch.nn.Module: give the live model itself, not",
        ),
        ("Qwen/Qwen3-0.6B", "got str for its module"),
        ([NET], "got list for its module"),
        (None, "got NoneType for its module"),
        (torch.zeros(3), "got Tensor for its module"),
    ],
)
def test_an_engine_takes_a_live_module(make: Callable[[Any], Any], given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)) as e:
        make(given)
    assert str(e.value).startswith(("TorchModuleEngine got", "TransformersEngine got"))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            {"local": ".*bias"},
            TypeError,
            "got str for local, expected a list of regular expressions: write local=[...]",
        ),
        ({"local": 3}, TypeError, "got int for local, expected a list of regular expressions"),
        ({"local": [3]}, TypeError, "got int among local, expected a list of regular expressions"),
        ({"local": ["("]}, ValueError, "'(' in local is no regular expression"),
        ({"exclude": ["mtp.*"]}, TypeError, "got list for exclude, expected a mapping"),
        ({"exclude": "mtp.*"}, TypeError, "got str for exclude, expected a mapping"),
        ({"exclude": {3: "why"}}, TypeError, "got int in exclude, expected a regular expression"),
        ({"exclude": {"[": "why"}}, ValueError, "'[' in exclude is no regular expression"),
        ({"rules": rename("a", "b")}, TypeError, "got function for rules, expected a list of functions"),
        ({"rules": ["a"]}, TypeError, "got str among rules, expected a list of functions"),
        ({"seed": 3}, TypeError, "got int for seed, expected a function"),
        ({"observe": b"bytes"}, TypeError, "got bytes for observe, expected a function"),
    ],
)
def test_the_other_arguments_of_an_engine(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        TorchModuleEngine(NET, **arguments)


def test_what_an_engine_takes() -> None:
    engine = TorchModuleEngine(
        NET,
        local=(p for p in ("a", re.compile("b"))),  # type: ignore[arg-type]
        exclude={"c": "why"},
        rules=(r for r in [rename("a", "b")]),  # type: ignore[arg-type]
        observe=lambda: b"",
    )
    assert [p.pattern for p in engine.local] == ["a", "b"]
    assert (len(engine.rules), list(engine.exclude.values())) == (1, ["why"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"volatile": "bias"}, "got str for volatile, expected a list of texts: write volatile=[...]"),
        ({"volatile": [re.compile("a")]}, "got Pattern among volatile, expected a list of texts"),
        ({"volatile": 3}, "got int for volatile, expected a list of texts"),
        ({"volatile": [torch.zeros(1)]}, "got Tensor among volatile"),
        ({"layer_of": 3}, "got int for layer_of, expected a function"),
    ],
)
def test_the_other_arguments_of_a_tensor_exporter(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"TensorExporter {words}")):
        TensorExporter(TENSORS, **arguments)
    if "volatile" in arguments:
        with pytest.raises(TypeError, match=re.escape(words)):
            TensorExporter.of_module(NET, **arguments)


def test_volatile_names_may_come_from_anywhere() -> None:
    (piece,) = TensorExporter(TENSORS, volatile=(n for n in TENSORS)).pieces()
    assert piece.volatile


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        (CHUNK, "got Chunk for its chunks, expected a list of model chunks: give [model]"),
        (torch.nn.Sequential(CHUNK), "got Sequential for its chunks"),
        (
            {"w": torch.zeros(3)},
            "got dict for its chunks, expected a list of model chunks: give the list that the trainer",
        ),
        ("model", "got str for its chunks"),
        (None, "got NoneType for its chunks"),
        (
            [NET.state_dict()],
            "got OrderedDict for chunk 0, expected a torch.nn.Module: give the live model itself, not its",
        ),
        ([CHUNK, NET], "got Linear for chunk 1, which has no sharded_state_dict(), expected a Megatron-core model"),
        ([Wrapped(NET)], "got Linear for chunk 0, which has no sharded_state_dict()"),
    ],
)
def test_megatron_chunks(chunks: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"MegatronExporter {words}")):
        MegatronExporter(chunks, LLAMA)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (
            {"names": "llama"},
            TypeError,
            "got str for names, expected a NameTable: give one of megasync.adapters.names_hf",
        ),
        ({"names": None}, TypeError, "got NoneType for names"),
        ({"vocab_size": "5"}, TypeError, "got str for vocab_size, expected a whole number"),
        ({"vocab_size": 5.0}, TypeError, "got float for vocab_size"),
        ({"vocab_size": True}, TypeError, "got bool for vocab_size"),
        ({"vocab_size": -1}, ValueError, "vocab_size must be positive, not -1"),
        ({"metadata": None}, TypeError, "got NoneType for metadata, expected a mapping"),
        ({"checkpoint": "gguf"}, ValueError, "'gguf' is unknown: give one of modelopt, compressed-tensors, deepseek"),
    ],
)
def test_the_other_arguments_of_a_megatron_exporter(
    arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        MegatronExporter([CHUNK], **{"names": LLAMA, **arguments})


def test_what_a_megatron_exporter_takes() -> None:
    for chunks in ([CHUNK], (CHUNK,), torch.nn.ModuleList([CHUNK]), (c for c in [Wrapped(Wrapped(CHUNK))])):
        exporter = MegatronExporter(chunks, LLAMA, vocab_size=np.int64(7))  # type: ignore[arg-type]
        assert type(exporter._vocab_size) is int  # it gets into the schema

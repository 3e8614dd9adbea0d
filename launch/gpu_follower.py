"""The engine side of launch/gpu_megatron.py: a plain torch module in a process of its own follows what is published.

After every version it notes a digest of all its live bytes, made with plain torch operations: nothing of megasync's
digests or deltas is in it. launch/gpu_megatron.py starts it and compares. Needs no Megatron.

    python launch/gpu_follower.py FOLDER   (the folder that gpu_megatron.py made, with follower.json in it)
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launch.bench.entry import Parser, refuse, require_cuda
from launch.demo.full_gather import sha256_of
from megasync import Applier
from megasync.adapters.torch_module import TorchModuleEngine
from megasync.config import ApplyConfig
from megasync.manifest import Manifest
from megasync.receiver.ledger import Ledger
from megasync.receiver.route import steps
from megasync.sinks.local import LocalSink
from megasync.versions.publication import PublicationReader

_CHUNK_WORDS = 1 << 25
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x5851F42D4C957F2D)
SHA_EVERY = 50  # versions that are also hashed on the host, which takes seconds a time


def llama_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama checkpoint by name.

    Args:
        sizes: Fields of ``megatron_setup.TinyModel``.
    """
    h, f, d = sizes["hidden_size"], sizes["ffn_hidden_size"], sizes["head_dim"]
    q, kv = sizes["num_heads"] * d, sizes["num_groups"] * d
    layer = {
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], h)}
    for i in range(sizes["num_layers"]):
        out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return out | {"model.norm.weight": (h,), "lm_head.weight": (sizes["vocab_size"], h)}


def module_of(shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A module with random parameters of these names: what an engine's weights are to the applier."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(torch.randn(shape, device=device, dtype=dtype), False))
    return root


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, shapes and bytes, computed where the tensors are.

    Two sums of 4-byte words times odd position weights, modulo 2^64: any change of one word changes it, and accidents
    do not cancel. Tensors must have a multiple of 4 bytes.
    """
    out = hashlib.sha256()
    for name in sorted(tensors):
        words = tensors[name].detach().contiguous().view(-1).view(torch.int32)
        sums = torch.zeros(2, dtype=torch.int64, device=words.device)
        for at in range(0, len(words), _CHUNK_WORDS):
            part = words[at : at + _CHUNK_WORDS].to(torch.int64)
            place = torch.arange(at + 1, at + 1 + len(part), device=words.device)
            for lane, odd in enumerate(_ODD):
                weight = place * odd
                sums[lane] += (part * ((weight ^ (weight >> 29)) | 1)).sum()
        out.update(f"{name} {tuple(tensors[name].shape)} {sums.tolist()}\n".encode())
    return out.hexdigest()


def notes(version: int, tensors: Mapping[str, torch.Tensor], last: bool = False) -> dict[str, Any]:
    """What either side records of a version."""
    row: dict[str, Any] = {"version": version, "digest": digest_of(tensors)}
    if last or version % SHA_EVERY == 0:
        row["sha256"] = sha256_of({n: t.detach().cpu() for n, t in tensors.items()})
    return row


def start_follower(folder: Path, sizes: Mapping[str, int], device: torch.device) -> subprocess.Popen[bytes]:
    """Empty the folder and start the engine process.

    Args:
        folder: For the sink and for what both sides note.
        sizes: Of the model.
        device: Where the engine's weights go.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "sink").mkdir(parents=True)
    told = {
        "sizes": dict(sizes),
        "device": str(device),
        "dtype": "bfloat16",
        "sink": str(folder / "sink"),
        "run": "gpu",
    }
    (folder / "follower.json").write_text(json.dumps(told))
    return subprocess.Popen([sys.executable, str(Path(__file__).resolve()), str(folder)])


def follow(folder: Path) -> None:
    """Apply every version, one by one, until the trainer says which was the last."""
    told = json.loads((folder / "follower.json").read_text())
    device = torch.device(told["device"])
    if device.type == "cuda":
        require_cuda()
        torch.cuda.set_device(device)
    module = module_of(llama_shapes(told["sizes"]), device, getattr(torch, told["dtype"]))
    live = dict(module.named_parameters())
    config = ApplyConfig(run=told["run"])
    applier = Applier(TorchModuleEngine(module), LocalSink(told["sink"]), config, route=_next_step)
    print("follower: ready", flush=True)
    _wait_for((folder / "go").exists)
    with (folder / "follower.jsonl").open("w") as out:
        for result in _updates(applier, folder / "last"):
            row = notes(applier.version, live)
            row |= {"pause_s": result.pause_s, "density": result.density, "backend": result.backend}
            out.write(json.dumps(row) + "\n")
        out.write(json.dumps(row | notes(applier.version, live, last=True)) + "\n")
    applier.close()


def _updates(applier: Applier, last: Path) -> Iterator[Any]:
    yield applier.join()
    while not (last.exists() and applier.version == int(last.read_text())):
        result = applier.update()
        if result.versions:
            yield result
        else:
            time.sleep(0.01)


def _next_step(reader: PublicationReader, held: Ledger, wanted: Manifest) -> list[Manifest]:
    """Only the next publication on the way, so that every version can be looked at."""
    return steps(reader, held, wanted)[:1]


def _wait_for(done: Callable[[], bool], patience_s: float = 300.0) -> None:
    until = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"the trainer did not go on within {patience_s:g} s")
        time.sleep(0.01)


def main() -> None:
    """Entry point; exit status 2 where the folder is not one that gpu_megatron.py made."""
    parser = Parser(__doc__, results=False)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder that launch/gpu_megatron.py made")
    folder = parser.parse_args().folder
    if not (folder / "follower.json").is_file():
        refuse(f"{folder} has no follower.json: start launch/gpu_megatron.py, which makes the folder and starts this")
    follow(folder)


if __name__ == "__main__":
    main()

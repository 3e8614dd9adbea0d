"""A full copy of weights from one GPU to another of the same host, by NCCL send and receive.

What a user could do without any delta where trainer and engine are on one host. NVLink multicast is not used by it. Before
it: rows. After it: bench_peers.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launch.bench.rows import RowWriter, Timed, middle

WAY = "full copy between two GPUs by NCCL"
_SAMPLES = 9


def run_nvlink(out: Path, nbytes: int) -> None:
    """Copy between GPU 0 and 1.

    Args:
        out: Result file.
        nbytes: Bytes sent.

    Raises:
        RuntimeError: There is one GPU, or the copy is not what was sent.
    """
    if torch.cuda.device_count() < 2:
        raise RuntimeError(f"a copy between GPUs needs two of them, there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"file://{folder}/rendezvous", out, nbytes), nprocs=2)  # type: ignore[attr-defined]


def _rank(rank: int, rendezvous: str, out: Path, nbytes: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=2, device_id=device)
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    wanted = _random(nbytes, device)
    if rank == 0:
        data.copy_(wanted)
    seconds = []
    for i in range(_SAMPLES + 2):
        if rank:
            data.zero_()
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        if rank == 0:
            dist.send(data, 1)
        else:
            dist.recv(data, 0)
        torch.cuda.synchronize()
        if i >= 2:
            seconds.append(time.perf_counter() - started)
    if rank:
        if not torch.equal(data, wanted):
            raise RuntimeError("the copy is not what was sent")
        with RowWriter(out, "peers") as writer:
            for i, s in enumerate(seconds):
                writer.add(
                    f"peer: {WAY}",
                    nbytes_in=nbytes,
                    nbytes_out=nbytes,
                    sample=i,
                    took=Timed(s, 0.0),
                    way=WAY,
                    weights_nbytes=nbytes,
                    moved_nbytes=nbytes,
                    checked="every bit",
                    nccl=".".join(map(str, torch.cuda.nccl.version())),
                )
        each = middle(seconds)[0]
        print(f"{WAY}: {each * 1e12 / nbytes:.4f} ms/GB, {nbytes / each / 1e9:.1f} GB/s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _random(nbytes: int, device: torch.device) -> torch.Tensor:
    """The same random bytes on every GPU."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.empty(nbytes // 8, dtype=torch.int64, device=device).random_(generator=generator).view(torch.uint8)

r"""What comparing weights with a snapshot in pinned memory costs a step, by how the work is queued beside it (P2).

With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` the streams of a GPU share one hardware queue, and work of one waits behind work of another.
A step is matrix products; when the first are queued the comparison begins, in one of several ways, an event is recorded on
the products' stream as every collective of a trainer does, and the step ends when the comparison has read its last weight. The
comparison is a plain kernel that counts what differs: only what is queued where is measured, not the library's mask.

    CUDA_DEVICE_MAX_CONNECTIONS=1 python -m launch.bench.bench_one_queue
    python -m launch.bench.bench_one_queue out=launch/bench/results/one-queue-gpu-unset.jsonl
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from launch.bench.entry import plain_hydra, register, settings_of
from launch.bench.places import result_file
from launch.bench.rows import RESULTS, RowWriter, Timed, middle, table

_AHEAD = 10  # products that are queued when the comparison begins
_SPAN_NBYTES = 384 << 20
_NUM_SLOTS = 3
_HIGH = -5  # priority


@dataclass
class OneQueueBench:
    """Configuration.

    Attributes:
        repeats: Samples a case, each beside one of products alone.
        step_products: 8192-wide products of a step, about 1.6 ms each.
        nbytes: Of the weights compared.
        out: Folder of the result file, or the file itself, which ends in ``.jsonl``.
    """

    repeats: int = 5
    step_products: int = 450
    nbytes: int = 6_960_000_000
    out: str = str(RESULTS)


class Comparison:
    """Weights in HBM, the snapshot in pinned memory, and ways to compare them.

    Every way is called with a mark of the compute stream and returns a function that waits on the host until all is queued,
    and gives the event of the last read.
    """

    def __init__(self, nbytes: int) -> None:
        self.num = nbytes // _SPAN_NBYTES * (_SPAN_NBYTES // 8)
        self.new = torch.randint(-(2**62), 2**62, (self.num,), device="cuda")
        self.old = torch.empty(self.num, dtype=torch.int64, pin_memory=True)
        self.old.copy_(self.new)
        self.slots = [torch.empty(_SPAN_NBYTES // 8, dtype=torch.int64, device="cuda") for _ in range(_NUM_SLOTS)]
        self.landed = torch.empty(self.num, dtype=torch.int64, pin_memory=True)
        self.side, self.high = torch.cuda.Stream(), torch.cuda.Stream(priority=_HIGH)
        self.up = torch.cuda.Stream()
        self.counts = torch.zeros(4096, dtype=torch.int32, device="cuda")

    def single_launch(self, mark: torch.cuda.Event) -> Callable[[], torch.cuda.Event]:
        """One kernel on 8 multiprocessors that reads old words across PCIe."""
        with torch.cuda.stream(self.side):
            self.side.wait_event(mark)
            self._differ(self.old.data_ptr(), self.new, programs=8)
            done = _event()
        return lambda: done

    def from_hbm(self, mark: torch.cuda.Event) -> Callable[[], torch.cuda.Event]:
        """Kernels that read old words in HBM (always the same ones), all launched at once."""
        n = _SPAN_NBYTES // 8
        with torch.cuda.stream(self.side):
            self.side.wait_event(mark)
            for at in range(0, self.num, n):
                self._differ(self.slots[0].data_ptr(), self.new[at : at + n], programs=2112)
            done = _event()
        return lambda: done

    def staged(self, mark: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> Callable[[], torch.cuda.Event]:
        """Copy engines bring old words up, and a thread launches a kernel when a span has come."""
        side, n = stream or self.side, _SPAN_NBYTES // 8
        found: list[torch.cuda.Event] = []

        def rise(i: int) -> torch.cuda.Event:
            with torch.cuda.stream(self.up):
                self.slots[i % _NUM_SLOTS].copy_(self.old[i * n : (i + 1) * n], non_blocking=True)
                return _event()

        def work() -> None:
            num = self.num // n
            risen = [rise(i) for i in range(min(_NUM_SLOTS, num))]
            with torch.cuda.stream(side):
                side.wait_event(mark)
                for i in range(num):
                    risen[i].synchronize()
                    self._differ(self.slots[i % _NUM_SLOTS].data_ptr(), self.new[i * n : (i + 1) * n], programs=2112)
                    done = _event()
                    if i + _NUM_SLOTS < num:
                        done.synchronize()
                        risen.append(rise(i + _NUM_SLOTS))
                found.append(done)

        thread = threading.Thread(target=work)
        thread.start()

        def wait() -> torch.cuda.Event:
            thread.join()
            return found[0]

        return wait

    def staged_high(self, mark: torch.cuda.Event) -> Callable[[], torch.cuda.Event]:
        """The same on a stream of high priority."""
        return self.staged(mark, self.high)

    def copied_down(self, mark: torch.cuda.Event) -> Callable[[], torch.cuda.Event]:
        """No kernel: copy engines bring new words down, where the CPU can compare them."""
        n = 32 << 17
        with torch.cuda.stream(self.side):
            self.side.wait_event(mark)
            for at in range(0, self.num, n):
                self.landed[at : at + n].copy_(self.new[at : at + n], non_blocking=True)
            done = _event()
        return lambda: done

    def _differ(self, old: int, new: torch.Tensor, programs: int) -> None:
        from launch.bench.one_queue_triton import differ_kernel

        differ_kernel[(programs,)](old, new, len(new), self.counts, STEP=2048, STAGES=3, num_warps=8)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


class Step:
    """Products that stand for forward and backward."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.a, self.b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run(self, compare: Callable[[torch.cuda.Event], Callable[[], torch.cuda.Event]] | None) -> tuple[Timed, float]:
        """One step; its wall time, and how long the last read was behind the last product (seconds)."""
        torch.cuda.synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        wait = None
        for i in range(self.num):
            torch.matmul(self.a, self.b)
            if i == _AHEAD:
                wait = compare(_event()) if compare is not None else None
                _event()
        ready, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        ready.record()
        if wait is not None:
            torch.cuda.current_stream().wait_event(wait())
        end.record()
        torch.cuda.synchronize()
        took = Timed(time.perf_counter() - start, time.process_time() - cpu)
        return took, ready.elapsed_time(end) / 1e3


def run(config: OneQueueBench) -> Path:
    """All cases; returns the result file."""
    torch.manual_seed(0)
    path, comparison, step = (
        result_file(config.out, "one-queue-gpu.jsonl"),
        Comparison(config.nbytes),
        Step(config.step_products),
    )
    c = comparison
    cases = {
        "kernels over HBM, launched at once": c.from_hbm,
        "kernels as copies come up": c.staged,
        "kernels as copies come up, high priority": c.staged_high,
        "one kernel that reads across PCIe": c.single_launch,
        "copies down, no kernel": c.copied_down,
    }
    common = {"max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")}
    common |= {"nbytes_in": c.num * 8, "nbytes_out": 0}
    lines = []
    with RowWriter(path, "one queue") as out:
        for name, compare in cases.items():
            step.run(compare)
            alone, beside, held = [], [], []
            for i in range(config.repeats):
                took, _ = step.run(None)
                alone.append(took.seconds)
                out.add("products alone", sample=i, took=took, beside=name, **common)
                took, behind = step.run(compare)
                beside.append(took.seconds)
                held.append(behind)
                out.add(name, sample=i, took=took, held_s=behind, **common)
            a, b, h = (middle(x)[0] * 1e3 for x in (alone, beside, held))
            lines.append((name, f"{a:.1f}", f"{b:.1f}", f"{100 * (b / a - 1):.2f}", f"{h:.2f}"))
            print(lines[-1], flush=True)
    print(table(("case", "alone, ms", "beside, ms", "slower, %", "held, ms"), lines))
    return path


register("bench_one_queue", OneQueueBench)


@hydra.main(version_base="1.3", config_name="bench_one_queue", config_path=None)
def main(config: Any) -> None:
    """Entry point."""
    run(settings_of(OneQueueBench, config, least={"nbytes": _SPAN_NBYTES}))


if __name__ == "__main__":
    plain_hydra(OneQueueBench)
    main()

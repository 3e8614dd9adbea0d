"""A decoder whose matrices are live weights, and the loop that makes its tokens: what a sync has to pause.

Weights are read as signed bytes, so all sums are integers: a step replayed from a CUDA graph and the same step run eagerly
give equal logits, and one changed byte of a matrix shows. The loop runs on a thread of its own, one token after the other;
``pause`` returns once it stands between two tokens. Before it: receiver_world. After it: serving.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from launch.bench.workload import Shape

WAIT_S = 60.0
"""Longest that a token, or the end of one, is waited for."""


class Decoder:
    """A small transformer-like step over views of live weights: embedding, two products a layer, head, greedy token.

    Args:
        live: Storages by name, uint8, flat; from ``receiver_world``.
        shape: Sizes of the model.
        batch: Sequences that are decoded at once.
        rows: Rows that a layer's two products take of its stacked experts.

    Attributes:
        tokens: int64 ``[batch]``; a step reads them and puts the next ones there.
        logits: int32 ``[batch, vocabulary of the rank]``, of the last step.
    """

    def __init__(self, live: Mapping[str, torch.Tensor], shape: Shape, *, batch: int = 32, rows: int = 8192) -> None:
        width = 2 * shape.hidden
        self._embedding = live["model.embed_tokens.weight"].view(torch.int8).view(-1, width)
        self._head = live["lm_head.weight"].view(torch.int8).view(-1, width)
        self._layers = []
        for layer in range(shape.num_dense, shape.num_layers):
            up, down = (live[f"layers.{layer}.{name}"].view(torch.int8) for name in ("w13", "w2"))
            num = min(rows, up.numel() // width, down.numel() // width) // 8 * 8
            self._layers.append((up[: num * width].view(num, width), down[: num * width].view(width, num)))
        device = self._head.device
        self.tokens = torch.arange(batch, device=device) % len(self._embedding)
        self.logits = torch.zeros((batch, len(self._head)), dtype=torch.int32, device=device)
        self.nbytes = sum(a.numel() + b.numel() for a, b in self._layers) + self._head.numel()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._host = torch.zeros(batch, dtype=torch.int64, pin_memory=device.type == "cuda")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of some tokens by the weights as they are now, eagerly."""
        x = self._embedding.index_select(0, tokens)
        for up, down in self._layers:
            inner = _narrow(torch._int_mm(x, up.t()), up.shape[1]).clamp_(min=0)
            x = (x >> 1) + (_narrow(torch._int_mm(inner, down.t()), down.shape[1]) >> 1)
        return torch._int_mm(x, self._head.t())

    def _step(self) -> None:
        self.logits.copy_(self.forward(self.tokens))
        self.tokens.copy_(self.logits.argmax(1))

    def capture(self) -> None:
        """Capture a step, on a GPU; from here on every token is a replay of it."""
        if self._stream is None:
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph
        torch.cuda.synchronize()

    def token(self) -> torch.Tensor:
        """Make the next token of every sequence and bring them to the host, as an engine does to stop and stream them.

        Returns:
            int64 ``[batch]``, host, overwritten by the next call. *Stream*: the decoder's own; waited for.
        """
        if self._stream is None:
            self._step()
            return self._host.copy_(self.tokens)
        assert self._graph is not None, "capture() comes before token()"
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            self._host.copy_(self.tokens, non_blocking=True)
        self._stream.synchronize()
        return self._host

    def logits_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of given tokens through the same path as ``token``: the captured graph on a GPU. The loop must stand."""
        kept = self.tokens.clone()
        self.tokens.copy_(tokens)
        _finish(self.tokens)
        self.token()
        found = self.logits.clone()
        self.tokens.copy_(kept)
        _finish(self.tokens)
        return found


class DecodeLoop:
    """Makes tokens on a thread of its own until closed.

    Attributes:
        ends: When each token was on the host, ns of ``time.monotonic_ns``.
        stands_at: When the loop last came to stand, ns.
        around: By the number of the first token after a stand: the tokens before it, and it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.ends: list[int] = []
        self.stands_at = 0
        self.around: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last = decoder.tokens.cpu()
        self._asked, self._closing = threading.Event(), threading.Event()
        self._standing, self._go = threading.Event(), threading.Event()
        self._more = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                stood = self._asked.is_set()
                if stood:
                    self.stands_at = time.monotonic_ns()
                    self._standing.set()
                    self._go.wait()
                before = self._last
                made = self.decoder.token()
                self.ends.append(time.monotonic_ns())
                self._last = made.clone()
                if stood:
                    self.around[len(self.ends) - 1] = before, self._last
                with self._more:
                    self._more.notify_all()
        except BaseException as e:
            self._error = e
            self._standing.set()
            with self._more:
                self._more.notify_all()

    def pause(self) -> None:
        """Stop between two tokens; returns once the loop stands and nothing of it is queued on the device.

        Raises:
            RuntimeError: The loop ended.
        """
        self._go.clear()
        self._asked.set()
        if not self._standing.wait(WAIT_S) or self._error is not None:
            raise RuntimeError("the decoder does not stop") from self._error

    def resume(self) -> None:
        """Go on."""
        self._asked.clear()
        self._standing.clear()
        self._go.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause around a body."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def wait(self, num: int, since: int | None = None) -> int:
        """Wait until so many tokens were made since one of them (by default, since now); gives the number made so far.

        Raises:
            RuntimeError: The loop ended, or makes none.
        """
        wanted = (len(self.ends) if since is None else since) + num
        with self._more:
            made = self._more.wait_for(lambda: len(self.ends) >= wanted or self._error is not None, WAIT_S * 5)
        if not made or self._error is not None:
            raise RuntimeError(f"the decoder made {len(self.ends)} tokens, {wanted} were waited for") from self._error
        return len(self.ends)

    def first_after(self, at: int) -> int:
        """Number of the first token that was made after a moment (ns), waited for."""
        self.wait(1)
        return bisect_right(self.ends, at)

    def latencies(self, first: int, stop: int) -> list[float]:
        """Seconds from each token to the next, of tokens ``first`` to ``stop``."""
        ends = self.ends[max(first - 1, 0) : stop]
        return [(b - a) / 1e9 for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def close(self) -> None:
        """End the loop and wait for it. Idempotent."""
        self._closing.set()
        self.resume()
        if self._thread.ident is not None:
            self._thread.join(WAIT_S)


def _narrow(sums: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Sums of products of random bytes back to bytes: about 74 a weight, times what came in."""
    return (sums.to(torch.float32) * (1.0 / (74.0 * num_terms**0.5))).round_().clamp_(-127, 127).to(torch.int8)


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)

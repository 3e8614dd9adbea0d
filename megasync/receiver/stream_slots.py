"""The two slots in HBM that masks are decoded into, one beside the other.

Comes between ``stream_decode`` and ``stream_placed``. Must import nothing above them.
"""

from __future__ import annotations

import torch

from megasync.receiver.stream_decode import PLACES, BlockDecoder
from megasync.receiver.stream_plan import Step
from megasync.receiver.stream_room import Room


class Slots:
    """The two slots of a backend, and the stream that fills them.

    Attributes:
        masks: uint8 ``[nbytes]`` each.
        held: The step whose masks are in each, decoded and checked; None while that is not known.
        stream: Decodes; None on the CPU.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocate.

        *Memory*: ``2 * nbytes`` of the device, for good.
        """
        self.masks = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(PLACES)]
        self.held: list[Step | None] = [None] * PLACES
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._decoded = [torch.cuda.Event() for _ in range(PLACES)] if self.stream is not None else []
        self._read: list[torch.cuda.Event | None] = [None] * PLACES
        if self.stream is not None:
            torch.cuda.current_stream(device).synchronize()

    def fill(self, place: int, step: Step, room: Room, decoder: BlockDecoder) -> None:
        """Queue everything that makes a step's masks, once the slot's last reader is done."""
        mask, self.held[place] = self.masks[place], None
        if self.stream is None:
            self._copy(mask, step, room)
            decoder.queue(place, step, room, mask, None)
            return
        before = self._read[place]
        if before is not None:
            self.stream.wait_event(before)
        with torch.cuda.stream(self.stream):
            self._copy(mask, step, room)
        decoder.queue(place, step, room, mask, self.stream)
        self._decoded[place].record(self.stream)

    def finish(self, place: int, step: Step, decoder: BlockDecoder) -> None:
        """Wait for a place's blocks and check them; see ``BlockDecoder.finish``."""
        decoder.finish(place)
        self.held[place] = step

    @staticmethod
    def _copy(mask: torch.Tensor, step: Step, room: Room) -> None:
        """Blocks that are no decoder's business: absent and `stored` ones."""
        for a, b in step.absent:
            mask[a:b].zero_()
        host = torch.from_numpy(room.view)
        for a, b, n in zip(
            step.stored.source.tolist(), step.stored.target.tolist(), step.stored.nbytes.tolist(), strict=True
        ):
            mask[b : b + n].copy_(host[a : a + n], non_blocking=True)

    def use(self, place: int) -> torch.Tensor:
        """The masks of a place, on the current stream, after they were decoded."""
        if self.stream is not None:
            torch.cuda.current_stream(self.masks[place].device).wait_event(self._decoded[place])
        return self.masks[place]

    def release(self, place: int) -> None:
        """The slot may be filled again once the current stream has come this far."""
        if self.stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.masks[place].device))
            self._read[place] = event

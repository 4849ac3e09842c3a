"""What the blocks keep for backward waits in CPU memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.decoder import Block, Stream, Values, Walk, through
from parallel.local import is_sharded, local

SMALL = 1 / 16  # of the block's input, in bytes; what is less (statistics of norms) is not worth a copy


class OffloadedWalk(Walk):
    """What a block keeps is copied to CPU memory while the next block runs, and back while the next block goes
    backward; the last block's stays. On CUDA through pinned memory, on a stream beside the computation's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def forward(self, blocks: Sequence[Block], stream: Stream, values: Values, **inputs: Tensor | None) -> Stream:
        before: Shelf | None = None
        for place, block in enumerate(blocks):
            least = float("inf") if place == len(blocks) - 1 else stream[0].nbytes * SMALL
            shelf = Shelf(block, least, before, self.device, self.copying)
            with torch.autograd.graph.saved_tensors_hooks(shelf.put, shelf.take):
                stream = through(block, stream, values=values[place], **inputs)
            if before is not None:
                before.let_go()
            before = shelf
        return stream


@dataclass
class Memory:
    """The bytes of a storage: on the device, on the CPU, or on both."""

    here: Tensor | None
    host: Tensor


@dataclass(frozen=True)
class View:
    """A tensor as a part of a storage. `whole` makes the DTensor of it, where it was one."""

    memory: Memory
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    whole: Callable[[Tensor], Tensor] | None


class Shelf:
    """What one block keeps, from `least` bytes on; a storage is copied whole and once, however many views of it are
    kept. `before`: the shelf of the block before, fetched when this one is first used."""

    def __init__(
        self,
        block: nn.Module,
        least: float,
        before: "Shelf | None",
        device: torch.device,
        copying: torch.cuda.Stream | None,
    ) -> None:
        self.block, self.least, self.before, self.device, self.copying = block, least, before, device, copying
        self.memories: dict[int, Memory] = {}  # by address, which no other storage has while it is held here
        self.copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def put(self, tensor: Tensor) -> Tensor | View:
        """Called by autograd for each tensor it keeps."""
        part = local(tensor)
        storage = part.untyped_storage()
        address = storage.data_ptr()
        if part.nbytes < self.least:
            return tensor.detach()
        if address not in self.memories:
            # Looked at each time: FSDP2 empties the storage of whole ones when their unit ends, which may be a part of
            # the block, and another tensor may come to lie where they were.
            if address in {local(p).untyped_storage().data_ptr() for p in self.block.parameters()}:
                return tensor.detach()
            here = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            host = torch.empty(here.shape, dtype=torch.uint8, pin_memory=self.copying is not None)
            self._copy(host, here)
            self.memories[address] = Memory(here, host)
        offset = int(part.storage_offset())
        return View(self.memories[address], part.dtype, offset, part.shape, part.stride(), _maker(tensor))

    def let_go(self) -> None:
        """What is computed from here on may use the device's memory again."""
        self._wait()
        for memory in self.memories.values():
            memory.here = None

    def fetch(self) -> None:
        """Begins to copy everything back, the first time it is called."""
        for memory in self.memories.values():
            memory.here = torch.empty(memory.host.shape, dtype=torch.uint8, device=self.device)
            self._copy(memory.here, memory.host)
        self.memories.clear()  # from now on each lives as long as autograd has a view of it

    @torch.no_grad()
    def take(self, kept: Tensor | View) -> Tensor:
        """Called by autograd for each tensor it needs back."""
        self.fetch()
        self._wait()
        if self.before is not None:
            self.before.fetch()
        if isinstance(kept, Tensor):
            return kept
        assert kept.memory.here is not None
        view = torch.empty(0, dtype=kept.dtype, device=self.device)
        view.set_(kept.memory.here.untyped_storage(), kept.offset, kept.size, kept.stride)
        return view if kept.whole is None else kept.whole(view)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if self.copying is None:
            to.copy_(source)
            return
        self.copying.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copying):
            to.copy_(source, non_blocking=True)
        self.copied = self.copying.record_event()

    def _wait(self) -> None:
        """What is computed from here on comes after the copies."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)


def _maker(tensor: Any) -> Callable[[Tensor], Tensor] | None:
    """What makes a DTensor like this one of its local part; None for a plain tensor."""
    if not is_sharded(tensor):
        return None
    like = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return partial(type(tensor).from_local, device_mesh=tensor.device_mesh, placements=tensor.placements, **like)

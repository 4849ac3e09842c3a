"""Saving while the run goes on: each rank copies its state and writes the copy in a thread.

The threads of all ranks agree over a CPU group of their own, so that they meet no collective of the steps.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.local import is_sharded, local
from training.checkpoint.folders import Saved
from training.checkpoint.tensors import State
from training.ranks import Ranks


class Background:
    """One save at a time. What the threads do together is agreed on over `ranks`, a group of their own.

    ended: how many saves have ended on this rank, well or not.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self.ended = 0
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """The state in memory of its own, on the CPU; complete when this returns. The memory is kept and used again, so
        the save before must have ended. Pinned where it is filled from a GPU."""
        on_gpu = self.device.type == "cuda"
        copied = {}
        for name, tensor in state.items():
            here = local(tensor)
            if name not in self._memory:
                self._memory[name] = torch.empty_like(here, device="cpu", pin_memory=on_gpu)
            copied[name] = _with_local(tensor, self._memory[name].copy_(here, non_blocking=on_gpu))
        if on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        return copied

    def start(self, save: Callable[[], Saved]) -> None:
        assert self._thread is None
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, save: Callable[[], Saved]) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread; else it would open the first device
            self._outcome = save()
        except BaseException as error:
            self._outcome = error
        finally:
            self.ended += 1

    @property
    def writes(self) -> bool:
        """Whether this rank is at it."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> Saved | BaseException:
        """What came of the save on this rank."""
        assert self._thread is not None
        self._thread.join()
        outcome, self._thread, self._outcome = self._outcome, None, None
        assert outcome is not None
        return outcome

    def leave(self, seconds: float) -> None:
        """Before an early end: lets the save that is under way end, for so long at most."""
        if self._thread is not None:
            self._thread.join(seconds)


def _with_local(tensor: Tensor, part: Tensor) -> Tensor:
    """The same tensor with another local part, on any device, where DTensor.from_local would move it to the mesh's. By
    the protocol of tensors that wrap others; seen with DTensor of torch 2.11 and 2.15."""
    if not is_sharded(tensor):
        return part
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names} | {"_local_tensor": part}
    wrapped: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    return wrapped

"""Saving while the run goes on: each rank copies its state and writes the copy in a thread.

The threads of all ranks agree over a CPU group of their own, so that they meet no collective of the steps.
"""

import threading
from collections.abc import Callable

import torch

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
        self._stager: object | None = None

    def copy(self, state: State) -> State:
        """The state in memory of its own, on the CPU; complete when this returns. The memory is kept and used again, so
        the save before must have ended. Pinned where it is filled from a GPU."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            on_gpu = self.device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,
                )
            )
        assert isinstance(self._stager, DefaultStager)
        copied = self._stager.stage(dict(state))
        assert isinstance(copied, dict)
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

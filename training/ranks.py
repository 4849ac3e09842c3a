"""What the ranks agree on, over a CPU group of its own."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """All ranks of the run. What one rank could see differently (a clock, a signal, a file listing) goes through here
    before anyone acts on it. Every method but the constructor is a collective; alone each is the identity."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def alone(cls) -> "Ranks":
        return cls(None)

    def first(self, value: T) -> T:
        """Rank 0's value, on every rank. The others' values are not looked at."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def all(self, flag: bool) -> bool:
        return all(self.gather(flag))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def first_does(self, action: Callable[[], T]) -> T:
        """Rank 0 acts and all get its result, or all raise its OSError."""
        outcome: tuple[Any, OSError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (action(), None)
            except OSError as error:
                outcome = (None, error)
        result, failure = self.first(outcome)
        if failure is not None:
            raise failure
        return result

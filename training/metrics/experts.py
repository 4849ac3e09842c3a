"""How evenly tokens are spread over experts, for the records of steps."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from models.config import ModelConfig
from parallel.mesh import sum_over
from training.metrics.records import Record


def expert_records(steps: list[torch.Tensor], model: ModelConfig, mesh: DeviceMesh | None) -> list[Record]:
    """steps: of each what models.moe.load_statistics gave of the blocks here, whose pipeline stages are put together. A
    collective.

    expert_load_max, expert_load_min: the most and least loaded expert of any block, 1 is an even share;
    expert_load_cv: standard deviation of the loads over their mean, the mean over blocks; dropped_share: of the
    assignments, where there is a capacity."""
    table = torch.stack(steps).double()  # [steps, 4]
    extremes = table[:, :2].contiguous()
    if mesh is not None and mesh["pp"].size() > 1:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.get_group("pp"))
    sums = sum_over(mesh, ("pp",), table[:, 2:].contiguous())
    blocks = sum(map(model.routed, model.all_blocks))
    records: list[Record] = []
    for (most, least), (deviation, dropped) in zip(extremes.tolist(), sums.tolist(), strict=True):
        record = {"expert_load_max": most, "expert_load_min": -least, "expert_load_cv": deviation / blocks}
        if model.moe.capacity_factor is not None:
            record["dropped_share"] = dropped / blocks
        records.append(record)
    return records

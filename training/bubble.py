"""How long the ranks of a pipeline will wait for each other, and what would shrink that. torch, which has the
schedules, is imported only where there is a pipeline."""

from dataclasses import replace

from parallel.config import Schedule
from parallel.planning.stages import SPLIT
from training.check import accumulation, check
from training.config import Config
from training.nearby import counted
from training.plan import batch_of
from training.resolve import World


def bubble_told(config: Config, world: World, device_type: str) -> str:
    """The share of the time in which ranks of a pipeline wait, and what would shrink it; "" without one."""
    if config.parallel.pp == 1 or batch_of(config) is None or config.model.vocab_size is None:
        return ""
    share, ways = bubble_share(config), smaller_bubbles(config, world, device_type)[:3]
    shown = [f"{words} ({less:.1%}{_price(words)})" for words, less in ways]
    better = f"; less with {', '.join(shown)}" if shown else ""
    count, schedule = accumulation(config, world), config.parallel.schedule.name
    return f"\nbubble: {share:.1%} of the time, {schedule} with {counted(count, 'micro-batch')}{better}"


def _price(words: str) -> str:
    split = any(f"parallel.schedule={schedule.name}" in words.split() for schedule in SPLIT)
    return ", neither compiled nor computed again" if split else ""


def bubble_share(config: Config) -> float:
    """The expected one."""
    from parallel.bubble import bubble  # imports torch's pipelines

    batch = batch_of(config)
    assert batch is not None
    return bubble(config.model, config.parallel, batch.accumulation)


def smaller_bubbles(config: Config, world: World, device_type: str) -> list[tuple[str, float]]:
    """What would shrink it, best first: words to write instead, all of them legal, and the share with them."""
    from parallel.pipeline import sends_to_itself

    parallel, now = config.parallel, bubble_share(config)
    cuts = [name for name in ("stages_per_rank", "stage_layers") if getattr(parallel, name) is not None]
    uncut = "".join(f" parallel.{name}=null" for name in cuts)
    others = {
        f"parallel.schedule={schedule.name}{uncut}": replace(
            config,
            parallel=replace(parallel, schedule=schedule, stages_per_rank=None, stage_layers=None),
        )
        for schedule in Schedule
        if schedule is not parallel.schedule
    }
    if parallel.stage_layers is not None:
        others["parallel.stage_layers=null"] = replace(config, parallel=replace(parallel, stage_layers=None))
    assert isinstance(config.micro_batch, int)
    if config.micro_batch % 2 == 0:
        others[f"micro_batch={config.micro_batch // 2}"] = replace(config, micro_batch=config.micro_batch // 2)
    found = [
        (words, bubble_share(other))
        for words, other in others.items()
        if not check(other, world) and not sends_to_itself(other.parallel, device_type)
    ]
    return sorted([way for way in found if way[1] < 0.95 * now], key=lambda way: way[1])

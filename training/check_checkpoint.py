"""Whether what is saved, kept and gone back to can be. No torch here."""

import math
from collections.abc import Iterator

from training.checkpoint.remote import missing_package
from training.config import Best, Config, Load
from training.keys import keys, nearest
from training.nearby import alternatives, around, counted
from training.refusal import Problem
from training.resolve import World

# the scores of each task, and which is best
SCORES = {
    "heldout": {"loss": Best.lowest, "perplexity": Best.lowest, "bits_per_byte": Best.lowest},
    "continuation": {"accuracy": Best.highest},
}


def checkpoint_rules(config: Config, world: World) -> Iterator[Problem]:
    for rule in (_checkpoint, _spikes):
        yield from rule(config, world)


def _checkpoint(config: Config, world: World) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.dir is not None and not checkpoint.dir.strip():
        yield Problem("checkpoint.dir", checkpoint.dir, "is the folder of the checkpoints", "checkpoint.dir=null")
    for name in ("dir", "mirror", "load"):
        yield from _url(f"checkpoint.{name}", getattr(checkpoint, name) or "")
    if checkpoint.mirror is not None and checkpoint.mirror in (checkpoint.dir, ""):
        reason = "is where the checkpoints are saved first"
        yield Problem("checkpoint.mirror", checkpoint.mirror, reason, "checkpoint.mirror=null, or another place")
    every, permanent = checkpoint.every, checkpoint.permanent_every
    if every >= 0 and permanent > 0 and (every == 0 or permanent % every != 0):
        if every == 0:
            reason, instead = (
                "no checkpoints are saved on the way: checkpoint.every is 0",
                f"checkpoint.every={permanent}",
            )
        else:
            reason = f"is not a multiple of checkpoint.every={every}"
            instead = alternatives("checkpoint.permanent_every", around(permanent, every))
        yield Problem("checkpoint.permanent_every", permanent, reason, instead)
    for step in checkpoint.permanent_steps:
        if step < 1:
            kept = [wanted for wanted in checkpoint.permanent_steps if wanted >= 1]
            reason, instead = "steps are counted from 1", f"checkpoint.permanent_steps=[{','.join(map(str, kept))}]"
            yield Problem("checkpoint.permanent_steps", step, reason, instead)
    yield from _keep_best(config)
    if checkpoint.load is None and checkpoint.load_parts is not Load.weights:
        yield Problem(
            "checkpoint.load_parts",
            checkpoint.load_parts.name,
            "there is nothing to load",
            "checkpoint.load=outputs/<name>",
        )
    for name in checkpoint.allow_changes:
        if name not in keys():
            near = nearest(name, keys())
            instead = f"checkpoint.allow_changes=[{near[0]}]" if near else "dotted keys, such as [steps,optimizer.lr]"
            yield Problem("checkpoint.allow_changes", name, "there is no such key", instead)


def _url(name: str, place: str) -> Iterator[Problem]:
    if why := missing_package(place):
        extra = "`uv sync --extra s3`, or " if place.startswith("s3://") else ""
        yield Problem(name, place, why, f"{extra}a path, or a URL such as s3://bucket/prefix")
    elif "://" in place and "@" in place.partition("://")[2].partition("/")[0]:
        hidden = f"{place.partition('://')[0]}://...@{place.partition('@')[2]}"
        reason = "a URL is saved with the run, and must hold no secret"
        yield Problem(name, hidden, reason, "credentials in the environment, and a URL without them")


def _keep_best(config: Config) -> Iterator[Problem]:
    """A score that no checkpoint will have keeps none."""
    wanted, best_is = config.checkpoint.keep_best, config.checkpoint.best_is
    if wanted is None:
        return
    known = {f"{task}.{metric}": best for task, metrics in SCORES.items() for metric, best in metrics.items()}
    scored = [name for name in known if name.partition(".")[0] in config.evals.tasks]
    ways = [
        f"checkpoint.keep_best={name}"
        + (f" checkpoint.best_is={known[name].name}" if known[name] is not best_is else "")
        for name in scored
    ]
    if wanted not in scored:
        reason = "no checkpoint gets this score" if wanted in known else "there is no such score"
        yield Problem("checkpoint.keep_best", wanted, reason, " or ".join(ways) or "checkpoint.keep_best=null")
    elif best_is is not known[wanted]:
        reason = f"of {wanted} the {known[wanted].name} is best"
        yield Problem("checkpoint.best_is", best_is.name, reason, f"checkpoint.best_is={known[wanted].name}")


def _spikes(config: Config, world: World) -> Iterator[Problem]:
    """Whether there is a checkpoint to go back to when a spike comes right after one."""
    spikes, every, keep = config.spikes, config.checkpoint.every, config.checkpoint.keep
    if spikes.threshold <= 0:
        return
    if config.steps is not None and spikes.window >= config.steps:
        reason = f"no step has so many before it: the run has {config.steps:,}"
        instead = "spikes.threshold=0" if config.steps == 1 else f"spikes.window={max(config.steps // 10, 1)}"
        yield Problem("spikes.window", spikes.window, reason, instead)
    if every == 0:
        reason = "there is no checkpoint to go back to: checkpoint.every is 0"
        yield Problem("spikes.threshold", spikes.threshold, reason, "checkpoint.every=500, or spikes.threshold=0")
    elif every > 0 and keep >= 0 and (least := 1 + math.ceil(spikes.before / every)) > max(keep, 1):
        reason = f"right after a checkpoint a run goes back to one {counted(spikes.before, 'step')} before it, and "
        reason += "that must still be there"
        yield Problem("checkpoint.keep", keep, reason, f"checkpoint.keep={least}, or spikes.before=0")

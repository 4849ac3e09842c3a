"""What a run shows when it is done: a sample of text, the final table, and what one can do next."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.derive import derive
from parallel.apply import Spread
from parallel.compile import as_written
from training.config import Config
from training.data.packing import packed
from training.data.prepare import Prepared
from training.evals.baselines import baselines
from training.evals.sample import generate
from training.folder import RunFolder
from training.metrics import records
from training.metrics.console import final_table
from training.metrics.writers import EVALS_FILE
from training.tokenizers import Tokenizer

TEMPERATURE = 0.8


def sample(config: Config, spread: Spread, tokenizer: Tokenizer, device: torch.device) -> str:
    """Text by the model. A collective; rank 0's is the one to show."""
    prompt = [tokenizer.end_of_text, *tokenizer.encode(config.metrics.sample_prompt)]

    def logits(tokens: Tensor) -> Tensor:
        apart = packed(tokens, tokenizer.end_of_text) if config.data.mask_documents else {}
        return spread.forward(tokens=tokens, **apart)[..., : tokenizer.vocab_size]  # the model may have more

    spread.model.eval()
    seed = derive(config.seed, "sample")
    with as_written(spread.compiled):  # each width would be a graph for a few tokens
        count, context, parts = config.metrics.sample_tokens, config.model.context, config.parallel.sequence_cuts
        ids = generate(logits, prompt, count, context, TEMPERATURE, seed, device, parts)
    spread.model.train()
    if tokenizer.end_of_text in ids:
        ids = ids[: ids.index(tokenizer.end_of_text)]
    return config.metrics.sample_prompt + tokenizer.decode(ids)


def references(config: Config, prepared: Prepared, tokenizer: Tokenizer) -> dict[str, dict[tuple[str, str], float]]:
    """Rows of the final table that are not this model's: n-gram models of bytes on the same documents."""
    if "heldout" not in config.evals.tasks:
        return {}
    found = baselines(prepared, tokenizer, config.evals.heldout_tokens)
    return {f"{order} of bytes": {("heldout", "bits_per_byte"): value} for order, value in found.items()}


def result(folder: Path, other_models: Mapping[str, Mapping[tuple[str, str], float]]) -> str:
    """The final table, from the run's own files."""
    scores = records.read(folder / EVALS_FILE)
    return final_table(scores, other_models) if scores else "no scores (evals=none)"


def with_keys(command: str, keys: Mapping[str, str]) -> str:
    """The command with these keys in the place of their former values; steps also takes that of tokens and epochs."""
    lengths = {"steps", "tokens", "epochs"} if "steps" in keys else set()
    words = [word for word in shlex.split(command) if word.partition("=")[0] not in {*keys, *lengths}]
    return shlex.join([*words, *(f"{key}={value}" for key, value in keys.items())])


def next_ways(config: Config, folder: RunFolder, goes_on: str) -> str:
    """What one can do with a finished run."""
    steps, elsewhere = config.steps or 0, config.checkpoint.dir is not None
    score = {"eval_only": "true", "checkpoint.load": str(folder.checkpoints if elsewhere else folder.path)}
    score |= {"out": config.out} if config.out != "outputs" else {}
    score |= {"name": f"{folder.name}-scored"} if elsewhere else {}
    longer = with_keys(goes_on, {"steps": str(2 * steps), "checkpoint.allow_changes": "[steps]"})
    return "\n".join(
        [
            f"finished: {steps:,} steps; everything is in {folder.path}",
            f"  longer:     {longer}",
            f"  start anew: {with_keys(goes_on, {'name': f'{folder.name}-2'})}",
            f"  score:      {with_keys(goes_on.partition('train.py')[0] + 'train.py', score)}",
        ]
    )

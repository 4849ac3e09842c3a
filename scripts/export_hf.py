"""A checkpoint's model, as transformers reads it:

python -m scripts.export_hf outputs/gpt2_124m exported --dtype bf16
"""

import argparse
import os
from pathlib import Path

from training.compose import refusing
from training.refusal import Problem, Refusal


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.export_hf", description=__doc__.partition(":")[0])
    parser.add_argument("checkpoint", help="a run's folder, for its newest checkpoint, or a checkpoint's")
    parser.add_argument("folder", type=Path, help="where config.json, weights and tokenizer are written")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="of the weights; else as they were saved")
    return parser.parse_args(argv)


def run(words: argparse.Namespace) -> None:
    """Raises Refusal."""
    words.folder = words.folder.absolute()
    if words.folder.exists() and not words.folder.is_dir():
        raise Refusal([Problem("folder", words.folder, "is a file", "another folder")])
    if words.folder.exists() and any(words.folder.iterdir()):
        raise Refusal([Problem("folder", words.folder, "is there and not empty", "another folder")])
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise Refusal([Problem("torchrun", "", "one process does it", "python -m scripts.export_hf, without torchrun")])
    import torch  # takes seconds

    from training.checkpoint.store import find_intact
    from training.huggingface import export, tokenizer_of
    from training.ranks import Ranks

    saved = find_intact(words.checkpoint, Ranks.alone())
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    try:
        export(saved, tokenizer_of(saved), words.folder, dtypes.get(words.dtype))
    except ValueError as error:
        instead = "a model of a family in docs/models.md"
        raise Refusal([Problem("checkpoint", saved.folder, str(error), instead)]) from error
    except OSError as error:
        instead = "a folder that can be written"
        raise Refusal([Problem("folder", words.folder, str(error), instead)]) from error
    print(
        f"{saved.folder} is in {words.folder}: transformers.AutoModelForCausalLM.from_pretrained({str(words.folder)!r})"
    )


def main() -> None:
    with refusing():
        run(parse())


if __name__ == "__main__":
    main()

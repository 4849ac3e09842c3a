"""A Hugging Face model as a checkpoint of step 0, from a folder or from the hub, on one device or under torchrun:

python -m scripts.import_hf HuggingFaceTB/SmolLM2-135M name=smollm2
"""

import argparse
import os
import re
from pathlib import Path

from training.compose import refusing
from training.refusal import Problem, Refusal

FILES = ["*.safetensors", "*.json"]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.import_hf", description=__doc__.partition(":")[0])
    parser.add_argument("source", help="a folder with config.json and *.safetensors, or owner/name on the hub")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as name=llama parallel=fsdp2")
    return parser.parse_args(argv)


def fetched(source: str) -> Path:
    """The folder, of a model on the hub its copy here. Raises Refusal."""
    if Path(source).is_dir():
        return Path(source)
    instead = "a folder, or owner/name of a model on the hub"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise Refusal([Problem("source", source, "there is no such folder", instead)])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        reason = f"is no folder, and could not be fetched from the hub: {said}"
        raise Refusal(
            [Problem("source", source, reason, "a folder that has it, or a machine with a network")]
        ) from error


def run(words: argparse.Namespace) -> Path:
    """The folder of the checkpoint. Raises Refusal."""
    from training.imported import save_as_checkpoint  # imports torch, which takes seconds

    return save_as_checkpoint(fetched(words.source), words.overrides)


def main() -> None:
    with refusing():
        folder = run(parse())
    if os.environ.get("RANK", "0") == "0":
        print(f"saved in {folder}\n  score: python train.py eval_only=true checkpoint.load={folder}")


if __name__ == "__main__":
    main()

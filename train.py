"""The one entrypoint: compose, check, train. `python train.py --help` says how it is used."""

import sys

import hydra
from omegaconf import DictConfig

from training.check import check, describe
from training.compose import check_command, from_hydra, refusing
from training.refusal import Refusal
from training.resolve import World, resolve


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(composed: DictConfig) -> None:
    config, chosen = from_hydra(composed)
    world = World.of(config)
    resolve(config, world, chosen)
    problems = check(config, world)
    if problems:
        raise Refusal(problems)
    if config.check_only:
        print(describe(config, chosen))
        return
    from training.run import run  # imports torch, which takes seconds

    code = run(config, world, chosen)
    if code != 0:
        sys.exit(code)


if __name__ == "__main__":
    with refusing():
        check_command(sys.argv[1:])
        main()

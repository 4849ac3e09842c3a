"""The one entrypoint: compose, check, train. `python train.py --help` says how it is used."""

import os
import sys

import hydra
from omegaconf import DictConfig

from training.advice import Device, advice
from training.bubble import bubble_told
from training.check import describe, settle
from training.compose import check_command, from_hydra, refusing
from training.plan import axes_table, counts_told, settle_activations, stages_table


def print_comments(text: str) -> None:
    """Below a config, which stays YAML."""
    for line in text.splitlines():
        print(f"# {line}".rstrip())


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(composed: DictConfig) -> None:
    with refusing():
        config, chosen = from_hydra(composed)
        world = settle(config, chosen)
        if config.check_only:
            trains = not config.eval_only  # else the model is the checkpoint's, which is not looked at here
            if os.environ.get("RANK", "0") == "0":
                device = Device.described(config)
                why = settle_activations(config, device.dtype, device.memory_bytes) if trains else ""
                print(describe(config, chosen))
                if trains:
                    print_comments(counts_told(config))
                    print_comments(why)
                    print_comments(
                        stages_table(config, device.dtype) + bubble_told(config, world, config.hardware.device)
                    )
                    print_comments(axes_table(config, device.dtype))
                    for told in advice(config, world, device):
                        print_comments(f"advice: {told}")
            return
        from training.run import run  # imports torch, which takes seconds

        code = run(config, world, chosen)
    if code != 0:
        sys.exit(code)


if __name__ == "__main__":
    try:
        with refusing():
            check_command(sys.argv[1:])
            main()
    except KeyboardInterrupt:
        print("interrupted; the same command starts the run, or goes on with it", file=sys.stderr)
        sys.exit(75)

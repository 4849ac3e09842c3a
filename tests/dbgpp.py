import sys

import torch

from tests.oracle import train
from tests.parity.cases import *
from tests.parity.compare import *
from tests.parity.layouts import layout
from tests.ranks import run_ranks


def go(lay, n, model, acc, opt, folder):
    case = Case(layout(n, lay), acc, Training(model, opt, "fp64"))
    return run_cases([(case, config_of(case))], folder)


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    from tests import dbgpp

    folder = Path(tempfile.mkdtemp())
    lay, n, model, acc, opt = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    case = Case(layout(n, lay), acc, Training(model, opt, "fp64"))
    c = config_of(case)
    torch.save(train(shape_of(c), SEED, torch.float64, batches(), recipe_of(c)), folder / f"{case.training}.pt")
    for r in run_ranks(n, dbgpp.go, lay, n, model, acc, opt, folder):
        print(r)

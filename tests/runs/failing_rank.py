"""train.py, in which rank 1 fails in step 3. For torchrun."""

import runpy
import sys

from tests.faults.test_failures import fail_in_step
from tests.ranks import ROOT

fail_in_step(3, 1, "bug")
sys.argv[0] = str(ROOT / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")

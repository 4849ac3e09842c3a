"""What a run's saves do to the checkpoints that are there."""

from pathlib import Path

import pytest

from models.config import ModelConfig
from models.decoder import Decoder
from parallel.apply import Spread
from parallel.config import Scope
from parallel.data import Single
from tests.ranks import run_ranks
from training.checkpoint.contents import Checkpoints
from training.checkpoint.folders import Saved
from training.checkpoint.store import Store
from training.checkpoint.tensors import RestoreReport, State
from training.config import CheckpointConfig, OptimizerConfig
from training.optimizers.build import build_optimizer
from training.ranks import Ranks


def checkpoints(folder: Path, keep: int) -> Checkpoints:
    model = Decoder(ModelConfig(layers=1, dim=8, heads=2, context=8, vocab_size=16))
    store, spread = Store(folder, Ranks.alone()), Spread(model, Single(model), Scope.none, None)
    return Checkpoints(store, CheckpointConfig(keep=keep), spread, build_optimizer(OptimizerConfig(), model), {})


def restore_test(folder: Path, keep: int) -> None:
    ours = checkpoints(folder, keep)
    only = ours.save(153, {}, "scheduled")
    real = ours.store.verify_restore
    seen: list[int] = []

    def verify_restore(saved: Saved, state: State) -> RestoreReport:
        seen.extend(saved.step for saved in ours.store.all())
        return real(saved, state)

    ours.store.verify_restore = verify_restore  # type: ignore[method-assign]
    ours.test_restore(154, {})
    assert seen == [153, 154]
    assert ours.store.all() == [only]


@pytest.mark.parametrize("keep", [0, 1])
def test_the_test_of_a_restore_deletes_no_checkpoint(tmp_path: Path, keep: int) -> None:
    """Killed before its own is gone or after, the run has what it had."""
    run_ranks(1, restore_test, tmp_path, keep)

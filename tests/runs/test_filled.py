"""A batch that the ranks do not divide: the last ranks compute sequences without labels, and nothing else changes."""

import pytest

from tests.resume.same import check_near
from tests.runs.drive import Runs

pytestmark = pytest.mark.torch211

# 8 sequences: 3 each on 3 ranks, one of them to fill the step up
RUN = "precision=fp64 evals.heldout_tokens=100 evals.continuation_items=2 metrics.sample_tokens=4"
EXPERTS = (
    "model.moe.experts=6 model.moe.shared=1 model.moe.balance={balance} model.moe.balance_weight=0.1 "
    "model.moe.z_loss=0.01 model.moe.bias_rate=0.01 optimizer=sgd"
)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("dense", "optimizer=sgd"),
        ("experts", EXPERTS.format(balance="sequence")),
        pytest.param(
            "capacity",
            f"{EXPERTS.format(balance='step')} model.moe.capacity_factor=1.0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_fills_a_step_up_counts_for_nothing(runs: Runs, kind: str, model: str) -> None:
    """Losses, norms, weights, and of experts their counts, which have no labels."""
    runs.finish(f"{kind}-one", f"{RUN} {model}")
    for name, layout, ranks in (
        ("three", "parallel=fsdp2 micro_batch=1", 3),
        ("large", "parallel=ddp micro_batch=3", 2),  # 6 each, 4 of which the second only has to fill up
    ):
        said = runs.finish(f"{kind}-{name}", f"{RUN} {model} {layout}", ranks=ranks)
        assert "without labels, to fill it up" in said
        check_near(runs, f"{kind}-{name}", f"{kind}-one", relative=1e-9, state=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["", EXPERTS.format(balance="sequence")])
@pytest.mark.parametrize("layout", ["parallel.pp=2", "parallel.tp=2", "parallel.cp=2", "data.mask_documents=true"])
def test_beside_other_axes(runs: Runs, layout: str, experts: str) -> None:
    name = f"{layout}-{'experts' if experts else 'dense'}".replace("=", "-")
    masked = layout if layout.startswith("data") else ""
    runs.finish(f"{name}-one", f"{RUN} {experts or 'optimizer=sgd'} {masked}")
    apart = "parallel.ep=3" if experts else ""
    ranks = 3 if masked else 6
    more = f"{RUN} {experts or 'optimizer=sgd'} {layout} parallel=fsdp2 {apart if ranks == 6 else ''}"
    runs.finish(name, f"{more} micro_batch=1", ranks=ranks)
    check_near(runs, name, f"{name}-one", relative=1e-9, state=1e-9)

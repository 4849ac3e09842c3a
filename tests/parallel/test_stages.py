"""Where layers are cut, against every cut there is."""

from itertools import product

import pytest

from models.config import ModelConfig
from parallel.config import ParallelConfig, Schedule
from parallel.planning.stages import balanced, costs, stages

VOCABULARIES = {"a light head": 8, "a heavy head": 3000}


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=list(VOCABULARIES))
@pytest.mark.parametrize(
    ("schedule", "pp", "each", "layers"),
    [
        ("1f1b", 2, None, 7),
        ("1f1b", 4, None, 9),
        ("interleaved_1f1b", 2, 3, 10),
        ("zbv", 2, None, 9),
        ("zbv", 3, None, 9),
    ],
)
def test_the_costliest_rank_is_as_cheap_as_can_be(
    schedule: str, pp: int, each: int | None, layers: int, vocabulary: int
) -> None:
    model = ModelConfig(layers=layers, dim=32, heads=2, context=16, vocab_size=vocabulary)

    def of_ranks(cut: list[int]) -> list[float]:
        """What each costs, from what a cut by hand gives."""
        by_hand = ParallelConfig(pp=pp, schedule=Schedule[schedule], stages_per_rank=each, stage_layers=cut)
        found = stages(model, by_hand)
        flops = costs(model, found)
        return [sum(flops[stage.index] for stage in found if stage.rank == rank) for rank in range(pp)]

    chosen = balanced(model, ParallelConfig(pp=pp, schedule=Schedule[schedule], stages_per_rank=each))
    every = [list(cut) for cut in product(range(1, layers), repeat=len(chosen)) if sum(cut) == layers]
    assert max(of_ranks(chosen)) == min(max(of_ranks(cut)) for cut in every)


def test_stages_of_a_rank_are_alike() -> None:
    """12 layers and a head of about 5: 8 on the one rank, 4 with the head on the other."""
    gpt2 = ModelConfig(layers=12, heads=12, dim=768, context=1024, vocab_size=50257)
    assert balanced(gpt2, ParallelConfig(pp=2, schedule=Schedule["interleaved_1f1b"])) == [4, 3, 4, 1]
    assert balanced(gpt2, ParallelConfig(pp=2, schedule=Schedule["zbv"])) == [3, 4, 4, 1]
    assert balanced(gpt2, ParallelConfig(pp=4)) == [4, 4, 3, 1]

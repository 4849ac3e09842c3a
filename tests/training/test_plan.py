"""The table of a run's log."""

from pathlib import Path

from parallel.config import Dtype
from training.compose import compose
from training.config import Config
from training.plan import axes_table, memory_of, whole_replica
from training.resolve import World, resolve


def resolved(overrides: str, world: World) -> Config:
    config, chosen = compose(overrides.split())
    resolve(config, world, chosen)
    return config


# The published parameters, and 47 rows of padding.
GPT2 = 124_439_808 + 47 * 768


def test_the_table_of_the_documents_is_the_one_that_is_shown() -> None:
    config = resolved("model=gpt2_124m parallel=fsdp2_tp batch_sequences=32 precision=bf16", World(8, 8))
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    assert axes_table(config, Dtype.bf16) in page


def test_ddp() -> None:
    config = resolved("model=gpt2_124m parallel=ddp batch_sequences=64", World(8, 8))
    header, rule, row = axes_table(config, Dtype.bf16).splitlines()
    assert header.split() == ["axis", "ranks", "what", "it", "does", "parts", "MB", "a", "step"]
    assert set(rule) == {"-"}
    sent = 2 * 7 / 8 * 4 * GPT2 / 1e6
    assert row.split() == ["dp_replicate", "8", "gradients,", "all-reduce", "all", f"{sent:,.2f}"]


def test_each_axis_above_one_has_its_rows_and_numbers_have_none() -> None:
    config = resolved("model=gpt2_124m parallel=hsdp parallel.tp=2 batch_sequences=64", World(16, 8))
    lines = axes_table(config, Dtype.bf16).splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [["dp_shard", "4"]] * 3 + [["dp_replicate", "2"]] + [["tp", "2"]] * 4
    assert not any("predicted" in line or "norm," in line for line in lines)


def test_nothing_on_one_rank_and_nothing_while_sizes_are_not_known() -> None:
    assert axes_table(resolved("", World(1, 1)), Dtype.fp32) == ""
    unknown = resolved("parallel=ddp tokenizer=tiktoken tokenizer.name=cl100k_base", World(2, 2))
    assert unknown.model.vocab_size is None
    assert axes_table(unknown, Dtype.fp32) == ""
    assert memory_of(unknown, Dtype.fp32) is None
    unfit = resolved("parallel=ddp micro_batch=auto", World(2, 2))
    assert axes_table(unfit, Dtype.fp32) == ""


def test_a_whole_replica_is_ddp_over_all_ranks() -> None:
    config = resolved("model=gpt2_124m parallel=hsdp parallel.tp=2 batch_sequences=64", World(16, 8))
    whole = whole_replica(config)
    assert (whole.strategy.name, whole.dp_replicate, whole.dp_shard, whole.tp) == ("ddp", 16, 1, 1)
    state = memory_of(config, Dtype.fp32, whole)
    assert state is not None and state.state == 4 * 4 * GPT2

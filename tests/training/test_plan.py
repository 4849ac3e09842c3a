"""The table of a run's log."""

from dataclasses import replace
from pathlib import Path

import pytest

from parallel.config import Dtype, Recompute
from parallel.recomputation import settled
from training.compose import compose
from training.config import Config
from training.plan import GIB, axes_table, counts_told, memory_of, settle_activations, unplanned, whole_replica
from training.resolve import World, resolve


def resolved(overrides: str, world: World) -> Config:
    config, chosen = compose(overrides.split())
    resolve(config, world, chosen)
    return config


def test_what_plans_leave_out_is_named() -> None:
    """Parts that do not say what they keep; and over tp those that do."""
    config = resolved("model=deepseek_v3_16b model.mtp=1 parallel=tp", World(8, 8))
    assert unplanned(config) == ""
    config = resolved("model.tokenizer=bytes", World(1, 1))
    config.model.vocab_size = 257
    for name, bytes_too in (("tests.models.test_parts.Own", False), ("tests.parallel.test_memory.Bilinear", True)):
        own = replace(config, model=replace(config.model, parts={"feedforward": {"_target_": name}}))
        left = [] if bytes_too else [f"memory is not planned with feedforward {name}"]
        assert unplanned(own) == "; ".join(left) and (memory_of(own, Dtype.fp32) is not None) is bytes_too
        cut = replace(own, parallel=replace(own.parallel, tp=2))
        assert unplanned(cut) == "; ".join([*left, f"traffic is not planned with feedforward {name}"])


# The published parameters, and 47 rows of padding.
GPT2 = 124_439_808 + 47 * 768


def test_the_table_of_the_documents_is_the_one_that_is_shown() -> None:
    config = resolved("model=gpt2_124m parallel=fsdp2_tp batch_sequences=32 precision=bf16", World(8, 8))
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    assert axes_table(config, Dtype.bf16) in page


def test_counts_are_said_as_the_documents_show_them() -> None:
    """With experts by hand: embeddings, attention and norms of 4 blocks, a feed-forward layer, experts of 3, the norm.
    Of 8 experts 6 are idle."""
    tables, attention = (257 + 128) * 64, 4 * 64 * (64 + 1) + 4 * 64
    routed = 8 * 64 + (8 + 1) * 2 * 64 * 64 + 2 * 64
    total = tables + 4 * attention + 64 * 256 * 2 + 256 + 64 + 3 * routed + 2 * 64
    active = total - 3 * 6 * 2 * 64 * 64
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert counts_told(resolved("model=gpt2_124m", World(1, 1))) in page
    experts, _ = counts_told(resolved("model=moe_debug", World(1, 1))).splitlines()
    assert experts == f"parameters: {total:,}, of them {active:,} active, {tables:,} of embeddings and head"
    unknown = resolved("tokenizer=tiktoken tokenizer.name=cl100k_base", World(1, 1))
    assert counts_told(unknown) == ""


def test_ddp() -> None:
    config = resolved("model=gpt2_124m parallel=ddp batch_sequences=64", World(8, 8))
    header, rule, row = axes_table(config, Dtype.bf16).splitlines()
    assert header.split() == ["axis", "ranks", "what", "it", "does", "parts", "MB", "a", "step"]
    assert set(rule) == {"-"}
    sent = 2 * 7 / 8 * 4 * GPT2 / 1e6
    assert row.split() == ["dp_replicate", "8", "gradients,", "all-reduce", "all", f"{sent:,.2f}"]


def test_powersgd() -> None:
    """Two factors of four columns: of four matrices in each of 12 blocks, of tokens and of positions."""
    overrides = "model=gpt2_124m parallel=ddp batch_sequences=64 steps=10000 optimizer.compression=powersgd"
    *_, factors, whole = axes_table(resolved(overrides, World(8, 8)), Dtype.bf16).splitlines()
    matrices = 12 * (2304 + 768 + 768 + 768 + 3072 + 768 + 768 + 3072) + 50304 + 768 + 1024 + 768
    vectors = 12 * (2304 + 768 + 3072 + 768 + 4 * 768) + 2 * 768
    assert f"{2 * 7 / 8 * 4 * 4 * matrices / 1e6:,.2f}" == factors.split()[-1] == "5.61"
    assert f"{2 * 7 / 8 * 4 * vectors / 1e6:,.2f}" == whole.split()[-1] == "0.85"


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
    staged = resolved("model=gpt2_124m parallel=3d batch_sequences=32 micro_batch=4", World(8, 8))
    state = memory_of(staged, Dtype.fp32, whole_replica(staged))
    assert state is not None and state.state == 4 * 4 * GPT2


def test_a_number_to_reshard_to_is_the_number_of_ranks_of_the_second_gather() -> None:
    layout = "model=gpt2_124m parallel=fsdp2 parallel.reshard_after_forward=4 batch_sequences=32"
    rows = axes_table(resolved(layout, World(8, 8)), Dtype.bf16).splitlines()[2:]
    assert [row.split()[:4] for row in rows] == [
        ["dp_shard", "8", "parameters,", "all-gather"],
        ["dp_shard", "4", "parameters", "again,"],
        ["dp_shard", "8", "gradients,", "reduce-scatter"],
    ]


def test_a_pipeline_shows_the_rank_that_sends_the_most() -> None:
    """The one with the embedding sends as much of it and of the stream as the other, and has more layers."""
    config = resolved("model=gpt2_124m parallel=3d batch_sequences=32 micro_batch=4", World(8, 8))
    *rows, last = axes_table(config, Dtype.bf16).splitlines()
    assert last == "of pp rank 0, which sends the most"
    stream = 4 * (4 * 512 * 768 * 2) / 1e6  # 4 micro-batches of 4 sequences, of which each of 2 tensor ranks has half
    table = 50304 * 768 * 4 / 4 / 1e6  # on one of 2 x 2 ranks
    assert [row.split()[2:] for row in rows if row.startswith("pp")] == [
        ["activations,", "send", "all", f"{stream:,.2f}"],
        ["gradients,", "send", "shared", "parameters", f"{table:,.2f}"],
    ]


def auto(overrides: str, gib: float | None) -> tuple[str, str]:
    """What activations=auto stands for on devices of this memory, and what is said of it."""
    config = resolved(f"batch_sequences=64 micro_batch=8 precision=bf16 {overrides}", World(8, 8))
    said = settle_activations(config, Dtype.bf16, None if gib is None else gib * GIB)
    return settled(config.activations, config.model).name, said


@pytest.mark.parametrize(
    ("overrides", "gib", "mode"),
    [
        # By the plan 9.2 GiB with none, 8.5 with selective and 7.2 with full; a fifth of a device is left free.
        ("model=gpt2_124m parallel=ddp", 12, "none"),
        ("model=gpt2_124m parallel=ddp", 11, "selective"),
        ("model=gpt2_124m parallel=ddp", 10, "full"),
        ("model=gpt2_124m parallel=ddp", 1, "full"),
        # 21.1 GiB with selective, 10.6 with full
        ("model=gpt2_1558m parallel=fsdp2", 80, "selective"),
        ("model=gpt2_1558m parallel=fsdp2", 24, "full"),
    ],
)
def test_activations_keep_less_where_the_plan_needs_it(overrides: str, gib: float, mode: str) -> None:
    found, said = auto(overrides, gib)
    by_size = "none" if "124m" in overrides else "selective"
    assert found == mode
    assert (said == "") == (mode == by_size)
    assert said == "" or said.startswith(f"activations=auto: {mode}; {by_size} would take ")


def test_activations_follow_the_size_where_nothing_else_is_known_and_the_config_where_it_says() -> None:
    assert auto("model=gpt2_1558m parallel=fsdp2", None) == ("selective", "")
    assert auto("model=gpt2_1558m parallel=fsdp2 micro_batch=auto", 1) == ("selective", "")
    assert auto("model=gpt2_1558m parallel=fsdp2 activations=none", 1) == ("none", "")
    split = "model=gpt2_1558m parallel=pp parallel.pp=8 parallel.schedule=zbv"
    assert auto(split, 1) == ("none", "activations=auto: none; zbv computes nothing again")
    assert auto("model=gpt2_1558m parallel=tp parallel.tp=8 micro_batch=64 model.dropout=0.1", 1) == ("selective", "")
    config = resolved("model=gpt2_124m parallel=ddp batch_sequences=64", World(8, 8))
    assert settle_activations(config, Dtype.bf16, 80 * GIB) == ""
    assert config.activations.mode is Recompute.auto  # what is saved with the run is what was asked for

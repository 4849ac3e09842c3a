"""The command line is refused with everything that is wrong with it, each with what to write instead."""

import pytest

from training.command import open_presets, override_problems, parse_flags
from training.keys import keys, sections
from training.refusal import Problem


def problems_of(*words: str, sweep: bool = False) -> list[Problem]:
    flags, wrong = parse_flags(list(words))
    assert wrong == []
    with open_presets(flags) as presets:
        return override_problems(flags.overrides, presets, sweep)


def mutated(name: str) -> str:
    """The name with one letter of its last part changed to one that no key has there."""
    section, dot, last = name.rpartition(".")
    place = len(last) // 2
    return f"{section}{dot}{last[:place]}q{last[place + 1 :]}"


@pytest.mark.parametrize(("prefix", "stride"), [("", 1), ("+", 5), ("++", 5), ("~", 5)])
def test_every_misspelt_key_is_refused(prefix: str, stride: int) -> None:
    names = list(keys())[::stride]
    words = [f"{prefix}{mutated(name)}=1" for name in names]
    found = problems_of(*words)
    assert [problem.key for problem in found] == [word.partition("=")[0] for word in words]
    assert all(problem.reason == "there is no such key" for problem in found)
    for name, problem in zip(names, found, strict=True):
        if len(name.rpartition(".")[2]) > 3:  # of three letters with one changed there is little left to know it by
            assert f"{name}=1" in problem.instead.split(" or "), (problem.key, problem.instead)


def test_every_misspelt_group_is_refused() -> None:
    found = problems_of(*(f"{mutated(group)}=auto" for group in sections()))
    for group, problem in zip(sections(), found, strict=True):
        assert f"{group}=auto" in problem.instead


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("optimizer.lrr=1", "optimizer.lr=1"),
        ("lr=1", "optimizer.lr=1"),
        ("optim.lr=1", "optimizer.lr=1"),
        ("modle=gpt2_124m", "model=gpt2_124m"),
        ("model=gpt2_125m", "gpt2_124m"),
        ("compile=None", "compile=none"),
        ("fsdp2", "parallel=fsdp2"),
        ("parallel/fsdp2=1", "parallel"),
        ("steps=None", "steps=null"),
        ("optimizer.clip=none", "optimizer.clip=null"),
        ("micro_batch=None", "micro_batch=null"),
        ("tokenizer.name=None", "tokenizer.name=null"),
        ("data.shuffle=None", "data.shuffle=none"),
        ("seed=None", "seed=0"),
        ("seed=null", "seed=0"),
        ("seed=010", "seed=10"),
        ("seed='5'", "seed=5"),
        ("seed=1.5", "seed=1 or seed=2"),
        ("model.moe.capacity_factor=nan", "model.moe.capacity_factor=1.25"),
        ("steps=abc", "steps="),
        ("steps=", "steps="),
        ("optimizer.lr=inf", "optimizer.lr=0.001"),
        ("optimizer.lr=nan", "optimizer.lr=0.001"),
        ("deterministic=yes", "deterministic=true"),
        ("deterministic=0", "deterministic=false"),
        ("precision.dtype=bf61", "precision.dtype=bf16"),
        ("data.files=a.txt", "data.files=[a.txt]"),
        ("name=2026_11", '"2026_11"'),
        ("name=1e3", '"1e3"'),
        ("optimizer={lr: 1}", "optimizer.lr=1"),
        ("+steps=3", "steps=3"),
        ("~steps", "steps="),
        ("+model=gpt2_124m", "model=gpt2_124m"),
        ("experiment=null", "tiny"),
        ("steps=1,2", "-m steps=1,2"),
        ("seed=range(1,3)", "-m seed=range(1,3)"),
        ("a=b=c", "quotes"),
        ("=3", "key=value"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_one(word: str, instead: str) -> None:
    found = problems_of(word)
    assert len(found) == 1
    assert instead in found[0].instead


@pytest.mark.parametrize(
    "word",
    [
        "seed=1_000",
        "seed=1e3",
        "tokens=1e9",
        "optimizer.lr=3e-4",
        "optimizer.lr=1",
        "optimizer.clip=null",
        "micro_batch=auto",
        "micro_batch=4",
        "parallel.reshard_after_forward=false",
        "parallel.reshard_after_forward=2",
        "data.shuffle=none",
        "data.files=[a.txt,b/*.gz]",
        "data.field=none",  # a field may have this name
        "name=run-7",
        "name=7",
        "++steps=3",
        "~experiment",
        "evals=none",
        "out=${oc.env:HOME}",
        "hydra.job.name=x",
    ],
)
def test_a_right_word_is_not(word: str) -> None:
    assert problems_of(word) == []


def test_all_problems_at_once() -> None:
    words = ("steps=None", "modle=x", "optimizer.lr=nan", "model=gpt3", "seed=1", "fsdp2")
    assert [problem.key for problem in problems_of(*words)] == ["steps", "modle", "optimizer.lr", "model", "fsdp2"]


def test_each_value_of_a_sweep_is_looked_at() -> None:
    words = (
        "seed=1,x,2",
        "optimizer.lr=1e-3,None",
        "model=gpt2_nano,gpt2_125m",
        "steps=range(1,5)",
        "schedule=glob(w*)",
    )
    found = problems_of(*words, sweep=True)
    assert [(problem.key, problem.value) for problem in found] == [
        ("seed", "x"),
        ("optimizer.lr", "None"),
        ("model", "gpt2_125m"),
    ]


def flag_problems(*argv: str) -> list[Problem]:
    return parse_flags(list(argv))[1]


def test_flags() -> None:
    assert flag_problems("--cfg", "job", "steps=3") == []
    assert [p.instead for p in flag_problems("--steps=3", "--optimizer.lrr=3")] == ["steps=3", "optimizer.lr=3"]
    assert [p.key for p in flag_problems("--config-dir", "/no/such/folder")] == ["--config-dir"]
    assert [p.key for p in flag_problems("-m", "--cfg", "job")] == ["--multirun --cfg"]


def test_a_sweep_inside_torchrun_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ("-m", "optimizer.lr=3e-4,6e-4", "parallel=fsdp2")
    assert flag_problems(*argv) == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (problem,) = flag_problems(*argv)
    assert "python train.py -m optimizer.lr=3e-4,6e-4 parallel=fsdp2" in problem.instead
    assert "for v in 3e-4 6e-4; do torchrun --nproc-per-node 4 train.py parallel=fsdp2" in problem.instead

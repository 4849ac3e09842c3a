"""From the command line and the files to a Config, and what a user sees when it is refused."""

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from parallel.config import Strategy
from tests.training.test_command import mutated
from training.check import describe, settle
from training.checkpoint import folders
from training.command import CONFIGS, ROOT
from training.compose import check_command, compose, refusing
from training.config import Config, OptimizerKind, leaves, nested
from training.keys import keys
from training.refusal import Problem, Refusal
from training.resolve import Chosen

# What train.py does before it trains.
SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import hydra
from training.check import describe, settle
from training.compose import check_command, from_hydra, refusing

@hydra.main(version_base="1.3", config_path={str(CONFIGS)!r}, config_name="config")
def main(composed):
    with refusing():
        config, chosen = from_hydra(composed)
        settle(config, chosen)
        if config.check_only:
            print(describe(config, chosen))
        else:
            print("trains", config.name, config.seed)

if __name__ == "__main__":
    try:
        with refusing():
            check_command(sys.argv[1:])
            main()
    finally:
        print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's own presets."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "model").mkdir()
    return tmp_path


def experiment(folder: Path, text: str) -> list[str]:
    (folder / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    return ["--config-dir", str(folder), "experiment=mine"]


def refused(*argv: str) -> list[Problem]:
    with pytest.raises(Refusal) as refusal:
        settle(*compose(list(argv)))
    return refusal.value.problems


def settled(*argv: str) -> Config:
    config, chosen = compose(list(argv))
    settle(config, chosen)
    return config


def test_values_reach_the_schema() -> None:
    argv = ["model=gpt2_124m", "optimizer=sgd", "optimizer.lr=1", "data.files=[a,b]", "parallel.dp_shard=-1"]
    config, chosen = compose(argv)
    assert (config.model.layers, config.model.dim, config.model.heads) == (12, 768, 12)
    assert config.optimizer.kind is OptimizerKind.sgd
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.data.files == ["a", "b"]
    assert config.parallel.strategy is Strategy.single
    assert (chosen.groups["model"], chosen.name(), chosen.job) == ("gpt2_124m", "gpt2_124m", None)


def test_every_key_comes_from_somewhere() -> None:
    """The schema's defaults, the presets and config.yaml together set every key, and none twice as a stray object."""
    one, two = settled(), settled()
    assert one == two
    assert one.evals.tasks is not two.evals.tasks


def test_misspelt_keys_of_a_file_are_refused_with_their_place(folder: Path) -> None:
    wrong = [mutated(name) for name in list(keys())[::3]]
    found = refused(*experiment(folder, yaml.safe_dump(nested(dict.fromkeys(wrong, 1)))))
    assert {problem.key for problem in found} == set(wrong)
    assert all("mine.yaml:" in problem.reason for problem in found)


def test_one_of_several_guesses_has_no_problems_of_its_own() -> None:
    with pytest.raises(Refusal) as refused:
        compose(["parallel.xp=2"])
    (problem,) = refused.value.problems
    assert problem.key == "parallel.xp" and " or " in problem.instead
    with pytest.raises(Refusal) as refused:
        compose(["parallel.PP=2"])
    assert [problem.key for problem in refused.value.problems] == ["parallel.PP", "parallel.pp"]
    assert refused.value.problems[0].instead == "parallel.pp=2"


def test_wrong_values_of_a_file_are_refused_at_once(folder: Path) -> None:
    (folder / "model" / "mine.yaml").write_text("layers: 2\nheads: '4'\ndropout: yes\n")
    text = """
defaults:
  - override /model: mine
steps: 1.5
optimizer: {clip: None, lr: .inf}
data: {shuffle: half, files: abc}
schedule: constant
"""
    found = {problem.key: problem for problem in refused(*experiment(folder, text))}
    assert set(found) == {
        "model.heads",
        "model.dropout",
        "steps",
        "optimizer.clip",
        "optimizer.lr",
        "data.shuffle",
        "data.files",
        "schedule",
    }
    assert "mine.yaml:2" in found["model.heads"].reason
    assert "model/mine.yaml" in found["model.heads"].reason
    assert "experiment/mine.yaml:5" in found["steps"].reason
    assert "override /schedule: constant" in found["schedule"].instead


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [1\nb: 2", "mine.yaml:3"), ("defaults:\n  - override /model: nope", "nope"), ("- 1", "mine")],
)
def test_what_hydra_cannot_read_is_refused(folder: Path, text: str, said: str) -> None:
    assert said in str(refused(*experiment(folder, text))[0])


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (["optimizer.lrr=1"], ["optimizer.lrr"]),
        (["+optimizer.lrr=1"], ["+optimizer.lrr"]),
        (["modle=gpt2_124m"], ["modle"]),
        (["steps=None"], ["steps"]),
        (["parallel=fsdp2", "parallel.dp_shard=3", "hardware.gpus=8"], ["parallel.dp_shard"]),
        (["hydra.nope=1"], ["config"]),
        (["model@optimizer=gpt2_124m"], ["config"]),
        (["optimizer.lr=${oc.env:ESPALIER_NOT_SET}"], ["optimizer.lr"]),
        (["optimizer.lr=${schedule.nope}"], ["optimizer.lr"]),
    ],
)
def test_refusals(argv: list[str], keys: list[str]) -> None:
    assert [problem.key for problem in refused("check_only=true", *argv)] == keys


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (["optimizer.lrr=1", "model.dim=0", "model.heads=x"], ["optimizer.lrr", "model.heads", "model.dim"]),
        (["steps=None", "tokens=9", "batch_sequences=6", "micro_batch=7"], ["steps", "micro_batch"]),
        (["modle=gpt2_124m", "sequence_length=512"], ["modle"]),  # a model that has the positions is meant
        (["optimizer.lrr=-1"], ["optimizer.lrr", "optimizer.lr"]),
        (["model.heads=3.5", "model.dim=129"], ["model.heads"]),  # whether 129 is wrong depends on the heads
        (["seed=1=2", "data=text", "data.files=[/nowhere/*.txt]"], ["seed", "data.files"]),
    ],
)
def test_what_would_be_refused_next_is_told_too(argv: list[str], keys: list[str]) -> None:
    assert [problem.key for problem in refused("check_only=true", *argv)] == keys


@pytest.mark.parametrize(
    "line",
    [
        "parallel=tp parallel.tp=8 model.heads=4",
        "parallel=tp parallel.tp=3 model.heads=8",
        "parallel=fsdp2 parallel.tp=3 model.dim=120 model.heads=6 sequence_length=64",
        "parallel=fsdp2 parallel.tp=8 model.heads=4 model.kv_heads=2",
        "parallel=pp parallel.pp=2 micro_batch=1",
        "parallel=pp model.layers=5 micro_batch=1",
        "parallel=fsdp2_tp compile=block activations=full model.dropout=0.1",
        "parallel=fsdp2_tp compile=block activations=budget",
        "compile=block activations=budget model.dropout=0.1 parallel=fsdp2",
        "parallel=fsdp2 activations=every_n activations.every_n=100",
        "parallel=fsdp2 model.value_embeddings=3",
    ],
)
def test_what_is_suggested_is_legal(line: str) -> None:
    """Each of the ways that are named, typed behind the line, mends its key and breaks no other."""
    words = ["check_only=true", "hardware.gpus=8", *line.split()]
    with pytest.raises(Refusal) as refused:
        settle(*compose(words))
    for problem in refused.value.problems:
        for way in re.split(r" or |, or |, ", problem.instead):
            group = way.startswith("parallel=")
            kept = [word for word in words if not (group and word.startswith("parallel="))]
            try:
                settle(*compose([*kept, *way.split()]))
            except Refusal as again:
                left = {other.key for other in again.problems}
                assert left <= {other.key for other in refused.value.problems} - {problem.key}, way


@pytest.mark.parametrize(
    ("line", "strategy"),
    [
        ("parallel=tp parallel.dp_shard=4 model.heads=4", Strategy.fsdp2),
        ("parallel=tp parallel.dp_replicate=4 model.heads=4", Strategy.ddp),
        ("parallel=pp parallel.pp=2 parallel.dp_shard=-1 micro_batch=1", Strategy.fsdp2),
        ("parallel=tp model.heads=8", Strategy.single),
    ],
)
def test_degrees_on_a_preset_of_one_axis(line: str, strategy: Strategy) -> None:
    config, chosen = compose(["check_only=true", "hardware.gpus=8", *line.split()])
    settle(config, chosen)
    assert config.parallel.strategy is strategy


def test_a_wrong_key_of_a_group_is_no_preset() -> None:
    with pytest.raises(Refusal) as refused:
        compose(["parallel=tp", "parallel.sequence_parallel=false"])
    assert " parallel=false" not in str(refused.value)


def test_a_degree_of_a_wrong_type_is_one_problem() -> None:
    with pytest.raises(Refusal) as refused:
        compose(["parallel=tp", "parallel.tp=1.5", "check_only=true", "hardware.gpus=2"])
    assert [problem.key for problem in refused.value.problems] == ["parallel.tp"]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("parallel.ep=2.5", "parallel.ep=1"),  # without experts
        ("model=moe_debug hardware.gpus=8 parallel=fsdp2 parallel.ep=2.5", "parallel.ep=2"),
        ("model.heads=2.5", "model.heads=2"),
        ("steps=2.5", "steps=2 or steps=3"),
    ],
)
def test_a_fraction_is_mended_to_what_is_legal(words: str, instead: str) -> None:
    (problem,) = refused("check_only=true", *words.split())
    assert problem.instead == instead


def test_problems_of_a_file_and_between_keys_are_told_together(folder: Path) -> None:
    mine = experiment(folder, "optimizer: {lr: fast}\nbatch_sequences: 6\nmicro_batch: 7\n")
    assert [problem.key for problem in refused(*mine)] == ["optimizer.lr", "micro_batch"]


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["data=text", "data.files=[/nowhere/*.txt]"], "data.files"),
        (["data=text", "data.files=[.]"], "data.files"),
        (["checkpoint.load=/nowhere"], "checkpoint.load"),
        (["eval_only=true", "checkpoint.load=/nowhere"], "checkpoint.load"),
        (["tokenizer=tiktoken", "tokenizer.name=cl100kbase"], "tokenizer.name"),
        (["checkpoint.dir=''"], "checkpoint.dir"),
    ],
)
def test_what_a_config_names_must_be_there(argv: list[str], key: str) -> None:
    assert [problem.key for problem in refused("check_only=true", *argv)] == [key]


def test_a_run_that_goes_on_no_longer_needs_what_it_started_from(tmp_path: Path) -> None:
    words = [f"out={tmp_path}", "checkpoint.load=/nowhere"]
    assert [problem.key for problem in refused(*words)] == ["checkpoint.load"]
    own = tmp_path / "gpt2_nano" / "checkpoints" / "step-000005"
    own.mkdir(parents=True)
    (own / folders.TENSOR_INDEX).write_text("index")
    folders.complete(own, 5, {}, {})
    settled(*words)
    assert [problem.key for problem in refused(*words, "name=another")] == ["checkpoint.load"]
    assert "checkpoint.load" in [problem.key for problem in refused(*words, "eval_only=true")]


def test_the_command_line_says_which_of_two_ways_stands(folder: Path) -> None:
    mine = experiment(folder, "tokens: 1e6\nbatch_tokens: 2048\n")
    config, _ = compose(mine)  # over what config.yaml says itself
    assert (config.steps, config.tokens, config.batch_sequences, config.batch_tokens) == (None, 1_000_000, None, 2048)
    config, _ = compose([*mine, "steps=7", "batch_sequences=4"])
    assert (config.steps, config.tokens, config.batch_sequences, config.batch_tokens) == (7, None, 4, None)
    assert [p.key for p in refused("steps=7", "tokens=9")] == ["steps"]
    assert [p.key for p in refused("batch_sequences=7", "batch_tokens=9")] == ["batch_sequences"]


def test_values_of_the_environment_are_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_SECRET", "abc123")
    monkeypatch.setenv("ESPALIER_SEED", "7")
    mine = experiment(
        folder,
        "seed: ${oc.env:ESPALIER_SEED}\nmetrics: {sample_prompt: '${oc.env:ESPALIER_SECRET}'}\n"
        "data: {cache: '${metrics.sample_prompt}/x', field: '${name}', files: ['${oc.env:ESPALIER_SECRET}/y']}\n"
        "name: plain",
    )
    config, chosen = compose(mine)
    assert (config.seed, config.metrics.sample_prompt, config.data.cache) == (7, "abc123", "abc123/x")
    assert (config.data.field, config.data.files) == ("plain", ["abc123/y"])
    assert set(chosen.unresolved) == {"seed", "metrics.sample_prompt", "data.cache", "data.files"}
    text = describe(config, chosen)
    assert "abc123" not in text
    assert yaml.safe_load(text)["seed"] == "${oc.env:ESPALIER_SEED}"
    monkeypatch.setenv("ESPALIER_SEED", "secret-word")
    assert "secret-word" not in str(refused(*mine)[0])


@pytest.mark.parametrize(
    ("word", "text", "value"),
    [
        ("optimizer.lr", "1e-3", 0.001),
        ("optimizer.clip", "null", None),
        ("tokens", "1e9", 1_000_000_000),
        ("micro_batch", "auto", "auto"),
        ("micro_batch", "2", 2),
        ("deterministic", "true", True),
        ("data.files", "[a.txt,b c.txt]", ["a.txt", "b c.txt"]),
        ("name", "1e-3", "1e-3"),
    ],
)
def test_a_value_of_the_environment_is_read_as_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, word: str, text: str, value: Any
) -> None:
    monkeypatch.setenv("ESPALIER_VALUE", text)
    config, _ = compose([f"{word}=${{oc.env:ESPALIER_VALUE}}"])
    assert leaves(config)[word] == value and type(leaves(config)[word]) is type(value)


@pytest.mark.parametrize("text", ["010", "1:30", "1,2", "a b: c", ""])
def test_what_is_no_number_on_the_command_line_is_none_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("ESPALIER_VALUE", text)
    assert [problem.key for problem in refused("seed=${oc.env:ESPALIER_VALUE}")] == ["seed"]


def test_the_description_gives_the_same_config(folder: Path) -> None:
    """What is saved with a run can be read as an experiment, and is complete."""
    config, chosen = compose(["model=gpt2_350m", "schedule=linear", "name='a=b'", "optimizer.lr=1e-5"])
    settle(config, chosen)
    assert settled(*experiment(folder, describe(config, chosen))) == config


def presets() -> list[list[str]]:
    """Command lines that together choose every preset of every group, but for the models (tests/test_presets.py), of
    which one fits all others."""
    folders = [group for group in CONFIGS.iterdir() if group.is_dir() and group.name != "model"]
    groups = {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in folders}
    lines = range(max(len(found) for found in groups.values()))
    chosen = [[f"{group}={found[line % len(found)]}" for group, found in sorted(groups.items())] for line in lines]
    return [["model=gpt2_124m", *line] for line in chosen]


@pytest.mark.parametrize("line", presets(), ids=lambda line: line[-1])
def test_every_preset_composes_and_checks(line: list[str], tmp_path: Path) -> None:
    words = ["check_only=true", "hardware.gpus=16", "batch_sequences=32", *line]
    if "tokenizer=tiktoken" in line:
        words.append("tokenizer.name=gpt2")
    if "tokenizer=huggingface" in line:
        Tokenizer(WordLevel({"a": 0, "<|endoftext|>": 1})).save(str(tmp_path / "tokenizer.json"))
        words.append(f"tokenizer.file={tmp_path}/tokenizer.json")
    if "data=text" in line:
        (tmp_path / "x.txt").write_text("text")
        words.append(f"data.files=[{tmp_path}/x.txt]")
    if "parallel=pp" in line:
        words += ["model.layers=16", "micro_batch=1"]
    if "parallel=tp" in line:
        words.append("model.heads=16")
    if "parallel=moe_ep" in line:
        words = [word for word in words if not word.startswith("compile=")]
        words += ["compile=none", "model.moe.experts=8"]  # else there is nothing to share
    if "parallel=single" in line:
        words.append("hardware.gpus=1")
    settled(*words)


def test_a_sweep_is_checked_before_its_first_job() -> None:
    check_command(["-m", "optimizer.lr=1e-3,2e-3"])
    with pytest.raises(Refusal) as refusal:
        check_command(["-m", "batch_sequences=32,0,-3", "micro_batch=8"])
    assert [(p.key, p.value) for p in refusal.value.problems] == [("batch_sequences", "0"), ("batch_sequences", "-3")]
    with pytest.raises(Refusal, match="sweeper"):
        check_command(["-m", "optimizer.lr=interval(0,1)"])


def test_a_job_of_a_sweep_has_a_name_of_its_own() -> None:
    config, chosen = compose(["name=try"])
    settle(config, Chosen(chosen.groups, job=3))
    assert config.name == "try-3"


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *argv]
    return subprocess.run(
        command, cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60
    )


def test_a_typo_ends_with_2_within_seconds_and_without_torch(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(tmp_path, "optimizer.lrr=1", "steps=None")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "optimizer.lr=1" in done.stderr
    assert "steps=null" in done.stderr
    assert done.stderr.endswith("False\n")  # torch was not imported
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5


def test_check_only_needs_no_torch_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "check_only=true", "parallel=hsdp", "hardware.gpus=16", "batch_sequences=16")
    assert done.returncode == 0
    assert done.stderr == "False\n"
    parallel = yaml.safe_load(done.stdout)["parallel"]
    assert (parallel["dp_replicate"], parallel["dp_shard"]) == (2, 8)
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


def told_of(*words: str) -> list[str]:
    """The comments below the config that check_only prints."""
    command = [sys.executable, str(ROOT / "train.py"), "check_only=true", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("# ")]


def test_check_only_tells_of_the_stages_and_the_bubble(tmp_path: Path) -> None:
    """But not where a checkpoint is scored, whose model is not the config's."""
    layout = ["hardware.gpus=8", "parallel=pp"]
    told = "\n".join(told_of(*layout, "model.layers=8", "micro_batch=1"))
    assert " layer 0, embedding " in told and " layer 7, head " in told
    assert "# bubble: " in told and "planned GiB" in told and "MB a step" in told
    own = tmp_path / "checkpoints" / "step-000005"
    own.mkdir(parents=True)
    (own / folders.TENSOR_INDEX).write_text("index")
    folders.complete(own, 5, {}, {})
    assert told_of(*layout, "eval_only=true", f"checkpoint.load={tmp_path}", "model.vocab_size=257") == []


def test_problems_of_files_and_between_keys_end_with_2(folder: Path) -> None:
    done = run(folder, *experiment(folder, "stepss: 3"))
    assert (done.returncode, "Traceback" in done.stderr, "steps=3" in done.stderr) == (2, False, True)
    done = run(folder, "batch_sequences=6", "micro_batch=7")
    assert (done.returncode, "Traceback" in done.stderr, "micro_batch=6" in done.stderr) == (2, False, True)


def test_the_first_rank_of_a_host_speaks_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends every rank as soon as one ends; a silent one must not be the first to go."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    for rank, waits in (("0", 0), ("3", 1)):
        slept.clear()
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end, refusing():
            raise Refusal([Problem("key", 1, "is wrong", "key=2")])
        assert (end.value.code, len(slept)) == (2, waits)
        assert "key=2" in capsys.readouterr().err


def test_hydras_own_flags_work(tmp_path: Path) -> None:
    shown = run(tmp_path, "--cfg", "job", "optimizer.lr=0.5")
    assert yaml.safe_load(shown.stdout)["optimizer"]["lr"] == 0.5
    text = run(tmp_path, "--help").stdout
    assert "gpt2_124m" in text
    assert "torchrun" in text
    swept = run(tmp_path, "-m", "seed=4,5")
    assert swept.stdout.splitlines() == ["trains gpt2_nano-0 4", "trains gpt2_nano-1 5"]

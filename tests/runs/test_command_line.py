"""What train.py's command line does beside a plain run."""

import yaml

from tests.ranks import ROOT
from tests.resume.same import check_same_state
from tests.runs.drive import DROPOUT, LAUNCHED, REFUSED, Runs, train_py


def test_help() -> None:
    outcome = train_py(["--help"])[0]
    assert outcome.code == 0
    for word in ("train.py", "torchrun", "gpt2_124m", "fsdp2", "warmup_cosine", "eval_only", "--cfg", "optimizer:"):
        assert word in outcome.said, word


def test_cfg_job() -> None:
    outcome = train_py(["--cfg", "job", "model=gpt2_124m", "optimizer.lr=0.5"])[0]
    config = yaml.safe_load(outcome.said)
    assert outcome.code == 0
    assert (config["model"]["layers"], config["optimizer"]["lr"], config["steps"]) == (
        12,
        0.5,
        yaml.safe_load((ROOT / "configs/config.yaml").read_text())["steps"],
    )


def test_check_only(runs: Runs) -> None:
    said = runs.finish("checked", "check_only=true parallel=fsdp2 hardware.gpus=4 batch_sequences=8 micro_batch=1")
    config = yaml.safe_load(said)
    assert config["parallel"]["dp_shard"] == 4
    assert not runs.folder("checked").exists()


def test_a_sweep(runs: Runs) -> None:
    """Each job has a folder, and the second is what it would be alone: nothing of the first is left."""
    outcome = train_py(["-m", *runs.words, *DROPOUT.split(), "name=swept", "optimizer.lr=0.01,0.005"])[0]
    assert (outcome.code, outcome.error) == (0, ""), outcome
    runs.finish("alone", f"{DROPOUT} optimizer.lr=0.005")
    assert runs.status("swept-0")["state"] == runs.status("swept-1")["state"] == "finished"
    assert runs.records("swept-1") == runs.records("alone") != runs.records("swept-0")
    assert runs.evals("swept-1") == runs.evals("alone")
    check_same_state(runs, "swept-1", "alone")


def test_a_sweep_inside_torchrun_is_refused(runs: Runs) -> None:
    outcomes = train_py(["-m", *runs.words, "seed=1,2", "parallel=ddp"], ranks=2)
    assert [outcome.code for outcome in outcomes] == [REFUSED] * 2
    assert "-m" in outcomes[0].said and "torchrun" in outcomes[0].said


def test_the_ranks_speak_once(runs: Runs) -> None:
    """Rank 0 speaks; the files are one set."""
    outcomes = runs.start("spoken", "parallel=ddp", ranks=2)
    assert "step 12/12" in outcomes[0].said and "step" not in outcomes[1].said
    config = yaml.safe_load((runs.folder("spoken") / "config.yaml").read_text())
    assert config["parallel"]["dp_replicate"] == 2
    assert not set(LAUNCHED) & set(config)
    assert not list(runs.folder("spoken").glob("run.rank*.log"))

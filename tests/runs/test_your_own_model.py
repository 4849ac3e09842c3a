"""docs/your-own-model.md: its files, as they stand there, train on tp=2 x pp=2 to the numbers of one device, and what
can be written wrongly is refused with a sentence."""

import re
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.runs.drive import REFUSED, Runs, train_py
from training.check import settle
from training.compose import compose
from training.refusal import Refusal

PAGE = (ROOT / "docs" / "your-own-model.md").read_text()
FILES = dict(re.findall(r"In `(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
# The shape is the document's; the texts are those of the other runs.
FEW = "model.context=32 model.vocab_multiple=1 steps=4 checkpoint.every=4 --config-dir my_configs"
WRONG = """
import torch
from torch import nn

from models.feedforward import FeedForward
from models.roles import Role, Spec, specify


class WithoutRole(nn.Module):
    def __init__(self, config, width):
        super().__init__()
        self.up = nn.Linear(config.dim, config.dim)


class WithoutRow(nn.Module):
    def __init__(self, config, width):
        super().__init__()
        self.up = specify(nn.Linear(config.dim, config.dim, bias=False), weight=Spec(Role.matrix, 0.02))


class HalfARow(FeedForward):
    def __init__(self, config, width):
        super().__init__(config, width)
        self.more = specify(nn.Linear(config.dim, config.dim, bias=False), weight=Spec(Role.matrix, 0.02))


class Buffered(FeedForward):
    def __init__(self, config, width):
        super().__init__(config, width)
        self.register_buffer("table", torch.zeros(3))


class OfTwo(FeedForward):
    def forward(self, x, y):
        return super().forward(x)


class Narrow(FeedForward):
    def forward(self, x):
        return super().forward(x)[..., :3]


class OfOne(nn.Module):
    def __init__(self, config):
        super().__init__()


class Raises(nn.Module):
    def __init__(self, config, width):
        raise RuntimeError("not so")


class WithoutCore(nn.Module):
    def __init__(self, config, layer):
        super().__init__()


class LaterRaises(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        if layer == 2:
            raise RuntimeError("not this one")


class LaterWithoutRole(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        if layer == 3:
            self.up = nn.Linear(config.dim, config.dim)


def function(config, width):
    return None
"""


@pytest.fixture(autouse=True)
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folder, in which the commands are given."""
    for path, content in FILES.items() | {("wrong.py", WRONG), ("needs.py", "import not_there")}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the document's models."""
    runs = Runs(tmp_path_factory.mktemp("own"))
    runs.words = [word for word in runs.words if not word.startswith("model.")]
    return runs


def losses(runs: Runs, name: str) -> list[float]:
    return [record["loss"] for record in runs.records(name)]


def test_the_page_has_its_files() -> None:
    assert list(FILES) == ["my_configs/model/tinyllama.yaml", "my_parts.py", "my_configs/model/bilinear.yaml"]


@pytest.mark.torch211
def test_a_part_of_ones_own_on_tp_x_pp(own: Runs) -> None:
    model = f"model=bilinear {FEW}"
    said = own.finish("one", model)
    spread = own.finish("four", f"parallel=pp parallel.pp=2 parallel.tp=2 {model}", ranks=4)
    assert losses(own, "four") == pytest.approx(losses(own, "one"), rel=1e-5)
    assert len(losses(own, "one")) == 4 and "not planned" not in said
    assert "traffic is not planned with feedforward my_parts.Bilinear" in spread and "memory is not" not in spread
    # layers x (attention q, k, v, out; left, right, down; two norms), embedding and head of 257, the last norm
    block = 128 * (128 + 2 * 64 + 128) + 3 * 128 * 192 + 2 * 128
    assert f"{4 * block + 2 * 257 * 128 + 128:,} parameters" in said

    # The class is that of the checkpoint: --config-dir and the model are not given again.
    own.finish("scored", f"eval_only=true checkpoint.load={own.folder('four')}")
    changed = own.start("one", f"model.parts.feedforward.hidden=64 {model}")[0]
    assert changed.code == REFUSED and "hidden:192" in changed.said


@pytest.mark.slow
def test_a_family_on_tp_x_pp(own: Runs) -> None:
    model = f"model=tinyllama {FEW}"
    own.finish("family", model)
    own.finish("spread", f"parallel=pp parallel.pp=2 parallel.tp=2 {model}", ranks=4)
    assert losses(own, "spread") == pytest.approx(losses(own, "family"), rel=1e-5)


PART = "model.parts.feedforward"
TINY = f"model=tinyllama +{PART}._target_"
REFUSALS = {
    f"model=bilinear {PART}._target_=my_prts.Bilinear": ["no module my_prts", "PYTHONPATH"],
    f"model=bilinear {PART}._target_=models.mine.Bilinear": ["models is a package of Espalier"],
    f"model=bilinear {PART}._target_=my_parts.Bilinaer": ["no Bilinaer", "my_parts.Bilinear"],
    f"model=bilinear {PART}._target_=Bilinear": ["of its module"],
    f"{TINY}=needs.Part": ["not_there"],
    f"{TINY}=wrong.function": ["no torch.nn.Module class"],
    f"{TINY}=wrong.OfOne": ["OfOne(config, width)"],
    f"{TINY}=wrong.Raises": ["RuntimeError: not so"],
    f"{TINY}=my_parts.Bilinear": [f"{PART}.hidden", "needs this keyword"],
    f"model=tinyllama +{PART}.hidden=8": [f"{PART}._target_"],
    f"model=bilinear +{PART}.hiden=8": [f"{PART}.hiden", "no keyword of Bilinear", "takes hidden"],
    f"model=bilinear {PART}.hiden=8": [f"+{PART}.hiden=8"],
    f"model=bilinear +{PART}.hidden=8": ["there already", f"instead: {PART}.hidden=8"],
    f"model=bilinear {PART}.hidden=None": [f"{PART}.hidden=null"],
    f"model=bilinear {PART}=8": [f"{PART}._target_"],
    "model=bilinear model.parts.feedfoward.hidden=8": [f"{PART}.hidden=8"],
    "model=bilinear model.prts.feedforward.hidden=8": [f"{PART}.hidden=8"],
    f"{TINY}=wrong.WithoutRole": ["up.weight", "without a role", "specify"],
    f"{TINY}=wrong.Buffered": ["buffer table"],
    f"{TINY}=wrong.OfTwo": ["forward is called with x: missing a required argument: 'y'", "def forward(self, x)"],
    f"{TINY}=wrong.Narrow": ["forward gives [1, 8, 3] of x [1, 8, "],
    "model=tinyllama +model.parts.attention._target_=wrong.LaterRaises": ["in block 2", "RuntimeError: not this one"],
    "model=tinyllama +model.parts.attention._target_=wrong.LaterWithoutRole": ["in block 3", "up.weight"],
    "model=bilinear checkpoint.export_hf=true check_only=true": ["model.parts=", "checkpoint.export_hf=false"],
    "model=tinyllama checkpoint.export_hf=true model.x0=true": ["model.x0=true", "checkpoint.export_hf=false"],
    f"{TINY}=wrong.WithoutRow parallel=tp check_only=true hardware.gpus=2": ["no row for up", "parallel.tp=1"],
    f"{TINY}=wrong.HalfARow parallel=tp check_only=true hardware.gpus=2": ["no row for more.weight"],
    "model=tinyllama +model.parts.attention._target_=wrong.WithoutCore parallel=ddp parallel.cp=2 check_only=true "
    "hardware.gpus=2": ["AttentionCore", "parallel.cp=1"],
}


@pytest.mark.parametrize("typed", REFUSALS)
def test_refused(typed: str) -> None:
    with pytest.raises(Refusal) as refusal:
        settle(*compose([*typed.split(), "--config-dir", "my_configs"]))
    said = str(refusal.value)
    assert "1 problem." in said
    assert [word for word in REFUSALS[typed] if word not in said] == [], said


def test_exits_with_2() -> None:
    """And a sentence; in a run of two ranks before they are connected."""
    words = ["--config-dir", "my_configs", "model=tinyllama", "parallel=tp", f"+{PART}._target_=wrong.WithoutRow"]
    outcomes = train_py(words, ranks=2)
    assert [(outcome.code, outcome.error) for outcome in outcomes] == [(REFUSED, "")] * 2, outcomes
    assert "no row for up" in outcomes[0].said and "Traceback" not in outcomes[0].said

"""Values from the environment: no secret is saved, and another value is seen."""

import hashlib
import json

import pytest

from training.config import Config, leaves
from training.unresolved import digests, saved_values

TEXTS = {"optimizer.lr": "${oc.env:LR}", "data.files": ["${oc.env:DATA}/a.txt"]}


def config(lr: float, files: list[str]) -> Config:
    made = Config()
    made.optimizer.lr, made.data.files = lr, files
    return made


SAVED = config(0.001, ["/secret/a.txt"])
INFO = json.loads(json.dumps({"config": leaves(SAVED) | TEXTS, "from_environment": digests(SAVED, TEXTS)}))


def test_the_same_values_stand_in_the_place_of_their_text() -> None:
    assert saved_values(INFO, SAVED) == leaves(SAVED)


@pytest.mark.parametrize("lr", [0.1, 0.0010000001])
def test_another_value_does_not(lr: float) -> None:
    found = saved_values(INFO, config(lr, ["/secret/b.txt"]))
    assert {key: found[key] for key in TEXTS} == TEXTS
    assert found["optimizer.beta1"] == SAVED.optimizer.beta1


def test_a_value_that_is_written_out_now_is_compared_too() -> None:
    """The digest knows the value, wherever that comes from."""
    assert saved_values(INFO, config(0.001, []))["optimizer.lr"] == 0.001
    assert saved_values(INFO, config(0.001, []))["data.files"] == TEXTS["data.files"]


def test_no_value_is_saved_and_equal_ones_do_not_look_equal() -> None:
    again = digests(SAVED, TEXTS)
    assert "secret" not in json.dumps(INFO)
    for key, text in INFO["from_environment"].items():
        salt, _, hashed = text.partition(":")
        value = json.dumps(leaves(SAVED)[key]).encode()
        assert hashed == hashlib.scrypt(value, salt=bytes.fromhex(salt), n=16384, r=8, p=1, dklen=32).hex()
        assert again[key] != text

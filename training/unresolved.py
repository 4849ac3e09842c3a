"""Values of the config that come from the environment. A run saves their text, such as ${oc.env:LR}, since a value may
be a secret, and beside it a digest by which a value is known again. No torch here."""

import hashlib
import json
import os
from typing import Any

from training.config import Config, leaves
from training.keys import show


def digests(config: Config, unresolved: dict[str, Any]) -> dict[str, str]:
    """Of the value of each key that came from the environment."""
    values = leaves(config)
    return {key: digest(values[key], os.urandom(16)) for key in unresolved}


def digest(value: Any, salt: bytes) -> str:
    """Salt and hash of a value. Slow, so that a short secret is not found by trying (scrypt, RFC 7914)."""
    hashed = hashlib.scrypt(json.dumps(value).encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)
    return f"{salt.hex()}:{hashed.hex()}"


def is_same(value: Any, saved_digest: str) -> bool:
    return digest(value, bytes.fromhex(saved_digest.partition(":")[0])) == saved_digest


def saved_values(info: dict[str, Any], config: Config) -> dict[str, Any]:
    """The config in what a run says of itself. The text of a value that came from the environment is replaced by the
    value where this config has the same; else it stays."""
    texts, known, values = info["config"], info.get("from_environment", {}), leaves(config)
    same = {key for key in known if key in values and is_same(values[key], known[key])}
    return {key: values[key] if key in same else text for key, text in texts.items()}


def in_words(saved: Any) -> str:
    """A saved value that this config does not have."""
    return f"another value of {show(saved)}" if _is_text(saved) else show(saved)


def to_write(key: str, saved: Any) -> str:
    """What to write for it."""
    if isinstance(saved, dict) and not _is_text(saved):
        return f"'++{key}={show(saved)}'"
    return f"{key}=<the former value of {show(saved)}>" if _is_text(saved) else f"{key}={show(saved)}"


def _is_text(saved: Any) -> bool:
    return "${" in show(saved)

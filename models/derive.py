"""Seeds as a pure function of what they are for."""

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit integer from the hash of the parts: the only source of seeds, so no random state is ever saved."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

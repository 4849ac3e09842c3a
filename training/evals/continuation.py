"""Multiple choice made from the held-out text: which of four texts goes on from here?"""

import hashlib
import json
import math
from dataclasses import astuple, dataclass

import numpy as np

from models.derive import derive
from training.data.shards import Tokens
from training.evals.task import IGNORED, Rows, Score
from training.evals.text import document_text
from training.tokenizers import Tokenizer

CHOICES = 4
CHOICE_BYTES = 64
MOST_CONTEXT_BYTES = 256
LEAST_CONTEXT_BYTES = 64
MOST_MISSES = 100  # candidates in a row that give no item, after which the text is used up
TRIES = 16  # candidates for the wrong choices of an item


@dataclass(frozen=True)
class Item:
    """`choices[answer]` is what follows `context` in the text. All choices have CHOICE_BYTES bytes of UTF-8."""

    context: str
    choices: tuple[str, ...]
    answer: int


class Continuation:
    """A choice is scored by its summed log-likelihood after the context; the largest wins.

    All choices have the same number of bytes, so a mean per byte would choose the same.
    """

    def __init__(self, tokens: Tokens, tokenizer: Tokenizer, most_items: int, sequence_length: int) -> None:
        self.items = build_items(tokens, tokenizer, most_items)
        self.items_hash = hashlib.sha256(json.dumps([astuple(item) for item in self.items]).encode()).hexdigest()
        self._pairs = [encode_pair(tokenizer, item.context, choice) for item in self.items for choice in item.choices]
        longest = max((len(context) + len(choice) - 1 for context, choice in self._pairs), default=0)
        self.rows = Rows(len(self._pairs), min(longest, sequence_length), tokenizer.end_of_text, self._make)

    def _make(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        width = self.rows.width
        tokens = np.full((stop - first, width), self.rows.end_of_text, dtype=np.int64)
        labels = np.full((stop - first, width), IGNORED, dtype=np.int64)
        for row, (context, choice) in enumerate(self._pairs[first:stop]):
            ids = (context + choice)[-(width + 1) :]  # the left is cut off where the model's window is too short
            end = len(ids) - 1
            begin = max(end - len(choice), 0)
            tokens[row, :end] = ids[:-1]
            labels[row, begin:end] = ids[begin + 1 :]
        return tokens, labels

    def scores(self, nats: np.ndarray) -> list[Score]:
        """Accuracy, by chance 1/4. Its standard error is sqrt(p (1 - p) / (n - 1)), as in lm-eval.

        An item with a choice that has no finite likelihood counts as wrong.
        """
        by_item = nats[:, 0].reshape(-1, CHOICES)
        answers = np.array([item.answer for item in self.items])
        right = (by_item.argmin(axis=1) == answers) & np.isfinite(by_item).all(axis=1)
        n = len(right)
        accuracy = float(right.mean())
        error = math.sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else None
        return [Score("continuation", "accuracy", accuracy, error, n, self.items_hash)]


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of what follows it, split as lm-eval does (lm_eval/api/model.py, _encode_pair).

    Both are encoded together and cut after as many tokens as the context has alone. Whitespace at the end of the
    context belongs to the continuation. An empty context becomes end-of-text.
    """
    stripped = context.rstrip()
    whole = tokenizer.encode(context + continuation)
    if not stripped:
        return [tokenizer.end_of_text], whole
    cut = len(tokenizer.encode(stripped))
    return whole[:cut], whole[cut:]


def build_items(tokens: Tokens, tokenizer: Tokenizer, most_items: int) -> list[Item]:
    """The items, a pure function of the text: the same for every seed, layout and tokenizer that keeps the text.

    Fewer than `most_items` where not as many are found whose right choices do not overlap.
    """
    texts = _Texts(tokens, tokenizer)
    documents = texts.usable()
    if len(documents) < CHOICES:
        return []
    items: list[Item] = []
    taken: dict[int, list[int]] = {}
    number = misses = 0
    while len(items) < most_items and misses < MOST_MISSES:
        item = _item(texts, documents, number, taken)
        number += 1
        misses = misses + 1 if item is None else 0
        if item is not None:
            items.append(item)
    return items


def _item(texts: "_Texts", documents: list[int], number: int, taken: dict[int, list[int]]) -> Item | None:
    """The candidate of this number, or None. `taken`: places used already, by document; the item's own is added."""
    document = documents[derive("continuation", number, "document") % len(documents)]
    cuts = texts.cuts(document)
    cuts = cuts[cuts >= LEAST_CONTEXT_BYTES]
    if len(cuts) == 0:
        return None
    cut = int(cuts[derive("continuation", number, "cut") % len(cuts)])
    if any(abs(cut - place) < CHOICE_BYTES for place in taken.get(document, [])):
        return None
    wrong = _wrong_choices(texts, documents, document, cut, number)
    if wrong is None:
        return None
    taken.setdefault(document, []).append(cut)
    answer = derive("continuation", number, "answer") % CHOICES
    return Item(texts.before(document, cut), (*wrong[:answer], texts.after(document, cut), *wrong[answer:]), answer)


def _wrong_choices(texts: "_Texts", documents: list[int], document: int, cut: int, number: int) -> list[str] | None:
    """Texts of other documents, none equal to the right one or to another; None where they are not found."""
    right = texts.after(document, cut)
    wrong: list[str] = []
    for attempt in range(TRIES):
        other = documents[derive("continuation", number, "wrong document", attempt) % len(documents)]
        cuts = texts.cuts(other)
        if other == document or len(cuts) == 0:
            continue
        choice = texts.after(other, int(cuts[derive("continuation", number, "wrong cut", attempt) % len(cuts)]))
        if choice != right and choice not in wrong:
            wrong.append(choice)
        if len(wrong) == CHOICES - 1:
            return wrong
    return None


class _Texts:
    """The text of held-out documents, decoded when asked for, and the places where a choice can begin."""

    def __init__(self, tokens: Tokens, tokenizer: Tokenizer) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.known: dict[int, tuple[bytes, np.ndarray]] = {}

    def usable(self) -> list[int]:
        """Documents long enough for a context and a choice."""
        enough = self.tokens.document_bytes >= LEAST_CONTEXT_BYTES + CHOICE_BYTES
        return np.flatnonzero(enough).tolist()

    def cuts(self, document: int) -> np.ndarray:
        return self._read(document)[1]

    def after(self, document: int, cut: int) -> str:
        return self._read(document)[0][cut : cut + CHOICE_BYTES].decode()

    def before(self, document: int, cut: int) -> str:
        """At most MOST_CONTEXT_BYTES; a character that does not fit whole is left out."""
        text = self._read(document)[0]
        begin = max(cut - MOST_CONTEXT_BYTES, 0)
        while begin < cut and text[begin] & 0xC0 == 0x80:
            begin += 1
        return text[begin:cut].decode()

    def _read(self, document: int) -> tuple[bytes, np.ndarray]:
        if document not in self.known:
            text = document_text(self.tokens, self.tokenizer, document)
            self.known[document] = text, find_cuts(text)
        return self.known[document]


def find_cuts(text: bytes) -> np.ndarray:
    """Where a choice can begin, as places in `text`: after a word, so that no token spans context and choice.

    In a text without such places, as in Chinese, after any character. CHOICE_BYTES later a character ends as well.
    """
    bytes_ = np.frombuffer(text, dtype=np.uint8)
    begins = np.append((bytes_ & 0xC0) != 0x80, True)  # a character begins here, or the text has ended
    space = np.isin(bytes_, np.frombuffer(b" \t\n\r\f\v", dtype=np.uint8))
    last = len(text) - CHOICE_BYTES
    if last < 1:
        return np.array([], dtype=np.int64)
    places = np.arange(1, last + 1)
    fits = begins[places] & begins[places + CHOICE_BYTES]
    after_word = fits & space[places] & ~space[places - 1]
    return places[after_word if after_word.any() else fits]

"""What counting bytes alone reaches on the held-out text that the model is scored on."""

from training.data.prepare import Prepared
from training.evals.heldout import scored_documents
from training.evals.ngram import bits_per_byte
from training.evals.text import document_text
from training.tokenizers import Tokenizer

MOST_BYTES = 64 << 20  # of training text; above it the counting takes too long for a line of a table


def baselines(prepared: Prepared, tokenizer: Tokenizer, heldout_tokens: int) -> dict[str, float]:
    """Held-out bits per byte of a bigram and a trigram model of bytes: {"bigram": ..., "trigram": ...}.

    Counted in the training text and scored on exactly the documents of the task heldout. Empty where there is no
    held-out text, or more than MOST_BYTES of training text.
    """
    documents, _, _ = scored_documents(prepared.heldout, heldout_tokens)
    if documents == 0 or prepared.train.document_bytes.sum() > MOST_BYTES:
        return {}
    train = b"".join(document_text(prepared.train, tokenizer, i) for i in range(len(prepared.train.documents)))
    heldout = b"".join(document_text(prepared.heldout, tokenizer, i) for i in range(documents))
    return {"bigram": bits_per_byte(train, heldout, 2), "trigram": bits_per_byte(train, heldout, 3)}

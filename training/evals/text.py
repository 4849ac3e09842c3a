"""Documents of a token stream as text again."""

from training.data.shards import Tokens
from training.tokenizers import Tokenizer


def document_text(tokens: Tokens, tokenizer: Tokenizer, document: int) -> bytes:
    """UTF-8 of one document, without its end-of-text token."""
    starts = tokens.documents
    stop = int(starts[document + 1]) if document + 1 < len(starts) else len(tokens)
    return tokenizer.decode_bytes(tokens.read(int(starts[document]), stop).tolist())

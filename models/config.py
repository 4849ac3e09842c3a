"""The shape of a model. No torch here: configs, FLOP counts and plans are made without it."""

from dataclasses import dataclass
from enum import Enum

from models.schema import Changes, key


class Attention(Enum):
    """Kernels behind AttentionCore. All are torch's scaled_dot_product_attention; `sdpa` lets torch choose."""

    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    efficient = "efficient"
    cudnn = "cudnn"
    math = "math"


@dataclass
class ModelConfig:
    """A GPT-2-shaped decoder (Radford et al. 2019)."""

    layers: int = key(4, "blocks")
    dim: int = key(128, "width of the residual stream")
    heads: int = key(2, "attention heads; must divide dim")
    kv_heads: int | None = key(
        None, "heads of keys and values, each shared by heads / kv_heads neighbours; null: as many as heads"
    )
    fused_qkv: bool = key(True, "one matrix for queries, keys and values; false: three")
    ffn_dim: int | None = key(None, "width of the feed-forward layer; null: 4 x dim")
    context: int = key(128, "most positions a sequence can have, the size of the position table")
    vocab_size: int | None = key(None, "tokens the model can predict; null: as many as the tokenizer has")
    vocab_multiple: int = key(
        128,
        "rows of embedding and head are padded to a multiple of this; padding is never predicted, counted or drawn",
        Changes.layout,
    )
    bias: bool = key(True, "biases in linear layers and norms")
    logit_softcap: float | None = key(None, "scores of the vocabulary are bent into +- this by tanh; null: not at all")
    z_loss: float = key(
        0.0,
        "weight of the square of each token's log-sum of scores, added to the gradient; the loss shown is without it",
    )
    tied_head: bool = key(True, "the head shares the embedding's weight")
    norm_eps: float = key(1e-5, "added to the variance in LayerNorm")
    dropout: float = key(
        0.0, "share of activations dropped in training, after the embedding, in attention and before each residual sum"
    )
    init_std: float = key(
        0.02,
        "standard deviation of initial weights; projections into the residual stream have it divided by sqrt(2 x layers)",
    )
    attention: Attention = key(
        Attention.auto, "kernel: auto | sdpa (torch chooses) | flash | efficient | cudnn | math", Changes.layout
    )
    tokenizer: str = key(
        "gpt2",
        "tokenizer this model is meant for, used where tokenizer.kind is auto: bytes | gpt2 | a tiktoken encoding",
    )

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def feedforward_dim(self) -> int:
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. Raises ValueError while the vocabulary is not known yet."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not known before the tokenizer is")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

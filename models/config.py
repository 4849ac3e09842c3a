"""The shape of a model. No torch here: configs, FLOP counts and plans are made without it."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from models.schema import Changes, key


class Attention(Enum):
    """Kernels behind AttentionCore; models.backends says what each can do. From `sdpa` to `math` they are torch's
    scaled_dot_product_attention; with `sdpa` it chooses among them."""

    auto = "auto"
    sdpa = "sdpa"
    flash = "flash"
    efficient = "efficient"
    cudnn = "cudnn"
    math = "math"
    flash2 = "flash2"
    flash3 = "flash3"
    flash4 = "flash4"
    flex = "flex"
    varlen = "varlen"
    xformers = "xformers"


class Score(Enum):
    """What turns a router's logits into scores."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Balance(Enum):
    """The auxiliary loss that spreads tokens over experts: none, of each sequence by itself, or by the load of the step
    before."""

    none = "none"
    sequence = "sequence"
    step = "step"


class Norm(Enum):
    """How the stream is normalized: to mean 0 and deviation 1 (Ba et al. 2016), or to a mean square of 1 (Zhang and
    Sennrich 2019)."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class NormPlace(Enum):
    """Where a block normalizes: what goes into each part, what comes out of it (OLMo 2), or both (Gemma 2)."""

    before = "before"
    after = "after"
    both = "both"


class QKNorm(Enum):
    """Which part of queries and of keys is normalized together: none, each head (Qwen3), or all heads (OLMo 2)."""

    none = "none"
    head = "head"
    all = "all"


class FeedForward(Enum):
    """What lies between the matrices of a feed-forward layer. swiglu and geglu have a third matrix, the gate (Shazeer
    2020); gelu and geglu are the tanh approximation; relu2 is the square of ReLU (So et al. 2021)."""

    gelu = "gelu"
    relu2 = "relu2"
    swiglu = "swiglu"
    geglu = "geglu"


class Position(Enum):
    """How attention knows where tokens are: a learned vector each, added to the embedding, or rotary (Su et al. 2021),
    or not."""

    learned = "learned"
    rotary = "rotary"
    none = "none"


class RotaryScaling(Enum):
    """How rotary positions reach past the length that a model was first trained at."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class Residual(Enum):
    """First values of the projections into the residual stream: std divided by sqrt(2 x layers) (GPT-2), as of other
    matrices, or 0."""

    scaled = "scaled"
    same = "same"
    zero = "zero"


class Parametrization(Enum):
    """How first values, learning rates and two products depend on the width (models.roles.scaling)."""

    standard = "standard"
    mup = "mup"


@dataclass
class Rotary:
    """Rotary positions (Su et al. 2021): pairs of a head's numbers are turned by an angle that grows with the position,
    each pair at a speed of its own."""

    theta: float = key(10_000.0, "base of the speeds: pair i of n turns by theta^(-i / n) a position")
    share: float = key(1.0, "share of each head's numbers that are turned")
    scaling: RotaryScaling = key(
        RotaryScaling.none,
        "for sequences longer than original_context: none | linear (slower by factor) | llama3 (slow pairs slower, Llama 3.1) | yarn (Peng et al. 2023)",
    )
    factor: float = key(1.0, "scaling: how many times longer")
    original_context: int | None = key(None, "scaling: positions the speeds were made for; null: model.context")
    low_frequency: float = key(1.0, "llama3: pairs that turn fewer times than this in original_context are slowed")
    high_frequency: float = key(4.0, "llama3: pairs that turn more often than this are left")
    beta_fast: float = key(32.0, "yarn: pairs that turn more often than this in original_context are left")
    beta_slow: float = key(1.0, "yarn: pairs that turn fewer times than this are slowed")
    magnitude: float | None = key(
        None, "yarn: what queries and keys are multiplied by; null: 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22)"
    )
    windows: bool = key(True, "false: scaling is for blocks without a window only (OLMo 3)")


@dataclass
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, 2.1): keys and values of all heads come from one
    narrow vector of each token, and so may queries. Of a key a part that all heads share is turned by its position."""

    kv_rank: int = key(0, "width of the vector that keys and values come from; 0: no latent attention")
    q_rank: int | None = key(None, "width of the vector that queries come from; null: they come from the stream")
    nope_dim: int = key(128, "numbers of each head's query and key that are not turned")
    rope_dim: int = key(64, "numbers of each head's query that are turned, and of the key that all heads share")
    value_dim: int = key(128, "width of a head's values")


@dataclass
class MoE:
    """Mixture of experts: a router sends each token to a few of many feed-forward layers (Shazeer et al. 2017)."""

    experts: int = key(
        0, "feed-forward layers of a block among which a router chooses for each token; 0: one, no router"
    )
    top_k: int = key(2, "experts a token goes to")
    dim: int | None = key(None, "width of an expert; null: as the feed-forward layer")
    shared: int = key(0, "experts that every token goes to, as one feed-forward layer of so many times the width")
    dense_layers: int = key(0, "the first so many blocks have no experts but a feed-forward layer (DeepSeek-V3)")
    groups: int = key(1, "experts are in so many groups of neighbours, as many as there are hosts that have them")
    top_groups: int = key(
        1,
        "groups that a token's experts are chosen from: those whose two best experts have the highest sum (DeepSeek-V3)",
    )
    score: Score = key(Score.softmax, "scores of the experts from the router's logits: softmax | sigmoid (DeepSeek-V3)")
    normalize: bool = key(True, "the weights of a token's experts are divided by their sum")
    scale: float = key(1.0, "what the weights are multiplied by at the end")
    balance: Balance = key(
        Balance.none,
        "auxiliary loss that spreads tokens over experts: none | sequence (in each sequence, DeepSeek-V3) | step (by the load of the optimizer step before)",
    )
    balance_weight: float = key(
        0.01, "balance: weight of the auxiliary loss in the gradient; the loss shown is without it"
    )
    bias_rate: float = key(
        0.0,
        "by how much each step moves the bias with which an overloaded or idle expert is chosen, without a loss (Wang et al. 2024); 0: not at all",
    )
    z_loss: float = key(
        0.0,
        "weight of the square of each token's log-sum of router logits, in the gradient only (Zoph et al. 2022, ST-MoE)",
    )
    capacity_factor: float | None = key(
        None,
        "in training an expert takes at most this times its even share of a document's (without documents a sequence's) tokens, the first ones; approximate; null: all",
    )
    forced_balance: bool = key(
        False, "for benchmarks: the tokens of each sequence go to experts in turn, whatever the router says"
    )


@dataclass
class ModelConfig:
    """A decoder. With the defaults it is shaped as GPT-2 (Radford et al. 2019)."""

    layers: int = key(4, "blocks")
    dim: int = key(128, "width of the residual stream")
    heads: int = key(2, "attention heads; must divide dim where head_dim is null")
    head_dim: int | None = key(None, "width of a head; null: dim / heads")
    kv_heads: int | None = key(
        None, "heads of keys and values, each shared by heads / kv_heads neighbours; null: as many as heads"
    )
    fused_qkv: bool = key(True, "one matrix for queries, keys and values; false: three")
    ffn: FeedForward = key(
        FeedForward.gelu, "feed-forward layer: gelu | relu2 | swiglu | geglu (the last two have a gate, a third matrix)"
    )
    ffn_dim: int | None = key(None, "width of the feed-forward layer; null: 4 x dim")
    context: int = key(128, "most positions a sequence can have")
    position: Position = key(
        Position.learned, "learned (a table with a vector for each position) | rotary (in attention) | none"
    )
    rotary: Rotary = key(Rotary, "rotary positions")
    window: int | None = key(None, "so many tokens back a token attends to, itself among them; null: to all")
    full_every: int = key(0, "window: every so many-th block attends to all; 0: none does")
    window_stages: int = key(
        1, "the window grows to its size in so many equal steps over the run, beginning with 1 / stages of it"
    )
    vocab_size: int | None = key(None, "tokens the model can predict; null: as many as the tokenizer has")
    vocab_multiple: int = key(
        128,
        "rows of embedding and head are padded to a multiple of this; padding is never predicted, counted or drawn",
        Changes.layout,
    )
    norm: Norm = key(Norm.layernorm, "layernorm | rmsnorm")
    norm_place: NormPlace = key(
        NormPlace.before, "before (each part of a block) | after (what a part gives, OLMo 2) | both (Gemma 2)"
    )
    norm_weight: bool = key(True, "norms have a learned weight")
    qk_norm: QKNorm = key(QKNorm.none, "queries and keys are normalized: none | head (each, Qwen3) | all (OLMo 2)")
    bias: bool = key(True, "biases in linear layers and in LayerNorm")
    qkv_bias: bool | None = key(None, "biases of queries, keys and values; null: as bias says")
    attention_scale: float | None = key(None, "what q k^T is multiplied by; null: 1 / sqrt(head_dim)")
    attention_softcap: float | None = key(
        None, "scores of attention are bent into +- this by tanh (Gemma 2); null: not at all"
    )
    logit_softcap: float | None = key(None, "scores of the vocabulary are bent into +- this by tanh; null: not at all")
    z_loss: float = key(
        0.0,
        "weight of the square of each token's log-sum of scores, added to the gradient; the loss shown is without it",
    )
    tied_head: bool = key(True, "the head shares the embedding's weight")
    x0: bool = key(False, "each block begins with a learned mix of the stream and of what the embedding gave")
    skips: bool = key(
        False,
        "blocks of the second half also mix in what those of the first half gave: the first's goes to the last, "
        "as in a U-net",
    )
    mtp: int = key(
        0,
        "further tokens that are predicted in training, each by a block of its own after the one before (DeepSeek-V3, 2.2)",
    )
    mtp_weight: float = key(
        0.3, "mtp: weight of the mean of their losses in the gradient; the loss shown is without them"
    )
    value_embeddings: int = key(
        0,
        "tables with a vector for each token that is mixed into the values of attention; table i serves block i and "
        "the block that many from the end",
    )
    norm_eps: float = key(1e-5, "added to the variance, or the mean square, in norms")
    embedding_scale: float | None = key(None, "what the embedding is multiplied by (Gemma: sqrt(dim)); null: nothing")
    embedding_norm: bool = key(False, "the embedding is normalized, without a weight")
    dropout: float = key(
        0.0, "share of activations dropped in training, after the embedding, in attention and before each residual sum"
    )
    init_std: float = key(0.02, "standard deviation of initial weights")
    init_residual: Residual = key(
        Residual.scaled,
        "projections into the residual stream begin with: scaled (init_std / sqrt(2 x layers), GPT-2) | same | zero",
    )
    init_embedding_std: float | None = key(
        None, "standard deviation of the embedding and of value embeddings; null: init_std"
    )
    parametrization: Parametrization = key(
        Parametrization.standard,
        "standard | mup (Yang et al. 2022: the learning rate and init_std that are best for a narrow model are so for wide ones)",
    )
    mup_base_dim: int | None = key(None, "mup: model.dim at which both parametrizations are the same")
    mup_base_head_dim: int | None = key(
        None, "mup: width of a head at mup_base_dim; null: as here, wider models have more heads"
    )
    attention: Attention = key(
        Attention.auto,
        "kernel: auto (by GPU: flash3, flash2 or sdpa) | sdpa (torch chooses) | flash | efficient | cudnn | math (sdpa's own) | flash2 (package flash-attn) | flash3 | flash4 (torch's switch) | flex | varlen | xformers (package)",
        Changes.layout,
    )
    tokenizer: str = key(
        "gpt2",
        "tokenizer this model is meant for, used where tokenizer.kind is auto: bytes | gpt2 | a tiktoken encoding",
    )

    init_from: str | None = key(
        None,
        "folder of a Hugging Face model whose shape, weights and tokenizer the run begins with; null: none",
    )

    latent: Latent = key(Latent, "multi-head latent attention")
    moe: MoE = key(MoE, "mixture of experts")
    parts: dict[str, dict[str, Any]] = key(
        dict,
        "classes of your own in the place of a block's parts: attention | feedforward, each with _target_ and keywords (docs/your-own-model.md)",
    )

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Width of a head's queries and keys."""
        if self.latent.kv_rank > 0:
            return self.latent.nope_dim + self.latent.rope_dim
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_size(self) -> int:
        """Width of a head's values."""
        return self.latent.value_dim if self.latent.kv_rank > 0 else self.head_size

    @property
    def query_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_size

    @property
    def turned_dim(self) -> int:
        """Numbers of a head that rotary positions turn."""
        width = self.latent.rope_dim if self.latent.kv_rank > 0 else self.head_size
        return int(width * self.rotary.share) if self.position is Position.rotary else 0

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def gated(self) -> bool:
        """Whether feed-forward layers have a gate, a third matrix."""
        return self.ffn in (FeedForward.swiglu, FeedForward.geglu)

    @property
    def residual_std(self) -> float:
        """Of the first values of projections into the residual stream."""
        scaled = {Residual.scaled: self.init_std / math.sqrt(2 * self.layers), Residual.zero: 0.0}
        return scaled.get(self.init_residual, self.init_std)

    @property
    def embedding_std(self) -> float:
        return self.init_std if self.init_embedding_std is None else self.init_embedding_std

    @property
    def width(self) -> float:
        """How many times as wide as mup's base; 1 without mup."""
        return 1.0 if self.mup_base_dim is None else self.dim / self.mup_base_dim

    @property
    def score_scale(self) -> float | None:
        """What q k^T is multiplied by; None: 1 / sqrt(head_dim). With mup it falls as 1 / head_dim (Yang et al. 2022,
        definition 4.1)."""
        base = self.mup_base_head_dim
        if base is None or base == self.head_size:
            return self.attention_scale
        return (base**-0.5 if self.attention_scale is None else self.attention_scale) * base / self.head_size

    def window_of(self, layer: int) -> int | None:
        """The window of a block when it has grown; None where it attends to all."""
        return None if self.full_every and (layer + 1) % self.full_every == 0 else self.window

    @property
    def feedforward_dim(self) -> int:
        return 4 * self.dim if self.ffn_dim is None else self.ffn_dim

    @property
    def expert_dim(self) -> int:
        return self.feedforward_dim if self.moe.dim is None else self.moe.dim

    def routed(self, layer: int) -> bool:
        """Whether a block has experts."""
        return self.moe.experts > 0 and layer >= self.moe.dense_layers

    @property
    def key_value_dim(self) -> int:
        return self.key_value_heads * self.head_size

    @property
    def all_blocks(self) -> range:
        """Their numbers: of the layers, and behind them of what predicts further tokens."""
        return range(self.layers + self.mtp)

    def leaves_skip(self, layer: int) -> bool:
        """Whether a later block mixes in what this one gives."""
        return self.skips and layer < self.layers // 2

    def takes_skip(self, layer: int) -> bool:
        return self.leaves_skip(self.layers - 1 - layer)

    def stream_tensors(self, layer: int) -> int:
        """How many tensors of shape [batch, seq, dim] the stream has before a block: x, x0, and the skips that are
        open."""
        left = sum(map(self.leaves_skip, range(layer)))
        return 1 + self.x0 + left - sum(map(self.takes_skip, range(layer)))

    def value_table(self, layer: int) -> int | None:
        """The first block that uses the value embedding of a block; None where it has none."""
        first = layer if layer < self.layers - self.value_embeddings else layer - self.layers + self.value_embeddings
        return first if first < self.value_embeddings else None

    @property
    def shared_parameters(self) -> dict[str, str]:
        """Second names of parameters of the whole model, and the first."""
        head = {"head.weight": "embed.tokens.weight"} if self.tied_head else {}
        if self.mtp > 0 and not self.tied_head:
            head["mtp.embed.tokens.weight"] = "embed.tokens.weight"
        tables = {layer: self.value_table(layer) for layer in range(self.layers)}
        seconds = {layer: first for layer, first in tables.items() if first is not None and first != layer}
        return head | {
            f"values.{layer}.table.weight": f"values.{first}.table.weight" for layer, first in seconds.items()
        }

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. Raises ValueError while the vocabulary is not known yet."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not known before the tokenizer is")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

"""What one writes by hand with PyTorch to train GPT-2: what scripts/benchmark.py measures the framework against."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from models.config import ModelConfig
from models.decoder import Decoder
from models.init import initial_rows
from models.roles import parameter_specs
from parallel.compile import compile_model
from parallel.config import Dtype, Reduce, Strategy
from parallel.precision import compute_dtype, master_dtype, settle
from training.config import Config
from training.data.batches import Batch
from training.place import Place


class Block(nn.Module):
    """Its parameters, like the model's, have the names that ours have, so that both can be given the same values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, hidden, bias = config.dim, config.feedforward_dim, config.bias
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(dim, eps=config.norm_eps, bias=bias)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim, bias), "out": nn.Linear(dim, dim, bias)})
        self.feedforward_norm = nn.LayerNorm(dim, eps=config.norm_eps, bias=bias)
        self.feedforward = nn.ModuleDict({"up": nn.Linear(dim, hidden, bias), "down": nn.Linear(hidden, dim, bias)})

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x)).view(batch, length, self.heads, 3, dim // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["out"](y.transpose(1, 2).reshape(batch, length, dim))
        up = self.feedforward["up"](self.feedforward_norm(x))
        return x + self.feedforward["down"](F.gelu(up, approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 without dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rows, self.vocabulary = config.padded_vocab_size, config.vocab_size
        self.embed = nn.ModuleDict(
            {"tokens": nn.Embedding(rows, config.dim), "positions": nn.Embedding(config.context, config.dim)}
        )
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in range(config.layers)})
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(config.dim, rows, bias=False)
        if config.tied_head:
            self.head.weight = self.embed["tokens"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens, labels: [batch, seq]. Returns the mean loss."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed["tokens"](tokens) + self.embed["positions"](positions)
        for block in self.blocks.values():
            x = block(x)
        logits = self.head(self.norm(x))[..., : self.vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class PlainLoop:
    """The model with our initial values, spread by torch's DDP or FSDP2 as the config says, and torch's AdamW.

    bf16 is autocast on one device and under DDP, FSDP2's mixed precision otherwise. `losses`: of each step, of this
    rank."""

    def __init__(self, config: Config, place: Place) -> None:
        self.config = config
        self.losses: list[Tensor] = []
        dtype = settle(config.precision, place.device)
        with place.device:
            self.model: Any = GPT(config.model).to(master_dtype(dtype))
        give_values(self.model, config)
        compile_model(self.model, self.model.blocks.values(), config.compile, place.device)
        self.sharded = config.parallel.strategy is Strategy.fsdp2
        self.autocast: AbstractContextManager[Any] = nullcontext()
        if self.sharded:
            shard(self.model, config, place, compute_dtype(dtype))
        elif dtype is Dtype.bf16:
            self.autocast = torch.autocast(place.device.type, torch.bfloat16)
        if config.parallel.strategy is Strategy.ddp:
            devices = [place.device] if place.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)
        self.optimizer = adamw(self.model, config)

    def _micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        parallel = self.config.parallel
        if self.sharded:
            once_a_step = parallel.reduce is Reduce.step or parallel.reshard_after_forward is False
            self.model.set_requires_gradient_sync(last or not once_a_step)
        if parallel.strategy is Strategy.ddp and not last:
            return self.model.no_sync()
        return nullcontext()

    def step(self, batch: Batch, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        number = len(batch.micro_batches)
        losses = []
        for place, inputs in enumerate(batch.micro_batches):
            with self._micro_batch(last=place == number - 1):
                with self.autocast:
                    loss = self.model(**inputs) / number
                loss.backward()
                losses.append(loss.detach())
        if self.config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(torch.stack(losses).sum())
        if len(self.losses) % self.config.metrics.every == 0:
            self.losses[-1].item()  # as one does to print it


def give_values(model: nn.Module, config: Config) -> None:
    with torch.device("meta"):
        specs = parameter_specs(Decoder(config.model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_rows(specs[name], name, parameter.shape, config.seed, parameter.device))


def shard(model: Any, config: Config, place: Place, compute: torch.dtype) -> None:
    mesh, parallel = place.mesh, config.parallel
    assert mesh is not None
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if parallel.copies > 1 else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(compute, reduce_dtype=compute_dtype(config.precision.reduce_dtype)),
    }
    for block in model.blocks.values():
        fully_shard(block, reshard_after_forward=parallel.reshard_after_forward, **options)
    fully_shard(model, **options)
    if place.device.type == "cpu":  # gloo cannot average
        for module in [*model.blocks.values(), model]:
            module.set_force_sum_reduction_for_comms(True)


def adamw(model: nn.Module, config: Config) -> torch.optim.AdamW:
    """Decay on matrices alone, as nanoGPT has it."""
    wanted = config.optimizer
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=wanted.lr,
        betas=(wanted.beta1, wanted.beta2),
        eps=wanted.eps,
        fused=True,
    )

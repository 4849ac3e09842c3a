"""The optimizer of a config."""

from models.decoder import Decoder
from training.config import OptimizerConfig, OptimizerKind
from training.optimizers.adamw import AdamW
from training.optimizers.base import Optimizer
from training.optimizers.groups import decay_groups
from training.optimizers.sgd import SGD


def build_optimizer(config: OptimizerConfig, model: Decoder) -> Optimizer:
    groups = decay_groups(model, config.weight_decay)
    if config.kind is OptimizerKind.adamw:
        return AdamW(groups, config.beta1, config.beta2, config.eps)
    return SGD(groups, config.beta1)

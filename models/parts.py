"""A user's own parts of a block: classes that model.parts names, in the place of ours. Whatever is said of one is read
from the part itself, built on the meta device. torch is imported only where there is one."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import nn

    from models.shapes import Shapes

TARGET = "_target_"
PARTS = ("attention", "feedforward")  # of a block
OURS = ("models", "parallel", "training", "scripts")  # packages, which a module of the user would not be seen behind

_built: dict[tuple[str, str, int], nn.Module] = {}
_counted: dict[tuple[str, str, int, int], tuple[float, float] | None] = {}


class WrongPart(ValueError):
    """A class that cannot be had; `instead` is what to write."""

    def __init__(self, reason: str, instead: str) -> None:
        super().__init__(reason)
        self.reason, self.instead = reason, instead


def class_of(target: str) -> type[nn.Module]:
    """The class of a dotted name such as my_parts.Bilinear; its module may lie in the folder that the command is given
    in. Raises WrongPart."""
    from torch import nn

    path, _, name = target.rpartition(".")
    if not path:
        raise WrongPart("is the name of a class and of its module", f"my_module.{target}")
    try:
        module = _module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path + ".").startswith(error.name + "."):
            raise WrongPart(f"{path} cannot be imported: {error}", "a module whose own imports are there") from error
        if path.partition(".")[0] in OURS:
            raise WrongPart(f"{path.partition('.')[0]} is a package of Espalier", "a module of another name") from error
        where = f"{path.replace('.', '/')}.py in the folder of the command, or its folder in PYTHONPATH"
        raise WrongPart(f"there is no module {error.name}", where) from error
    except Exception as error:
        raise WrongPart(f"{path} cannot be imported: {_said(error)}", "a module that can be imported") from error
    kinds = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    own = [kind for kind in kinds if vars(module)[kind].__module__ == module.__name__]
    if name not in kinds:
        reason = "is no torch.nn.Module class" if hasattr(module, name) else f"{path} has no {name}"
        raise WrongPart(reason, " or ".join(f"{path}.{kind}" for kind in own) or f"a class of {path} that is one")
    found: type[nn.Module] = getattr(module, name)
    return found


def _module(path: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last, so that no file there hides a package
    importlib.invalidate_caches()
    return importlib.import_module(path)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def own_part(config: ModelConfig, name: str, layer: int) -> nn.Module | None:
    """The user's part of a block, called as ours is: attention with the config and the number of the block, the
    feed-forward layer with the config and its width. None where it is ours."""
    if name not in config.parts:
        return None
    keywords = {key: value for key, value in config.parts[name].items() if key != TARGET}
    return class_of(config.parts[name][TARGET])(
        config, layer if name == "attention" else config.feedforward_dim, **keywords
    )


def built(config: ModelConfig, name: str, layer: int) -> nn.Module | None:
    """The same on the meta device, for what has to be known of it before there is a model."""
    if name not in config.parts:
        return None
    key = (repr(config), name, layer)
    if key not in _built:
        import torch

        from models.position import Rotation

        with torch.device("meta"):
            part = own_part(config, name, layer)
        assert part is not None
        for module in part.modules():
            if isinstance(module, Rotation):
                module.speeds = module.speeds.to("meta")
        _built[key] = part
    return _built[key]


def part_shapes(config: ModelConfig, name: str, layer: int) -> Shapes | None:
    """The parameters of a user's part, as models.shapes has those of ours; None where it is ours."""
    part = built(config, name, layer)
    if part is None:
        return None
    return {f"{name}.{own}": tuple(parameter.shape) for own, parameter in part.named_parameters()}


def part_flops(config: ModelConfig, name: str, layer: int, sequence_length: int) -> tuple[float, float] | None:
    """Floating-point operations of forward for one token, as torch's counter sees them on the meta device: of products
    with a weight, and of other products (those of attention). None where forward cannot run there."""
    part, key = built(config, name, layer), (repr(config), name, layer, sequence_length)
    assert part is not None
    if key not in _counted:
        try:
            _counted[key] = _count(part, config, name, layer, sequence_length)
        except Exception:  # the user's code: it may look at values, which there are none of
            _counted[key] = None
    return _counted[key]


def part_bytes(config: ModelConfig, name: str, layer: int, value_bytes: int, tp: int) -> float | None:
    """What a user's part keeps for backward of one token on one of tp ranks, as its method kept_bytes says; None where
    it is ours, or says nothing."""
    tells: Any = getattr(built(config, name, layer), "kept_bytes", None)
    return None if tells is None else float(tells(value_bytes, tp))


def without_bytes(config: ModelConfig) -> list[str]:
    """The user's parts that do not say what they keep, each with its class."""
    return [
        f"{name} {of[TARGET]}" for name, of in config.parts.items() if not hasattr(class_of(of[TARGET]), "kept_bytes")
    ]


def _call(part: nn.Module, config: ModelConfig, name: str, layer: int, sequence_length: int) -> Any:
    """What forward gives for one sequence on the meta device. Raises what the user's code raises."""
    import torch

    x = torch.empty(1, sequence_length, config.dim, device="meta")
    values = None
    if config.value_table(layer) is not None:
        values = torch.empty(1, sequence_length, config.key_value_dim, device="meta")
    with torch.no_grad():
        return part(x, None, None, values) if name == "attention" else part(x)


def part_gives(config: ModelConfig, name: str, layer: int, sequence_length: int) -> Any:
    """What a user's part gives for x of [1, sequence_length, dim]: None where forward cannot run on the meta device."""
    part = built(config, name, layer)
    assert part is not None
    try:
        return _call(part, config, name, layer, sequence_length)
    except Exception:  # the user's code: it may look at values, which there are none of
        return None


def _count(part: nn.Module, config: ModelConfig, name: str, layer: int, sequence_length: int) -> tuple[float, float]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        _call(part, config, name, layer, sequence_length)
    counts = counter.get_flop_counts().get("Global", {})
    weights = sum(count for of, count in counts.items() if of in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return weights / sequence_length, (sum(counts.values()) - weights) / sequence_length


def uncounted(config: ModelConfig, sequence_length: int) -> list[str]:
    """The user's classes whose operations are not counted."""
    return [
        of[TARGET]
        for name, of in config.parts.items()
        if any(
            part_flops(config, name, layer, sequence_length) is None
            for layer in config.all_blocks
            if name == "attention" or not config.routed(layer)
        )
    ]

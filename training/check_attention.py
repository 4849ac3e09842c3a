"""Whether the kernel of attention can do what the config asks. No torch here."""

from collections.abc import Iterator

from models.backends import Asked, lacks
from models.config import Attention
from parallel.config import Context, Dtype
from training.config import Config
from training.nearby import legal_numbers
from training.refusal import Problem
from training.resolve import World, filling


def asked_by(config: Config, dtype: Dtype) -> Asked:
    model = config.model
    window, softcap = model.window is not None, model.attention_softcap is not None
    marked = model.moe.experts > 0 and filling(config) > 0  # by documents: training.data.batches
    documents = config.data.mask_documents or marked
    width = model.head_size if legal_numbers(model.dim, model.heads) else 1
    return Asked(documents, window, softcap, model.dropout > 0, dtype.name, width)


def attention_rules(config: Config, world: World) -> Iterator[Problem]:
    """Where the config names the type of device; else training.attention asks again when it is known."""
    if config.hardware.device in ("cpu", "cuda"):
        yield from device_rules(config, config.hardware.device, config.precision.dtype)


def device_rules(config: Config, device: str, dtype: Dtype) -> Iterator[Problem]:
    """dtype: what the run computes in; auto: not known yet."""
    kernel, asked = config.model.attention, asked_by(config, dtype)
    if kernel is not Attention.auto and (reason := lacks(kernel, asked, device)):
        bf16 = ", or precision=bf16" if "float" in reason else ""
        yield Problem("model.attention", kernel.name, reason, f"model.attention=auto{bf16}")
    ring = config.parallel.cp > 1 and config.parallel.context is Context.ring
    if ring and device == "cuda" and (asked.documents or asked.window):
        documents = "data.mask_documents, or a batch of a model with experts that does not divide by the data ranks"
        what = f"keeps no documents apart ({documents})" if asked.documents else "has no window (model.window)"
        yield Problem("parallel.context", "ring", f"{what} on a GPU", "parallel.context=gather")

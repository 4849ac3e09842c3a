"""Text by the model of a checkpoint, on one device, or on several under torchrun, which then share its heads:

python -m scripts.generate outputs/gpt2_nano --prompt "Once upon a time" --tokens 100 --temperature 0.8
"""

import argparse
import os

from models.config import ModelConfig
from parallel.config import ParallelConfig
from training.compose import refusing
from training.refusal import Problem, refuse


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__.partition(":")[0])
    parser.add_argument("checkpoint", help="a run's folder, for its newest checkpoint, or a checkpoint's")
    parser.add_argument("--prompt", action="append", default=[], help="text to go on with; more than one make a batch")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of each text (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, help="draw of so many likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw of the likeliest tokens that have this share together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as precision=bf16")
    return parser.parse_intermixed_args(argv)


def problems(words: argparse.Namespace) -> list[Problem]:
    found = []
    if words.tokens < 1:
        found.append(Problem("--tokens", words.tokens, "must be at least 1", "--tokens 200"))
    if not 0 <= words.temperature < float("inf"):
        found.append(Problem("--temperature", words.temperature, "must be a number from 0", "--temperature 0.8"))
    if words.top_k is not None and words.top_k < 1:
        found.append(Problem("--top-k", words.top_k, "must be at least 1", "--top-k 50"))
    if words.top_p is not None and not 0 < words.top_p <= 1:
        found.append(Problem("--top-p", words.top_p, "must be above 0 and at most 1", "--top-p 0.95"))
    for prompt in words.prompt:
        if any("\ud800" <= character <= "\udfff" for character in prompt):  # bytes of the command line
            found.append(Problem("--prompt", ascii(prompt), "is not UTF-8", "--prompt with text in UTF-8"))
    return found


def misfits(model: ModelConfig, parallel: ParallelConfig, longest: int, tokens: int) -> list[Problem]:
    """What is wrong with this model, layout and length. longest: tokens of a prompt."""
    found = []
    if longest >= model.context:
        reason = f"its {longest} tokens leave none of model.context={model.context}"
        found.append(Problem("--prompt", "", reason, "a shorter --prompt"))
    elif longest + tokens > model.context:
        reason = f"with the prompt's {longest} tokens is more than model.context={model.context}"
        found.append(Problem("--tokens", tokens, reason, f"--tokens {model.context - longest}"))
    for axis in ("pp", "cp"):
        if (degree := getattr(parallel, axis)) > 1:
            reason = "the ranks share heads (parallel.tp), with the keys and values of tokens before"
            found.append(Problem(f"parallel.{axis}", degree, reason, f"parallel.{axis}=1"))
    if names := without_core(model):
        reason = "has no AttentionCore, which keeps keys and values of the tokens before"
        found.append(Problem("model.parts.attention", names, reason, "models.attention.AttentionCore in it"))
    return found


def without_core(model: ModelConfig) -> str:
    """The user's own attention, where it has none; else nothing."""
    from models.attention import AttentionCore  # imports torch, which takes seconds
    from models.parts import TARGET, built

    for layer in range(model.layers):
        part = built(model, "attention", layer)
        if part is not None and not any(isinstance(module, AttentionCore) for module in part.modules()):
            return str(model.parts["attention"][TARGET])
    return ""


def generate(words: argparse.Namespace) -> list[str]:
    """The prompts with what follows. Raises Refusal."""
    refuse(problems(words))
    from training.loaded import load  # imports torch, which takes seconds
    from training.writing import Sampling, write

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ["parallel=tp", f"parallel.tp={ranks}"] if ranks > 1 else []
    if not any(word.startswith("compile") for word in words.overrides):
        layout.append("compile=none")  # with a cache each token is another shape
    loaded = load(words.checkpoint, [*layout, *words.overrides])
    tokenizer, spread = loaded.tokenizer, loaded.spread
    prompts = [[tokenizer.end_of_text, *tokenizer.encode(prompt)] for prompt in words.prompt or [""]]
    refuse(misfits(loaded.config.model, loaded.config.parallel, max(map(len, prompts)), words.tokens))
    spread.model.eval()

    written = write(
        spread.model,
        lambda **inputs: spread.forward(**inputs)[..., : tokenizer.vocab_size],  # the model may have more
        prompts,
        words.tokens,
        Sampling(words.temperature, words.top_k, words.top_p),
        words.seed,
        tokenizer.end_of_text,
        loaded.place.device,
        ranks,
    )
    texts = zip(words.prompt or [""], written, strict=True)
    return [prompt + tokenizer.decode(ids) for prompt, ids in texts]


def main() -> None:
    with refusing():
        texts = generate(parse())
    if os.environ.get("RANK", "0") == "0":
        print("\n---\n".join(texts))
    from training.place import disconnect

    disconnect()


if __name__ == "__main__":
    main()

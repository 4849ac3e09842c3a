"""What is in a folder of checkpoints, and what may be done with it beside a run:

python -m scripts.checkpoints list outputs/gpt2_124m

A path is a run's folder, its folder of checkpoints, or one checkpoint; each may be a URL. Exit codes: 0; 1 where
something is damaged, or differs; 2 where the command cannot be carried out.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from training.checkpoint import folders, storage
from training.checkpoint.folders import Broken, Saved
from training.checkpoint.remote import Folder, folder_at
from training.checkpoint.retention import Policy
from training.compose import refusing
from training.folder import RunFolder, as_typed
from training.refusal import Problem, Refusal

SAME, DIFFERENT = 0, 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *paths: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        for path in paths:
            one.add_argument(path, type=folder_at)
        one.add_argument("--json", action="store_true", help="print JSON")
        return one

    command("list", "each checkpoint with its step, size, kind and scores", "path")
    command("verify", "reads every file and compares its size and checksum with the manifest", "path")
    diff = command("diff", "what two checkpoints differ in: config, names and values of tensors", "one", "other")
    diff.add_argument("--top", type=int, default=10, help="so many tensors with the largest differences (10)")
    command("copy", "copies a checkpoint (of several the newest) to a folder of checkpoints", "path", "target")
    prune = command("prune", "deletes what the run itself would; only says what, without --yes", "path")
    prune.add_argument("--keep", type=int, help="newest that stay; else the run's checkpoint.keep")
    prune.add_argument("--keep-best", help="score by which the best stays; else the run's checkpoint.keep_best")
    prune.add_argument("--best-is", choices=["lowest", "highest"], help="else the run's checkpoint.best_is")
    prune.add_argument("--yes", action="store_true", help="delete")
    return parser.parse_args(argv)


# ---- what a path stands for


def found_in(path: Folder) -> list[Folder]:
    """Folders of checkpoints, whole or not, oldest first. Raises Refusal where there are none."""
    if not path.is_dir():
        raise Refusal([Problem("path", path, "there is no such folder", "a run's folder, or a checkpoint's")])
    if folders.is_checkpoint(path):
        return [path]
    found = [folder for _, folder in folders.steps_in(folders.checkpoints_of(path))]
    if not found:
        raise Refusal([Problem("path", path, "has no checkpoints", "a run's folder, or a checkpoint's")])
    return found


def newest_in(path: Folder) -> Saved:
    """Raises Refusal where none is whole."""
    found = folders.find(str(path))
    if isinstance(found, Problem):
        raise Refusal([Problem("path", path, found.reason, "a run's folder, or a whole checkpoint's")])
    return found


# ---- the commands: each returns its exit code


def list_them(words: argparse.Namespace) -> int:
    lines: list[dict[str, Any]] = []
    for folder in found_in(words.path):
        try:
            saved = folders.read(folder)
        except Broken as why:
            lines.append({"checkpoint": folder.name, "whole": False, "reason": str(why)})
            continue
        scores = (folders.read_scores(folder) or {}).get("scores", [])
        lines.append(
            {
                "checkpoint": folder.name,
                "whole": True,
                "step": saved.step,
                "bytes": sum(file.size for file in saved.files.values()),
                "kind": saved.info.get("kind"),
                "permanent": saved.permanent,
                "tokens": saved.info.get("tokens"),
                "scores": {f"{line['task']}.{line['metric']}": line["value"] for line in scores},
            }
        )
    tell(words, lines, table([_listed(line) for line in lines]))
    return SAME


def _listed(line: dict[str, Any]) -> dict[str, str]:
    if not line["whole"]:
        return {"checkpoint": line["checkpoint"], "kind": f"not whole: {line['reason']}"}
    return {
        "checkpoint": line["checkpoint"],
        "size": in_bytes(line["bytes"]),
        "tokens": "" if line["tokens"] is None else f"{line['tokens']:,}",
        "kind": f"{line['kind'] or ''}{', permanent' if line['permanent'] else ''}",
        "scores": "  ".join(f"{name} {value:.4f}" for name, value in line["scores"].items()),
    }


def verify(words: argparse.Namespace) -> int:
    lines: list[dict[str, Any]] = []
    for folder in found_in(words.path):
        try:
            saved = folders.read(folder)
            faults = storage.faults(folder, saved.files)
            hashed = all(file.xxh128 is not None for file in saved.files.values())
        except Broken as why:
            faults, hashed = [str(why)], True
        lines.append({"checkpoint": folder.name, "intact": not faults, "faults": faults, "checksums": hashed})
    rows = [
        {
            "checkpoint": line["checkpoint"],
            "": "; ".join(line["faults"])
            or ("intact" if line["checksums"] else "sizes are right; saved without checksums"),
        }
        for line in lines
    ]
    tell(words, lines, table(rows))
    return SAME if all(line["intact"] for line in lines) else DIFFERENT


def diff(words: argparse.Namespace) -> int:
    from training.checkpoint import tensors  # takes seconds

    one, other = newest_in(words.one), newest_in(words.other)
    configs = [saved.info.get("config", {}) for saved in (one, other)]
    keys = [key for key in configs[0] | configs[1] if configs[0].get(key) != configs[1].get(key)]
    stored = [tensors.describe(saved.folder) for saved in (one, other)]
    both = [name for name in stored[0] if name in stored[1]]
    alike = [name for name in both if stored[0][name].shape == stored[1][name].shape]
    values: list[dict[str, Any]] = []
    try:
        for name, a, b in tensors.pairs(one.folder, other.folder, alike):
            largest, relative = difference(a, b)
            values += [{"tensor": name, "largest": largest, "relative": relative}] if relative != 0 else []
    except tensors.TensorsFailed as failure:
        raise Refusal(
            [Problem("diff", failure.file, failure.reason, "`verify`, which says what is damaged")]
        ) from failure
    values.sort(key=lambda line: -line["relative"])
    found = {
        "one": str(one.folder),
        "other": str(other.folder),
        "config": {key: [config.get(key) for config in configs] for key in keys},
        "only_in_one": [name for name in stored[0] if name not in stored[1]],
        "only_in_other": [name for name in stored[1] if name not in stored[0]],
        "shapes": {name: [list(s[name].shape) for s in stored] for name in both if name not in alike},
        "dtypes": {
            name: [str(s[name].dtype) for s in stored]
            for name in both
            if stored[0][name].dtype != stored[1][name].dtype
        },
        "same": len(alike) - len(values),
        "different": len(values),
        "values": values[: words.top],
    }
    tell(words, found, "\n".join(_told(found)))
    parts = ("config", "only_in_one", "only_in_other", "shapes", "dtypes", "different")
    return DIFFERENT if any(found[part] for part in parts) else SAME


def difference(a: Any, b: Any) -> tuple[float, float]:
    """Largest difference of two values, and the norm of the difference as a share of the first one's; infinite where
    one is not finite and the other not the same."""
    import torch

    if torch.equal(a, b):
        return 0.0, 0.0
    wide = [tensor.to(torch.float64) for tensor in (a, b)]
    apart = torch.where((wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan()), 0.0, wide[0] - wide[1])
    norm = float(torch.linalg.vector_norm(apart))
    if norm != norm:  # not finite on one side
        return float("inf"), float("inf")
    return float(apart.abs().max()), norm / max(float(torch.linalg.vector_norm(wide[0].nan_to_num())), 1e-300)


def _told(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['one']}\n{found['other']}"
    for key, (before, after) in found["config"].items():
        yield f"config  {key}: {as_typed(before)} -> {as_typed(after)}"
    for part, where in (("only_in_one", "first"), ("only_in_other", "second")):
        for name in found[part]:
            yield f"only in the {where}  {name}"
    for part in ("shapes", "dtypes"):
        for name, (before, after) in found[part].items():
            yield f"{part}  {name}: {before} -> {after}"
    yield f"tensors  {found['same']} the same, {found['different']} with other values"
    if found["values"]:
        rows = [
            {
                "tensor": line["tensor"],
                "largest": f"{line['largest']:.3g}",
                "relative": f"{line['relative']:.3g}",
            }
            for line in found["values"]
        ]
        yield table(rows)


def copy(words: argparse.Namespace) -> int:
    saved = newest_in(words.path)
    target = folders.folder_of(folders.checkpoints_of(words.target), saved.step)
    if target.exists():
        raise Refusal([Problem("target", target, "is there already", "another folder, or delete it")])
    try:
        copied = folders.copy(saved, target.parent)
    except Broken as why:
        folders.remove(target)
        print(f"{saved.folder} is damaged, and was not copied: {why}", file=sys.stderr)
        return DIFFERENT
    size = sum(file.size for file in copied.files.values())
    tell(words, {"copied": str(copied.folder), "bytes": size}, f"{copied.folder}: {in_bytes(size)}, verified")
    return SAME


def prune(words: argparse.Namespace) -> int:
    from training.checkpoint.store import unwanted_folders  # takes seconds

    checkpoints = folders.checkpoints_of(words.path)
    if folders.is_checkpoint(words.path):
        raise Refusal([Problem("path", words.path, "is one checkpoint", "a run's folder")])
    found_in(words.path)
    with held(checkpoints) if words.yes else nothing():
        saved = newest_in(words.path)
        config = saved.info.get("config", {})
        keep = config.get("checkpoint.keep", 3) if words.keep is None else words.keep
        if keep < 0:
            raise Refusal([Problem("--keep", keep, "must not be negative", "--keep 0")])
        best_of = words.keep_best or config.get("checkpoint.keep_best")
        highest = (words.best_is or config.get("checkpoint.best_is")) == "highest"
        _, gone = unwanted_folders(checkpoints, Policy(keep, best_of, highest))
        if gone and words.yes and (faults := storage.faults(saved.folder, saved.files)):
            print(f"nothing is deleted: {saved.folder} is damaged: {'; '.join(faults)}", file=sys.stderr)
            return DIFFERENT
        for folder in gone if words.yes else []:
            folders.remove(folder)
    said = "deleted" if words.yes else "would be deleted; --yes deletes"
    text = "\n".join(f"{folder}  {said}" for folder in gone) or "nothing to delete"
    tell(words, {"deleted" if words.yes else "would_delete": [str(folder) for folder in gone]}, text)
    return SAME


@contextmanager
def held(checkpoints: Folder) -> Iterator[None]:
    """Keeps a run from saving there meanwhile. Raises Refusal where one does."""
    run = RunFolder("", "", str(checkpoints))
    if problems := run.hold_checkpoints():
        raise Refusal([Problem("path", checkpoints, problems[0].reason, "wait for that run, or stop it")])
    try:
        yield
    finally:
        run.release()


@contextmanager
def nothing() -> Iterator[None]:
    yield


# ---- how it is said


def tell(words: argparse.Namespace, found: Any, text: str) -> None:
    print(json.dumps(found, indent=1) if words.json else text)


def table(rows: list[dict[str, str]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns] + [[row.get(column, "") for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def in_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


COMMANDS = {"list": list_them, "verify": verify, "diff": diff, "copy": copy, "prune": prune}


def main(argv: list[str] | None = None) -> int:
    words = parse(argv)
    with refusing():
        try:
            return COMMANDS[words.command](words)
        except OSError as error:
            why = error.strerror or str(error)
            raise Refusal([Problem(words.command, error.filename or "", why, "a folder that can be used")]) from error


if __name__ == "__main__":
    sys.exit(main())

"""The table of largest differences at the end of a test run."""

from dataclasses import asdict
from typing import Any

from tests.parity.cases import Case
from tests.parity.compare import Differences

COLUMNS = ("loss", "norm", "gradient", "weights*", "eval loss")


def entry(case: Case, found: Differences) -> tuple[str, dict[str, float]]:
    """The line's name and the numbers, as plain values: tests run in other processes than the one that shows them."""
    return f"{case.training.precision} {case.layout}", asdict(found)


def lines(entries: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """One line a dtype and layout, of what promise 1 bounds."""
    rows: dict[str, list[Differences]] = {}
    for name, found in entries:
        rows.setdefault(name, []).append(Differences(**found))
    title = "largest difference to the plain loop"
    width = max(map(len, [*rows, title]))
    text = [f"{title:<{width}} cases   init " + " ".join(f"{name:>9}" for name in COLUMNS)]
    for name, all_found in rows.items():
        worst = Differences.worst(all_found)
        numbers = (worst.loss, worst.norm, worst.gradient, worst.parameters, worst.token_losses)
        same = "equal" if worst.initial and worst.copies else "DIFFER"
        text.append(f"{name:<{width}} {len(all_found):>5} {same:>6} " + " ".join(f"{n:>9.1e}" for n in numbers))
    return [*text, "* in units of the tolerance: 1 is the most that promise 1 allows (with SGD only in float32)"]

"""The table of largest differences at the end of a test run."""

import pytest

from tests.parity.cases import Case
from tests.parity.compare import Differences

TABLE: pytest.StashKey[list[tuple[Case, Differences]]] = pytest.StashKey()

HEAD = f"{'largest difference to the plain loop':<58}{'cases':>6} {'init':>6} " + " ".join(
    f"{name:>9}" for name in ("loss", "norm", "gradient", "weights*", "eval loss")
)


def lines(entries: list[tuple[Case, Differences]]) -> list[str]:
    """One line a layout and dtype."""
    rows: dict[tuple[str, str], list[Differences]] = {}
    for case, found in entries:
        rows.setdefault((case.training.precision, str(case.layout)), []).append(found)
    text = [HEAD]
    for (precision, layout), all_found in rows.items():
        worst = Differences.worst(all_found)
        numbers = (worst.loss, worst.norm, worst.gradient, worst.parameters, worst.token_losses)
        same = "equal" if worst.initial and worst.copies else "DIFFER"
        text.append(
            f"{f'{precision} {layout}':<58}{len(all_found):>6} {same:>6} " + " ".join(f"{n:>9.1e}" for n in numbers)
        )
    return [
        *text,
        "* in units of the tolerance: 1 is the most that promise 1 allows (float32 with Adam promises nothing here)",
    ]

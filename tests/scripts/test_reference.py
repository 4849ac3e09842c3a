"""The configuration reference is what the schemas say."""

from scripts.reference import PAGE, main, reference
from training.keys import keys


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run python -m scripts.reference"
    assert main(["--check"]) == 0


def test_every_key_is_on_it_with_its_document() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) == len(keys())
    for key, row in zip(keys().values(), rows, strict=True):
        assert row.startswith(f"| `{key.name}` |")
        assert key.doc.replace("|", "\\|") in row

"""Records for the tests of this folder."""

from training.metrics.records import Record


def step_record(step: int, **others: object) -> Record:
    values: Record = {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.25,
        "lr": 9.8e-4,
        "tokens": step * 8192,
        "tokens_per_second": 41213.2,
        "tokens_per_second_per_device": 20606.6,
        "step_seconds": 0.2,
        "data_wait_share": 0.01,
        "mfu": None,
        "memory_bytes": 2**30,
        "skipped_steps": 0,
        "recompiles": 0,
    }
    return values | others


def score_records(step: int, loss: float = 1.5) -> list[Record]:
    return [
        {"step": step, "task": "heldout", "metric": "loss", "value": loss, "stderr": 0.01, "n": 9, "items_hash": "a"},
        {
            "step": step,
            "task": "heldout",
            "metric": "perplexity",
            "value": 4.5,
            "stderr": None,
            "n": 9,
            "items_hash": "a",
        },
        {
            "step": step,
            "task": "continuation",
            "metric": "accuracy",
            "value": 0.5,
            "stderr": 0.06,
            "n": 64,
            "items_hash": "b",
        },
    ]

"""Legal values near a given one, and numbers in words, for what is suggested instead. No torch here."""

import math


def around(value: int, step: int) -> list[int]:
    """The multiples of `step` nearest to a value, below and above; 0 is none."""
    return [multiple for multiple in sorted({value // step * step, -(-value // step) * step}) if multiple >= 1]


def divisors_around(number: int, value: int) -> list[int]:
    """The divisors of a number nearest to a value, below and above."""
    divisors = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors += [number // d for d in divisors]
    below, above = [d for d in divisors if d <= value], [d for d in divisors if d >= value]
    return sorted({*([max(below)] if below else []), *([min(above)] if above else [])})


def alternatives(name: str, values: list[int]) -> str:
    return " or ".join(f"{name}={value}" for value in values)


def legal_numbers(*values: int | None) -> bool:
    """Whether all are known and at least 1, so that a rule between them can be looked at."""
    return all(value is not None and value >= 1 for value in values)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"

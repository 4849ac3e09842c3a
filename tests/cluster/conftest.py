from tests.runs.drive import runs as runs

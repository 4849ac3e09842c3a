#!/usr/bin/env bash
# Renews the exact versions in pyproject.toml: the newest of every package that fit together, for all platforms and extras.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The block between `constraint-dependencies = [` and its `]` is cut out before resolving, else it would hold every version where it is.
sed '/^constraint-dependencies = \[$/,/^\]$/d' pyproject.toml >"$work/pyproject.toml"
(cd "$work" && uv pip compile --quiet --universal --all-extras --group dev --group store --python-version 3.11 --no-header --no-annotate --no-emit-index-url pyproject.toml >pins)
sed 's/.*/    "&",/' "$work/pins" >"$work/lines"
sed -e "/^constraint-dependencies = \[$/r $work/lines" -e '/^constraint-dependencies = \[$/,/^\]$/{/^constraint/!{/^\]$/!d}}' pyproject.toml >"$work/renewed.toml"
diff pyproject.toml "$work/renewed.toml" && echo "these are the newest" || cp "$work/renewed.toml" pyproject.toml

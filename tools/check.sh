#!/usr/bin/env bash
# Everything that is checked without running the product. Runs all of it, then fails if one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()
export NO_MKDOCS_2_WARNING=1

check() {
    local name=$1
    shift
    printf '==> %s\n' "$name"
    "$@" || failed+=("$name")
}

check "ruff" "$bin/ruff" check --quiet .
check "format" "$bin/ruff" format --check --quiet .
check "types" "$bin/mypy" --no-error-summary vllm_omni tools
check "architecture" "$bin/python" -m tools.architecture
check "code owners" "$bin/python" -m tools.generate_codeowners --check
check "site" "$bin/python" -m mkdocs build --strict --quiet --site-dir site

if [ ${#failed[@]} -gt 0 ]; then
    printf 'check failed: %s\n' "${failed[*]}" >&2
    exit 1
fi

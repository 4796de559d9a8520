#!/usr/bin/env bash
# The tests, layer by layer, cheapest first: what a layer catches, the next need not explain.
# All layers run even when one failed. LAYERS="unit e2e" runs some; further arguments go to pytest.
# The layer dfx breaks a running server and measures how soon it recovers: it wants an idle machine.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()

for layer in ${LAYERS:-unit integration parity e2e}; do
    printf '==> tests: %s\n' "$layer"
    code=0
    .venv/bin/python -m pytest -q -m "not gpu" --layer "$layer" "$@" || code=$?
    # 5: the layer has no test (yet); only the unit layer must have some.
    if [ "$code" -ne 0 ] && { [ "$code" -ne 5 ] || [ "$layer" = unit ]; }; then
        failed+=("$layer")
    fi
done

if [ ${#failed[@]} -gt 0 ]; then
    printf 'tests failed: %s\n' "${failed[*]}" >&2
    exit 1
fi

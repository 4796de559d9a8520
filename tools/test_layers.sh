#!/usr/bin/env bash
# The tests, layer by layer, cheapest first: what a layer catches, the next need not explain.
# All layers run even when one failed. LAYERS="unit e2e" runs some; further arguments go to pytest.
# Starting a process keeps one core busy, so the files of the integration layer run two at a time;
# afterwards, one by one, the tests marked `alone`: they look at the whole machine.
# The layer dfx breaks a running server and measures how soon it recovers: it wants an idle machine.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()

# run LAYER MARKS [ARGUMENT ...]
run() {
    local layer=$1 marks=$2 code=0
    shift 2
    printf '==> tests: %s (%s)\n' "$layer" "$marks"
    .venv/bin/python -m pytest -q -m "$marks" --layer "$layer" "$@" || code=$?
    # 5: the layer has no test (yet); only the unit layer must have some.
    if [ "$code" -ne 0 ] && { [ "$code" -ne 5 ] || [ "$layer" = unit ]; }; then
        failed+=("$layer")
    fi
}

for layer in ${LAYERS:-unit integration parity e2e}; do
    if [ "$layer" = integration ]; then
        run "$layer" "not gpu and not alone" --numprocesses 2 --dist loadfile "$@"
        run "$layer" "not gpu and alone" "$@"
    else
        run "$layer" "not gpu" "$@"
    fi
done

if [ ${#failed[@]} -gt 0 ]; then
    printf 'tests failed: %s\n' "${failed[*]}" >&2
    exit 1
fi

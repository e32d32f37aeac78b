"""How long recovery takes: the demo, repeated, and the medians of its failures.

In: how often. Out: per kind of failure the median and the range of the seconds from the signal to the next committed
step on all ranks, and the median of each phase; one JSON object at the end. Exit code 1 if any run was not identical.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
LIMIT_S = 600.0


def one_run() -> dict[str, Any]:
    """The demo's JSON object. Raises subprocess.TimeoutExpired."""
    ended = subprocess.run([sys.executable, str(DEMO), "--json"], capture_output=True, text=True, timeout=LIMIT_S)
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def medians(failures: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [failure["seconds"] for failure in failures]
    names = list(dict.fromkeys(name for failure in failures for name in failure["phases"]))
    return {
        "runs": len(failures),
        "source": sorted({failure["source"] for failure in failures}),
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "steps_lost": max(failure["steps_lost"] for failure in failures),
        "phases": {name: statistics.median(failure["phases"].get(name, 0.0) for failure in failures) for name in names},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    runs = []
    for number in range(1, args.runs + 1):
        runs.append(one_run())
        print(f"run {number}: identical: {'yes' if runs[-1]['identical'] else 'no'}", flush=True)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for failure in run["failures"]:
            if failure["seconds"] is not None:
                by_kind.setdefault(failure["kind"], []).append(failure)
    result = {kind: medians(failures) for kind, failures in by_kind.items()}
    for kind, found in result.items():
        low, high = found["seconds_range"]
        print(f"{kind}: {found['seconds']:.2f} s ({low:.2f} to {high:.2f}), {found['steps_lost']} steps lost")
    print(json.dumps(result))
    return 0 if all(run["identical"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())

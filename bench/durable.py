"""What a checkpoint on disk costs training, and how soon it is there: ours beside dcp.save, dcp.async_save, torch.save.

In: sizes of the state, how often, a folder on the storage to measure. Out, per size, for DDP and for FSDP2 on two nodes
of one rank, everything in one run and in turns: seconds that training stands still for one save (of ours: what the
steps with a save take longer than the others; also in seconds of the processor, which other work on the machine
distorts less), seconds until it is on disk while training goes on, GB/s of reading it back. The last line is one JSON
object. Exit code 1 when a run failed.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Before this folder, which has a `rendezvous`, too.
sys.path[:0] = [str(HERE / "programs"), str(HERE.parent), str(HERE.parent / "examples")]

from cluster import Cluster  # noqa: E402

FORMS = ("ddp", "fsdp2")
BYTES_PER_PARAMETER = 12  # float32: the parameter and Adam's two averages
LIMIT_S = 1800.0
KEYS = (
    "stall_s",
    "stall_cpu_s",
    "dcp_save_s",
    "dcp_async_thread_s",
    "dcp_async_process_s",
    "torch_save_s",
    "durable_s",
    "dcp_async_durable_s",
    "load_gbps",
)


def measure(form: str, num_bytes: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Raises RuntimeError with the ends of the logs."""
    result = folder / "result.json"
    script = [str(HERE / "programs" / "durable_rank.py"), form, str(num_bytes // BYTES_PER_PARAMETER), str(args.rounds)]
    environ = {"OMP_NUM_THREADS": "1"}
    arguments = [*script, str(result), str(folder / "scratch")]
    with Cluster(folder / "run", arguments, num_training=2, num_spares=0, num_workers=1, environ=environ) as cluster:
        deadline = time.monotonic() + LIMIT_S
        while cluster.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        if set(cluster.exit_codes().values()) != {0}:
            raise RuntimeError(f"{form}, {num_bytes / 1e6:.0f} MB: {cluster.exit_codes()}\n{cluster.log_tails()}")
    found: dict[str, Any] = json.loads(result.read_text())
    return {"form": form, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one small size, two saves of each kind")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", help="of state, all ranks together (24 and 96; 8 with --quick)"
    )
    parser.add_argument("--rounds", type=int, help="saves of each kind (4; 2 with --quick)")
    parser.add_argument("--folder", type=Path, help="on the storage to measure (default: a temporary folder)")
    args = parser.parse_args()
    args.megabytes = args.megabytes or ([8] if args.quick else [24, 96])
    args.rounds = args.rounds or (2 if args.quick else 4)
    root = Path(tempfile.mkdtemp(prefix="p2pstate-durable-", dir=args.folder))
    results: list[dict[str, Any]] = []
    try:
        for form in FORMS:
            for megabytes in args.megabytes:
                found = measure(form, megabytes * 10**6, args, root / f"{form}-{megabytes}")
                results.append(found)
                print(f"{form}, {found['state_bytes'] / 1e6:.0f} MB, medians of {args.rounds}:", flush=True)
                for key in KEYS:
                    value = found[key]
                    print(f"  {key:22} {'not measured' if value is None else f'{value:.4f}'}", flush=True)
    except RuntimeError as error:
        print(f"bench/durable.py: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps({"sizes": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

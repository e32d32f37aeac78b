"""torchrun as it is, but its workers are forked from a server that has torch imported already.

In: torchrun's arguments, a script and its arguments. Out: what torchrun does, without the seconds of imports that every
restart of a worker costs.
"""

import multiprocessing
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.optim", "numpy"]


def run_script(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))  # as python does for a script, which knows what to do with it
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    config, _, _ = config_from_args(args)
    config.start_method = "forkserver"
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(PRELOADED)
    elastic_launch(config, run_script)(args.training_script, *args.training_script_args)

"""Starts p2prun on nodes that Ray provides: `python ray_nodes.py --nodes 2 --spares 1 -- train.py ARGUMENTS`.

One Ray actor per node runs the command of that node, and runs it again where p2prun's exit code says so; an actor whose
host is lost is started by Ray on another one, where it joins as a new node. Ray gives machines and replaces them;
p2pstate keeps the state and goes on meanwhile. Needs ray (pip install ray) on a cluster, or alone to try it: a node
takes one of Ray's CPUs, `ray start --head --num-cpus 4` and RAY_ADDRESS=auto give a small machine enough of them.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence

import ray

AGAIN = (75, -9)  # "retry on this node", and p2prun itself was killed
PLACE_S = 600.0
SAY_AFTER_S = 10.0


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Node:
    """One node of the run. ``key``: the run's secret."""

    def __init__(self, key: str) -> None:
        self._environ = {**os.environ, "P2PSTATE_KEY": key}
        with socket.create_server(("", 0)) as free:
            self._address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def address(self) -> str:
        return self._address

    def run(self, contacts: Sequence[str], options: Sequence[str], script: Sequence[str]) -> int:
        """Until the run has ended: p2prun's exit code. Ray calls it again where it starts the actor anew."""
        name = f"{socket.gethostname()}-{self._address.rpartition(':')[2]}"
        where = ["--bind", self._address, "--name", name, "--contacts", ",".join([*contacts, self._address])]
        command = [sys.executable, "-c", "import sys; from p2pstate.cli import p2prun; sys.exit(p2prun())"]
        while (code := subprocess.call([*command, *options, *where, *script], env=self._environ)) in AGAIN:
            print(f"p2prun ended with {code}: it is started again", flush=True)
        return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes per node")
    parser.add_argument("--gpus", type=float, default=0, help="per node, as Ray counts them")
    parser.add_argument("script", nargs="+", help="the training script and its arguments, behind --")
    args = parser.parse_args()

    ray.init()
    count = args.nodes + args.spares
    bundle = {"CPU": 1.0, "GPU": args.gpus} if args.gpus else {"CPU": 1.0}
    group = ray.util.placement_group([bundle] * count, strategy="SPREAD")  # copies are worth most on other hosts
    if not group.wait(SAY_AFTER_S):
        print(f"waiting for {count} times {bundle}; Ray has {ray.cluster_resources()}", flush=True)
    ray.get(group.ready(), timeout=PLACE_S)
    placed = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    key = secrets.token_hex(32)
    nodes = [Node.options(num_cpus=1, num_gpus=args.gpus, scheduling_strategy=placed).remote(key) for _ in range(count)]
    contacts = ray.get([node.address.remote() for node in nodes])
    options = ["--nnodes", str(args.nodes), "--spares", str(args.spares), "--nproc-per-node", str(args.workers)]
    options += ["--run-id", f"ray-{secrets.token_hex(4)}"]
    codes = ray.get([node.run.remote(contacts, options, args.script) for node in nodes])
    print(f"p2prun ended on all nodes: {codes}")
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

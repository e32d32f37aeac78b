"""``p2pstate-operator``: watches Runs and their pods, and has a Worker look at those that change.

In: command-line options, the cluster's API server. Out: exit code 0 after SIGTERM, 78 without the extra or a cluster.

Invariants: kopf only watches and serves the liveness endpoint; nothing is kept in this process, and no finalizer is
set: an operator that is away keeps nobody from deleting a Run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from p2pstate.errors import EXIT_CONFIG
from p2pstate.operator.cluster import Cluster, kubernetes_send
from p2pstate.operator.objects import API_VERSION, PLURAL, RUN_LABEL
from p2pstate.operator.reconcile import fetch_page, reconcile, runs_path
from p2pstate.operator.worker import Key, Worker
from p2pstate.options import HelpFormatter

__all__ = ["main"]

CLOSE_S = 15.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="p2pstate-operator",
        description="Keep the pods of Run resources at their number, replace and restart what has to be, and write "
        "their status (docs/kubernetes.md). Runs recover without it.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--namespace", metavar="NAME", help="look at this namespace only; all by default")
    parser.add_argument("--liveness", metavar="URL", help="answer probes here, such as http://0.0.0.0:8080/healthz")
    parser.add_argument("--verbose", action="store_true", help="log what kopf does")
    options = parser.parse_args(argv)
    try:
        import kopf
        from kubernetes.config import ConfigException
    except ImportError as error:
        print(f"p2pstate-operator: {error}: install the extra: pip install 'p2pstate[operator]'", file=sys.stderr)
        return EXIT_CONFIG
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if not options.verbose:
        logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        cluster = Cluster(kubernetes_send())
    except ConfigException as error:
        print(f"p2pstate-operator: no cluster: {error}", file=sys.stderr)
        return EXIT_CONFIG
    kopf.run(
        registry=_registry(kopf, _worker(cluster, options.namespace)),
        standalone=True,
        clusterwide=options.namespace is None,
        namespaces=[] if options.namespace is None else [options.namespace],
        liveness_endpoint=options.liveness,
    )
    return 0


def _worker(cluster: Cluster, namespace: str | None) -> Worker:
    def look(key: Key) -> None:
        reconcile(cluster, *key, float(int(time.time())), fetch_page)

    def names() -> list[Key]:
        runs = cluster.list(runs_path(namespace))
        return [(run["metadata"]["namespace"], run["metadata"]["name"]) for run in runs]

    return Worker(look, names)


def _registry(kopf: Any, worker: Worker) -> Any:
    """What kopf watches."""
    registry = kopf.OperatorRegistry()

    def login(**known: Any) -> Any:
        return kopf.login_with_service_account(**known) or kopf.login_with_kubeconfig(**known)

    def start(settings: Any, **_: Any) -> None:
        settings.posting.enabled = False
        worker.start()

    def run_happened(namespace: str, name: str, **_: Any) -> None:
        worker.happened((namespace, name))

    def pod_happened(namespace: str, labels: Any, **_: Any) -> None:
        worker.happened((namespace, labels[RUN_LABEL]))

    def close(**_: Any) -> None:
        worker.close(CLOSE_S)

    kopf.on.login(registry=registry)(login)
    kopf.on.startup(registry=registry)(start)
    kopf.on.cleanup(registry=registry)(close)
    kopf.on.event(API_VERSION, PLURAL, registry=registry)(run_happened)
    kopf.on.event("v1", "pods", labels={RUN_LABEL: kopf.PRESENT}, registry=registry)(pod_happened)
    return registry


if __name__ == "__main__":
    sys.exit(main())

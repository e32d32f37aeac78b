"""One look at a Run: read it and what belongs to it, decide, write down, act.

In: Cluster, a Run's name, a function that asks a node for the run's page. Out: objects made, changed and deleted.

Invariants: the decision is written before it is acted upon, on condition that the Run is still as it was read. Every
action can be repeated, so a crash anywhere leads to the same end. An action that fails does not keep the others back.
"""

from __future__ import annotations

import json
import logging
import random
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from p2pstate.operator.cluster import CONFLICT, ApiError, Cluster, Conflict
from p2pstate.operator.decide import decide
from p2pstate.operator.objects import (
    GROUP,
    PAGE_PORT,
    PLURAL,
    RUN_LABEL,
    VERSION,
    gone_map,
    gone_name,
    pod_manifest,
    service,
)
from p2pstate.operator.reading import (
    CORDON_ANNOTATION,
    TAINT_KEY,
    merge_patch,
    read_host,
    read_page,
    read_pod,
    read_record,
    read_spec,
    status_of,
)
from p2pstate.operator.types import (
    Action,
    Attempt,
    CreatePod,
    DeletePod,
    Host,
    Observed,
    Phase,
    Quarantine,
    QuarantineWay,
    Record,
    Spec,
    WriteGone,
)

__all__ = ["FetchPage", "fetch_page", "reconcile", "runs_path"]

FetchPage = Callable[[Sequence[str]], Mapping[str, Any] | None]  # addresses of nodes -> the page that one of them gives

PAGE_S = 2.0
MAX_ASKED = 3
MAX_PAGE_BYTES = 16 * 2**20
MAX_PASSES = 4
LOG = logging.getLogger("p2pstate.operator")


def runs_path(namespace: str | None = None, name: str | None = None) -> str:
    """Of one Run, of those in a namespace, or of all."""
    path = f"/apis/{GROUP}/{VERSION}"
    path += f"/namespaces/{namespace}/{PLURAL}" if namespace is not None else f"/{PLURAL}"
    return path if name is None else f"{path}/{name}"


def reconcile(cluster: Cluster, namespace: str, name: str, now_s: float, fetch: FetchPage) -> None:
    """Bring the cluster to what the Run asks for, as far as is possible now. Raises ApiError; call it again then."""
    for _ in range(MAX_PASSES):
        try:
            if not _pass(cluster, namespace, name, now_s, fetch):
                return
        except Conflict:
            continue


def _pass(cluster: Cluster, namespace: str, name: str, now_s: float, fetch: FetchPage) -> bool:
    """True: something was decided that may lead to more."""
    run = cluster.get(runs_path(namespace, name))
    if run is None or run["metadata"].get("deletionTimestamp"):
        return False  # what belongs to it is deleted with it
    spec, record = read_spec(run), read_record(run)
    seen = _look(cluster, spec, record, now_s, fetch)
    decision = decide(spec, record, seen)
    before = run.get("status") or {}
    status = status_of(spec, decision.record, seen, before)
    if changed := merge_patch(before, status):
        version = {"resourceVersion": run["metadata"]["resourceVersion"]}
        if not cluster.patch(f"{runs_path(namespace, name)}/status", {"metadata": version, "status": changed}):
            return False  # deleted meanwhile
    errors = []
    if decision.record.attempt is not None and not decision.record.phase.final:
        try:
            _ensure_service(cluster, spec)
        except ApiError as error:
            errors.append(error)
    if (decision.record.phase, decision.record.message) != (record.phase, record.message):
        LOG.info("Run %s/%s: %s %s", namespace, name, decision.record.phase, decision.record.message)
    for action in decision.actions:
        if not isinstance(action, WriteGone):
            LOG.info("Run %s/%s: %s", namespace, name, action)
        try:
            _act(cluster, spec, decision.record, seen, action)
        except Conflict as error:
            errors.append(error)
        except ApiError as error:
            if isinstance(action, Quarantine):  # without the right to mark hosts, pods are looked after all the same
                LOG.warning("Run %s/%s: %s", namespace, name, error)
            else:
                errors.append(error)
    if errors:
        _tell(cluster, spec, decision.record, errors[0])
        raise errors[0]
    return decision.record.attempt != record.attempt


def _tell(cluster: Cluster, spec: Spec, record: Record, error: ApiError) -> None:
    """What cannot be done is in the status until it can: a quota, a policy that refuses the pods. Not in place of a
    message that nobody would write again."""
    if isinstance(error, Conflict) or record.phase not in (Phase.PENDING, Phase.RUNNING, Phase.WAITING):
        return
    try:
        cluster.patch(f"{runs_path(spec.namespace, spec.name)}/status", {"status": {"message": str(error)[:1000]}})
    except ApiError as second:
        LOG.warning("Run %s/%s: %s", spec.namespace, spec.name, second)


def _look(cluster: Cluster, spec: Spec, record: Record, now_s: float, fetch: FetchPage) -> Observed:
    core = f"/api/v1/namespaces/{spec.namespace}"
    pods = [read_pod(pod) for pod in cluster.list(f"{core}/pods", f"{RUN_LABEL}={spec.name}") if _owned(pod, spec)]
    told = cluster.get(f"{core}/configmaps/{gone_name(spec)}")
    told = told if told is not None and _owned(told, spec) else None
    attempt = record.attempt.number if record.attempt is not None else 0
    addresses = [pod.address for pod in pods if pod.address and pod.joined and not pod.ended and pod.attempt == attempt]
    page = fetch(addresses) if addresses else None
    return Observed(
        now_s=now_s,
        pods=tuple(pods),
        hosts=_look_at_hosts(cluster, spec, record),
        gone={name: int(at_us) for name, at_us in ((told or {}).get("data") or {}).items()},
        page=None if page is None else read_page(page),
    )


def _look_at_hosts(cluster: Cluster, spec: Spec, record: Record) -> tuple[Host, ...]:
    """Those that failed. Pods are looked after also where hosts cannot be read: such a host counts as it did before."""
    if spec.quarantine.way is QuarantineWay.NONE:
        return ()
    named = {failure.host for failure in record.failures} | {each.host for each in record.quarantined}
    found = []
    for host in sorted(named - {""}):
        try:
            node = cluster.get(f"/api/v1/nodes/{host}")
        except ApiError as error:
            LOG.warning("Run %s/%s: host %s: %s", spec.namespace, spec.name, host, error)
            found.append(Host(host, any(each.host == host and each.applied for each in record.quarantined)))
        else:
            found += [read_host(node)] if node is not None else []
    return tuple(found)


def _owned(found: Mapping[str, Any], spec: Spec) -> bool:
    """Not of a Run that had the same name before, and not somebody else's."""
    return any(owner["uid"] == spec.uid for owner in found["metadata"].get("ownerReferences", ()))


def _is_there(cluster: Cluster, spec: Spec, path: str) -> bool:
    """Whether there is this object of the Run. Raises ApiError if there is one that is not the Run's."""
    found = cluster.get(path)
    if found is not None and not _owned(found, spec):
        raise ApiError(
            CONFLICT,
            f"{path} does not belong to this Run, which needs one of that name: give the Run another name, or delete "
            "it (one of a deleted Run of the same name goes by itself)",
        )
    return found is not None


def _ensure_service(cluster: Cluster, spec: Spec) -> None:
    path = f"/api/v1/namespaces/{spec.namespace}/services"
    if not _is_there(cluster, spec, f"{path}/{spec.name}"):
        cluster.create(path, service(spec))


def _act(cluster: Cluster, spec: Spec, record: Record, seen: Observed, action: Action) -> None:
    core = f"/api/v1/namespaces/{spec.namespace}"
    match action:
        case CreatePod(attempt, number):
            assert record.attempt is not None
            assert record.attempt.number == attempt
            _create_pod(cluster, spec, record.attempt, number)
        case DeletePod(name, uid):
            cluster.delete(f"{core}/pods/{name}", uid)
        case WriteGone(entries):
            _write_gone(cluster, spec, seen, entries)
        case Quarantine(host, way):
            _quarantine(cluster, spec, host, way)


def _create_pod(cluster: Cluster, spec: Spec, attempt: Attempt, number: int) -> None:
    cluster.create(f"/api/v1/namespaces/{spec.namespace}/pods", pod_manifest(spec, attempt, number))


def _write_gone(cluster: Cluster, spec: Spec, seen: Observed, entries: Mapping[str, int]) -> None:
    core = f"/api/v1/namespaces/{spec.namespace}"
    manifest = gone_map(spec, entries)
    dropped = {name: None for name in seen.gone if name not in entries}
    path = f"{core}/configmaps/{gone_name(spec)}"
    if _is_there(cluster, spec, path):
        cluster.patch(path, {"data": {**dropped, **manifest["data"]}})
    else:
        cluster.create(f"{core}/configmaps", manifest)
    # A changed annotation makes the host bring the pod's files up to date now, not in a minute.
    note = {"metadata": {"annotations": {f"{GROUP}/gone": str(max(entries.values(), default=0))}}}
    for pod in seen.pods:
        if not pod.ended and not pod.leaving:
            cluster.patch(f"{core}/pods/{pod.name}", note)


def _quarantine(cluster: Cluster, spec: Spec, host: str, way: QuarantineWay) -> None:
    node = cluster.get(f"/api/v1/nodes/{host}")
    if node is None or read_host(node).quarantined:
        return
    version = {"resourceVersion": node["metadata"]["resourceVersion"]}
    if way is QuarantineWay.CORDON:
        note = {CORDON_ANNOTATION: f"{spec.namespace}/{spec.name}"}
        patch = {"metadata": {**version, "annotations": note}, "spec": {"unschedulable": True}}
    else:
        taint = {"key": TAINT_KEY, "value": spec.name, "effect": "NoSchedule"}
        patch = {"metadata": version, "spec": {"taints": [*node.get("spec", {}).get("taints", ()), taint]}}
    cluster.patch(f"/api/v1/nodes/{host}", patch)


def fetch_page(addresses: Sequence[str]) -> Mapping[str, Any] | None:
    """Ask a few nodes, one after the other, until one answers."""
    for address in random.sample(list(addresses), min(MAX_ASKED, len(addresses))):
        host = f"[{address}]" if ":" in address else address
        try:
            with urllib.request.urlopen(f"http://{host}:{PAGE_PORT}/status.json", timeout=PAGE_S) as answer:
                page = json.loads(answer.read(MAX_PAGE_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(page, dict):
            return page
    return None

"""Pure: the Kubernetes objects of a Run.

In: Spec, what was decided. Out: manifests as plain tables: a headless Service (the contacts), a ConfigMap (which pods
are gone), pods. All belong to the Run, so deleting it deletes them.

Invariants: a pod like those of examples/kubernetes/job: no privileges, one per host, zones as even as they can be; a
test validates both against the official models. What the user gives in ``pod`` and ``container`` is laid over it:
tables are merged, lists of named things are extended (what stands for one of ours is merged with it), anything else is
replaced. Two things that the user gives stay two.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from p2pstate.operator.decide import pod_name
from p2pstate.operator.types import Attempt, Spec

__all__ = [
    "API_VERSION",
    "ATTEMPT_LABEL",
    "CONTAINER",
    "GROUP",
    "NUMBER_LABEL",
    "PAGE_PORT",
    "PLURAL",
    "RUN_LABEL",
    "VERSION",
    "gone_map",
    "gone_name",
    "pod_manifest",
    "service",
]

GROUP, VERSION, PLURAL = "p2pstate.dev", "v1alpha1", "runs"
API_VERSION = f"{GROUP}/{VERSION}"
RUN_LABEL, ATTEMPT_LABEL, NUMBER_LABEL = f"{GROUP}/run", f"{GROUP}/attempt", f"{GROUP}/number"
CONTAINER = "node"
AGENT_PORT, PAGE_PORT = 7000, 8600
KEY_FOLDER, GONE_FOLDER, HEALTH_FILE = "/run/secrets/p2pstate", "/run/p2pstate/gone", "/tmp/health"
GRACE_S = 120
UNREACHABLE_S = 30
USER_ID = 1000  # of the Dockerfile
# What every entry of a list has -> what tells its entries apart: a volume may be mounted twice, a key tolerated twice.
IDENTITIES = {
    "mountPath": ("mountPath",),
    "name": ("name",),
    "topologyKey": ("topologyKey",),
    "key": ("key", "effect"),
}


def gone_name(spec: Spec) -> str:
    """Of the ConfigMap."""
    return f"{spec.name}-gone"


def service(spec: Spec) -> dict[str, Any]:
    """One name with the addresses of all pods, ready or not."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec, spec.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: spec.name},
            "ports": [{"name": "agent", "port": AGENT_PORT}],
        },
    }


def gone_map(spec: Spec, entries: Mapping[str, int]) -> dict[str, Any]:
    """A file for each pod that certainly runs no more; p2pstate.operator.gone reads it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(spec, gone_name(spec)),
        "data": {name: str(at_us) for name, at_us in entries.items()},
    }


def pod_manifest(spec: Spec, attempt: Attempt, number: int) -> dict[str, Any]:
    """A node of the run: training or spare, as the run decides."""
    name = pod_name(spec, attempt.number, number)
    labels = {ATTEMPT_LABEL: str(attempt.number), NUMBER_LABEL: str(number), "app.kubernetes.io/name": "p2pstate"}
    metadata = _metadata(spec, name)
    metadata["labels"] |= labels
    container = lay_over(_container(spec, attempt, name), {**spec.container, "name": CONTAINER})
    body = lay_over(_pod(spec), spec.pod)
    others = [each for each in body.get("containers", []) if each["name"] != CONTAINER]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**body, "containers": [container, *others], "hostname": name},
    }


def lay_over(below: Any, above: Any) -> Any:
    """``above`` wins; tables are merged, so are entries of lists that carry the same name."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        both = {key: lay_over(below[key], value) if key in below else value for key, value in above.items()}
        return {**below, **both}
    if isinstance(below, list) and isinstance(above, list):
        entries = [*below, *above]
        kind = next((key for key in IDENTITIES if all(isinstance(e, Mapping) and key in e for e in entries)), None)
        if kind is not None:
            ours = {_identity(entry, kind): entry for entry in below}
            theirs = [lay_over(ours.pop(_identity(entry, kind), {}), entry) for entry in above]
            return [*ours.values(), *theirs]
    return above


def _identity(entry: Mapping[str, Any], kind: str) -> tuple[Any, ...]:
    return tuple(entry.get(key) for key in IDENTITIES[kind])


def _metadata(spec: Spec, name: str) -> dict[str, Any]:
    owner = {
        "apiVersion": API_VERSION,
        "kind": "Run",
        "name": spec.name,
        "uid": spec.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": spec.namespace,
        "labels": {RUN_LABEL: spec.name},
        "ownerReferences": [owner],
    }


def _pod(spec: Spec) -> dict[str, Any]:
    selector = {"matchLabels": {RUN_LABEL: spec.name}}
    spread = {"maxSkew": 1, "labelSelector": selector}
    taints = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    return {
        "restartPolicy": "Never",  # a node that ends comes back as another one
        "subdomain": spec.name,
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {**spread, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"},
            {**spread, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": UNREACHABLE_S}
            for key in taints
        ],
        "volumes": [
            {"name": "key", "secret": {"secretName": spec.key_secret, "defaultMode": 0o400}},
            {"name": "gone", "configMap": {"name": gone_name(spec), "optional": True}},
            {"name": "scratch", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(spec: Spec, attempt: Attempt, name: str) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "args": ["sh", "-c", _command(spec, attempt), "p2prun", *spec.script],
        "env": [
            {"name": "POD_NAME", "value": name},
            {
                "name": "ZONE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['topology.kubernetes.io/zone']"}},
            },
            {"name": "HOME", "value": "/tmp"},
        ],
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}, {"name": "page", "containerPort": PAGE_PORT}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": {"exec": {"command": ["test", "-e", HEALTH_FILE]}, "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f'test "$(( $(date +%s) - $(stat -c %Y {HEALTH_FILE}) ))" -lt 30']},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
        },
        # Ready: taken into the run, also while the run waits for another node. The operator relies on it.
        "readinessProbe": {
            "exec": {"command": ["grep", "-Eq", '"state": "(training|spare|waiting)"', HEALTH_FILE]},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True},
            {"name": "gone", "mountPath": GONE_FOLDER, "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def _command(spec: Spec, attempt: Attempt) -> str:
    """Without the script, which follows as the shell's arguments."""
    nodes = str(spec.num_nodes) if spec.min_nodes is None else f"{spec.min_nodes}:{spec.num_nodes}"
    words = ["--nnodes", nodes, "--spares", str(attempt.num_pods - spec.num_nodes)]
    words += ["--nproc-per-node", str(spec.num_workers), "--run-id", f"{spec.uid}-{attempt.number}"]
    words += ["--contacts", f"{spec.name}:{AGENT_PORT}", "--bind", f"0.0.0.0:{AGENT_PORT}"]
    words += ["--key-file", f"{KEY_FOLDER}/run.key", "--health-file", HEALTH_FILE, "--http", f"0.0.0.0:{PAGE_PORT}"]
    words += ["--fence", f"python3 -m p2pstate.operator.gone {GONE_FOLDER}", *spec.options]
    return f'exec p2prun {shlex.join(words)} --name "$POD_NAME" ${{ZONE:+--label "zone=$ZONE"}} "$@"'

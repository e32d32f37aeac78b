"""The operator's objects and manifests: valid by the official models; its pods do what those of the examples do."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_models import check
from test_observe_page import answer

from p2pstate.cli import _parser
from p2pstate.observe.whole import merge
from p2pstate.operator import objects
from p2pstate.operator.decide import pod_name
from p2pstate.operator.reading import merge_patch, read_page, read_pod, read_record, read_spec, status_of
from p2pstate.operator.types import Attempt, Failure, Observed, Phase, Quarantined, Record, Spec

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
SPEC = Spec(
    "default", "train", "u", 1, 2, 1, 8, ("train.py", "--steps", "a b"), "p2pstate-key", container={"image": "i"}
)
ATTEMPT = Attempt(2, 3)


def test_objects_have_only_keys_and_types_of_the_official_models() -> None:
    check(objects.service(SPEC))
    check(objects.gone_map(SPEC, {"train-1-0": 5}))
    check(objects.pod_manifest(SPEC, ATTEMPT, 7))


@pytest.mark.parametrize("name", ["crd.yaml", "operator.yaml", "network-policy.yaml"])
def test_manifests_have_only_keys_and_types_of_the_official_models(name: str) -> None:
    for each in yaml.safe_load_all((FOLDER / "operator" / name).read_text()):
        check(each)


@pytest.mark.parametrize(("key", "value"), [("resartPolicy", "Never"), ("subdomain", 3), ("volumes", [{"nam": "x"}])])
def test_check_refuses_unknown_keys_and_wrong_types(key: str, value: Any) -> None:
    pod = objects.pod_manifest(SPEC, ATTEMPT, 7)
    pod["spec"][key] = value
    with pytest.raises((AssertionError, ValueError)):
        check(pod)


def test_schema_is_structural_and_its_columns_exist() -> None:
    crd = yaml.safe_load((FOLDER / "operator" / "crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    nodes = [("", schema)]
    while nodes:
        where, node = nodes.pop()
        assert "type" in node, f"{where} has no type"  # what the API server demands of a structural schema
        nodes += [(f"{where}.{key}", each) for key, each in node.get("properties", {}).items()]
        nodes += [(f"{where}[]", node["items"])] if "items" in node else []
    for column in version["additionalPrinterColumns"]:
        at = schema
        for part in column["jsonPath"].strip(".").split("."):
            at = (
                at["properties"][part]
                if at is not schema or part != "metadata"
                else {"properties": {"creationTimestamp": {}}}
            )
    assert crd["metadata"]["name"] == f"{objects.PLURAL}.{objects.GROUP}"
    assert version["name"] == objects.VERSION


def command_of(pod: Mapping[str, Any], tmp_path: Path, zone: str) -> list[str]:
    """What the container's shell hands to p2prun."""
    (tmp_path / "p2prun").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    (tmp_path / "p2prun").chmod(0o755)
    (container,) = pod["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    environ = {**given, "ZONE": zone, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(container["args"], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_pod_runs_a_command_that_p2prun_takes(tmp_path: Path) -> None:
    pod = objects.pod_manifest(SPEC, ATTEMPT, 7)
    for zone, labels in (("", []), ("z1", ["zone=z1"])):
        options = _parser().parse_args(command_of(pod, tmp_path, zone))
        assert (options.script, options.args) == ("train.py", ["--steps", "a b"])
        assert (options.nnodes, options.spares, options.nproc_per_node) == ("2", 1, 8)
        assert (options.name, options.run_id, options.label) == ("train-2-7", "u-2", labels)
        assert options.name == pod["metadata"]["name"] == pod_name(SPEC, 2, 7)
    assert shlex.split(options.fence)[:3] == ["python3", "-m", "p2pstate.operator.gone"]
    mounts = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert {shlex.split(options.fence)[3], str(Path(options.key_file).parent)} <= mounts


def test_pod_is_that_of_the_job_example_but_for_what_the_operator_adds() -> None:
    job = yaml.safe_load((FOLDER / "job" / "job.yaml").read_text())["spec"]["template"]["spec"]
    pod = objects.pod_manifest(SPEC, ATTEMPT, 7)["spec"]
    for key in ("restartPolicy", "subdomain", "terminationGracePeriodSeconds", "automountServiceAccountToken",
                "enableServiceLinks", "securityContext", "tolerations"):  # fmt: skip
        assert pod[key] == job[key], key
    assert [volume for volume in pod["volumes"] if volume["name"] != "gone"] == job["volumes"]
    (ours,), (theirs,) = pod["containers"], job["containers"]
    for key in ("securityContext", "startupProbe", "livenessProbe", "readinessProbe"):
        assert ours[key] == theirs[key], key
    (service,) = (yaml.safe_load((FOLDER / "job" / "service.yaml").read_text()),)
    assert {**objects.service(SPEC)["spec"], "selector": 0} == {**service["spec"], "selector": 0}


def test_what_the_user_gives_is_laid_over_the_pod() -> None:
    given = Spec(
        "default", "train", "u", 1, 1, 0, 1, ("train.py",), "k",
        pod={
            "nodeSelector": {"pool": "gpu"},
            "volumes": [{"name": "data", "emptyDir": {}}, {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
            "securityContext": {"runAsUser": 7},
            "containers": [{"name": "sidecar", "image": "s"}],
        },
        container={
            "image": "mine",
            "env": [{"name": "HOME", "value": "/data"}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
    )  # fmt: skip
    pod = objects.pod_manifest(given, ATTEMPT, 0)
    check(pod)
    ours, sidecar = pod["spec"]["containers"]
    assert (ours["name"], ours["image"], sidecar) == ("node", "mine", {"name": "sidecar", "image": "s"})
    assert {"name": "HOME", "value": "/data"} in ours["env"]
    assert {"name": "data", "mountPath": "/data"} in ours["volumeMounts"]
    assert len(ours["volumeMounts"]) == 5
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["scratch"] == {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}
    assert {"key", "gone", "data"} <= volumes.keys()
    assert (pod["spec"]["securityContext"]["runAsUser"], pod["spec"]["securityContext"]["runAsNonRoot"]) == (7, True)


def test_two_things_that_the_user_gives_stay_two() -> None:
    """A volume mounted twice, a taint tolerated in two ways; what stands for one of ours replaces it."""
    mounts = [{"name": "data", "mountPath": f"/data/{part}", "subPath": part} for part in "ab"]
    tolerations = [{"key": "gpu", "operator": "Exists", "effect": effect} for effect in ("NoSchedule", "NoExecute")]
    patient = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "tolerationSeconds": 5}
    given = replace(
        SPEC,
        pod={"volumes": [{"name": "data", "emptyDir": {}}], "tolerations": [*tolerations, patient]},
        container={"image": "mine", "volumeMounts": mounts},
    )
    pod = objects.pod_manifest(given, ATTEMPT, 0)
    check(pod)
    assert [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "data"] == mounts
    assert [each for each in pod["spec"]["tolerations"] if each["key"] == "gpu"] == tolerations
    waits = {each["key"]: each.get("tolerationSeconds") for each in pod["spec"]["tolerations"]}
    assert (waits["node.kubernetes.io/unreachable"], waits["node.kubernetes.io/not-ready"]) == (5, 30)


def test_status_is_read_back_as_it_was_written() -> None:
    record = Record(
        phase=Phase.WAITING,
        message="for a node",
        attempt=Attempt(3, 4, 9, True, 1_800_000_100.0),
        num_restarts=2,
        failures=(Failure("h", "train-1-0", "why", 1_800_000_000.0),),
        quarantined=(Quarantined("h", applied=True),),
    )
    status = status_of(SPEC, record, Observed(1_800_000_200.0), {})
    assert read_record({"status": status}) == record
    assert read_record({"status": status_of(SPEC, Record(), Observed(0.0), {})}) == Record()


def test_page_that_nodes_serve_becomes_the_status() -> None:
    """From the same answers that the page's own tests put together."""
    page = read_page(json.loads(json.dumps(merge({"n0": answer(), "n1": answer("n1", ranks=[])}))))
    assert page is not None
    status = status_of(SPEC, Record(), Observed(1_800_000_200.0, page=page), {})
    assert (status["step"], status["protectedStep"]) == (30, 29)
    assert 0 < float(status["goodput"]) <= 1
    assert (status["lastIncident"]["cause"], status["lastIncident"]["source"]) == ("process", "own vault")


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1, "b": {"c": 1, "d": 2}}, {"b": {"c": 3}}, {"a": None, "b": {"c": 3, "d": None}}),
        ({"a": [1]}, {"a": [1, 2]}, {"a": [1, 2]}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": None}}),
    ],
)
def test_merge_patch_holds_what_has_changed(before: Any, after: Any, patch: Any) -> None:
    assert merge_patch(before, after) == patch


POD = {"metadata": {"name": "t-1-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {}}, "spec": {}}


@pytest.mark.parametrize(
    ("status", "ended", "exit_code"),
    [
        ({}, False, None),
        (
            {"phase": "Running", "containerStatuses": [{"name": "node", "ready": True, "state": {"running": {}}}]},
            False,
            None,
        ),
        (  # the container has ended, the pod's phase has not followed yet
            {
                "phase": "Running",
                "containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": 76}}}],
            },
            True,
            76,
        ),
        ({"phase": "Failed", "reason": "Evicted"}, True, None),  # before it had a container
        ({"phase": "Succeeded", "containerStatuses": [{"name": "sidecar", "state": {}}]}, True, None),
    ],
)
def test_pod_is_read_from_what_its_container_did(status: dict[str, Any], ended: bool, exit_code: int | None) -> None:
    pod = read_pod({**POD, "status": status})
    assert (pod.ended, pod.exit_code) == (ended, exit_code)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"containerStatuses": [{"name": "node", "state": {"waiting": {"reason": "ContainerCreating"}}}]}, ""),
        (
            {
                "containerStatuses": [
                    {"name": "node", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
                ]
            },
            "ErrImagePull: no such image",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            "cannot be placed on a host: 0/3 nodes are available",
        ),
        ({"phase": "Failed", "conditions": [{"type": "PodScheduled", "status": "False"}]}, ""),
    ],
)
def test_pod_that_does_not_start_says_why(status: dict[str, Any], words: str) -> None:
    assert read_pod({**POD, "status": status}).held_up == words


def test_spec_takes_the_schemas_defaults_where_they_are_left_out() -> None:
    run = yaml.safe_load((FOLDER / "operator" / "run.yaml").read_text())
    run["metadata"] |= {"uid": "u", "namespace": "default"}
    spec = read_spec(run)
    schema = yaml.safe_load((FOLDER / "operator" / "crd.yaml").read_text())["spec"]["versions"][0]["schema"]
    of_spec = schema["openAPIV3Schema"]["properties"]["spec"]["properties"]
    of_rule = of_spec["quarantine"]["properties"]
    assert spec.num_workers == of_spec["workersPerNode"]["default"]
    assert spec.max_restarts == of_spec["maxRestarts"]["default"]
    rule = spec.quarantine
    assert (rule.after_failures, rule.window_s, rule.max_hosts, rule.way) == tuple(
        of_rule[key]["default"] for key in ("afterFailures", "windowSeconds", "maxHosts", "action")
    )


def test_command_without_the_extra_says_what_to_install() -> None:
    code = "import sys; sys.modules['kopf'] = None; from p2pstate.operator.command import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert "pip install 'p2pstate[operator]'" in done.stderr

"""examples/kubernetes against the official models, and against what p2prun takes and returns. Without a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes_models import check, find

from p2pstate import errors
from p2pstate.cli import _parser, main

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
VARIANTS = ["job", "jobset", "kubeflow"]


def objects(variant: str) -> list[dict[str, Any]]:
    files = yaml.safe_load((FOLDER / variant / "kustomization.yaml").read_text())["resources"]
    return [yaml.safe_load((FOLDER / variant / name).read_text()) for name in files]


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifest_has_only_keys_and_types_of_the_official_models(variant: str) -> None:
    found = objects(variant)
    assert found
    for each in found:
        check(each)


@pytest.mark.parametrize(
    ("key", "value"), [("backofLimit", 3), ("backoffLimit", "3"), ("podFailurePolicy", {"rules": [{"action": 1}]})]
)
def test_manifest_check_refuses_unknown_keys_and_wrong_types(key: str, value: Any) -> None:
    (job, _) = objects("job")
    check(job)
    job["spec"][key] = value
    with pytest.raises((AssertionError, ValueError)):
        check(job)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kustomization_renders_with_the_key_and_the_image(variant: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(FOLDER / variant, tmp_path / variant)
    (tmp_path / variant / "run.key").write_text("00" * 32)
    command = ["kubectl", "kustomize", str(tmp_path / variant)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rendered = list(yaml.safe_load_all(done.stdout))
    for each in rendered:
        check(each)
    (secret,) = (each for each in rendered if each["kind"] == "Secret")
    assert list(find(rendered, "secretName")) == [secret["metadata"]["name"]]
    assert list(secret["data"]) == ["run.key"]
    assert list(find(rendered, "image")) == ["registry.example.com/p2pstate:0.1.0"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifest_runs_a_command_that_p2prun_takes(variant: str, tmp_path: Path) -> None:
    found = objects(variant)
    (container,) = next(find(found, "containers"))
    (tmp_path / "p2prun").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    (tmp_path / "p2prun").chmod(0o755)
    given = {entry["name"]: entry["value"] for env in find(found, "env") for entry in env if "value" in entry}
    path = f"{tmp_path}:{os.environ['PATH']}"
    for zone, labels in (("", []), ("z1", ["zone=z1"])):
        pod = {"POD_NAME": "train-0-abcde", "RUN_ID": "u-1", "SERVICE": "train", "ZONE": zone}
        done = subprocess.run(
            container["args"], env={**given, **pod, "PATH": path}, capture_output=True, text=True, check=True
        )
        options = _parser().parse_args(done.stdout.splitlines())
        assert options.script == "examples/train_gpt.py"
        assert (ROOT / options.script).exists()
        assert "--steps=1000" in options.args
        assert (options.name, options.run_id, options.label) == ("train-0-abcde", "u-1", labels)
        assert (
            int(options.nnodes) + options.spares == next(find(found, "parallelism")) == next(find(found, "completions"))
        )
        assert str(options.health_file) == "/tmp/health"
        port = options.contacts.rpartition(":")[2]
        assert options.bind == f"0.0.0.0:{port}"
        assert [entry["containerPort"] for entry in container["ports"]] == [int(port)]
        (mount,) = (entry for entry in container["volumeMounts"] if entry["name"] == "key")
        assert str(options.key_file) == f"{mount['mountPath']}/run.key"


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifest_ends_the_job_only_for_exit_codes_that_end_the_run(variant: str) -> None:
    found = objects(variant)
    (policy,) = find(found, "podFailurePolicy")
    (fatal,) = (rule["onExitCodes"] for rule in policy["rules"] if rule["action"] == "FailJob")
    (container,) = next(find(found, "containers"))
    assert fatal == {"containerName": container["name"], "operator": "In", "values": [1, errors.EXIT_STATE_LOST]}
    # What the API server demands of a Job with a failure policy or a success policy.
    assert list(find(found, "restartPolicy")) == ["Never"]
    assert list(find(found, "podReplacementPolicy")) == ["Failed"]
    assert list(find(found, "completionMode")) == ["Indexed"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifest_needs_no_privileges(variant: str) -> None:
    (pod,) = (spec for spec in find(objects(variant), "spec") if "containers" in spec)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in context
    (secret,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert secret["defaultMode"] == 0o400


def test_manifest_of_a_job_finds_its_pods_through_its_service() -> None:
    job, service = objects("job")
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


def test_manifests_describe_the_same_pods() -> None:
    """Three files, because kustomize cannot share a pod template between kinds: they must not drift apart."""
    pods = []
    for variant in VARIANTS:
        (pod,) = (spec for spec in find(objects(variant), "spec") if "containers" in spec)
        (container,) = pod["containers"]
        pod.pop("subdomain", None)
        del container["args"]
        for entry in container["env"]:
            if entry["name"] == "SERVICE":
                del entry["valueFrom"]
        pods.append(pod)
    assert pods[0] == pods[1] == pods[2]


def test_memory_on_the_page_is_what_plan_computes(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = re.findall(r"^    (p2pstate plan .*)$", page, re.MULTILINE)
    (shown,) = re.findall(r"form of a request \(`(\w+)`\)", page)
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pod_memory"] == shown


@pytest.mark.parametrize("variant", [*VARIANTS, "operator"])
def test_memory_of_the_example_holds_the_copies_that_plan_computes(
    variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example has fewer than 10 million parameters. Request and limit are the same, so nobody else takes it."""
    assert main(["plan", "--gpus", "2", "--gpus-per-node", "1", "--mtbf", "10000", "--params", "0.01B", "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["host_bytes_per_node"]
    manifests = (
        objects(variant) if variant != "operator" else [yaml.safe_load((FOLDER / variant / "run.yaml").read_text())]
    )
    for resources in (each for found in manifests for each in find(found, "resources")):
        asked, limit = (int(resources[kind]["memory"].removesuffix("Gi")) * 2**30 for kind in ("requests", "limits"))
        assert needed <= asked == limit

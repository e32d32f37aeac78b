"""Kubernetes objects against the official models: unknown keys and wrong types are refused. Without a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

kubeflow = pytest.importorskip(
    "kubeflow_trainer_api.models", reason="kubeflow-trainer-api (extra dev) is not installed"
)
core = pytest.importorskip("kubernetes.client.models", reason="kubernetes (extra operator) is not installed")

KINDS = {
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
}
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?")


def find(value: Any, key: str) -> Iterator[Any]:
    """Every value with this key, at any depth."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from find(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, key)


def kept(given: Any, known: Any, where: str) -> None:
    """The models drop keys that they do not know, and may add defaults."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            assert key in known, f"{where} has no key {key!r}"
            kept(value, known[key], f"{where}.{key}")
    elif isinstance(given, list):
        for index, (left, right) in enumerate(zip(given, known, strict=True)):
            kept(left, right, f"{where}[{index}]")
    else:
        assert given == known, where


def check(value: Any) -> None:
    """Validate an object; raises if a value has the wrong type or a key is one that the model does not know."""
    plain = json.loads(json.dumps(value))
    for resources in find(plain, "resources"):
        if isinstance(resources, list):  # of a role
            continue
        for amounts in resources.values():
            assert all(isinstance(amount, str) and QUANTITY.fullmatch(amount) for amount in amounts.values()), amounts
        resources.clear()  # the models have no type for quantities
    model = KINDS.get(plain["kind"]) or getattr(core, f"V1{plain['kind']}")
    kept(plain, model.model_validate(plain).model_dump(by_alias=True), plain["kind"])

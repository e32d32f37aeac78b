"""The API server as a few verbs on plain tables.

In: a function that sends one request (``Send``). Out: Cluster, whose methods turn answers into values and errors.

Invariants: every change is safe to repeat: what exists already, or is gone already, is no error. A change that names a
resource version is refused with Conflict when somebody else was faster; a deletion names the uid it means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

__all__ = ["ApiError", "Cluster", "Conflict", "Send", "kubernetes_send"]

# (method, path, query, body or None, content type) -> (HTTP status, the answer as a table)
Send = Callable[[str, str, Mapping[str, str], Mapping[str, Any] | None, str], tuple[int, dict[str, Any]]]

JSON, MERGE_PATCH = "application/json", "application/merge-patch+json"
NOT_FOUND, CONFLICT, FIRST_ERROR = 404, 409, 300
REQUEST_S = 10.0


class ApiError(Exception):
    """The API server refused, or cannot be reached."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (HTTP status {code})")
        self.code = code


class Conflict(ApiError):
    """Somebody else changed the object meanwhile: look again, decide again."""


class Cluster:
    """``send``: see Send."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def get(self, path: str) -> dict[str, Any] | None:
        """None: there is no such object."""
        code, body = self._send("GET", path, {}, None, JSON)
        return None if code == NOT_FOUND else _checked("GET", path, code, body)

    def list(self, path: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects with these labels (``name=value``)."""
        code, body = self._send("GET", path, {"labelSelector": selector} if selector else {}, None, JSON)
        items: list[dict[str, Any]] = _checked("GET", path, code, body)["items"]
        return items

    def create(self, path: str, body: Mapping[str, Any]) -> bool:
        """False: there is one of this name already."""
        code, answer = self._send("POST", path, {}, body, JSON)
        if code == CONFLICT and answer.get("reason") == "AlreadyExists":
            return False
        _checked("POST", path, code, answer)
        return True

    def patch(self, path: str, body: Mapping[str, Any]) -> bool:
        """As a JSON merge patch. False: there is no such object. Raises Conflict if ``body`` names a resource version
        that is not the newest."""
        code, answer = self._send("PATCH", path, {}, body, MERGE_PATCH)
        if code == NOT_FOUND:
            return False
        _checked("PATCH", path, code, answer)
        return True

    def delete(self, path: str, uid: str) -> None:
        """The object of this uid, if it is there."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        code, answer = self._send("DELETE", path, {}, body, JSON)
        if code not in (NOT_FOUND, CONFLICT):  # gone, or another one of the same name
            _checked("DELETE", path, code, answer)


def _checked(method: str, path: str, code: int, body: dict[str, Any]) -> dict[str, Any]:
    if code >= FIRST_ERROR:
        kind = Conflict if code == CONFLICT else ApiError
        raise kind(code, f"{method} {path}: {body.get('message', 'no reason given')}")
    return body


def kubernetes_send() -> Send:
    """Requests as the pod's service account, else as kubectl would make them; how, the official client knows.

    Raises ImportError without the extra ``operator``, kubernetes.config.ConfigException where neither is there.
    """
    import urllib3

    from kubernetes import client, config

    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        config.load_kube_config(client_configuration=settings)
    pool = urllib3.PoolManager(
        cert_reqs="CERT_REQUIRED" if settings.verify_ssl else "CERT_NONE",
        ca_certs=settings.ssl_ca_cert,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        timeout=REQUEST_S,
        retries=False,
    )

    def send(
        method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None, content_type: str
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Accept": JSON, "Content-Type": content_type}
        for given in settings.auth_settings().values():  # renewed by the client when the token is
            if given["in"] == "header" and given["value"]:
                headers[given["key"]] = given["value"]
        url = settings.host.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        try:
            answer = pool.request(method, url, headers=headers, body=None if body is None else json.dumps(body))
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(0, f"{method} {path}: {error}") from error
        return answer.status, _table(answer.data)

    return send


def _table(data: bytes) -> dict[str, Any]:
    """An answer's body; one that is no JSON table becomes a message."""
    try:
        told = json.loads(data)
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {"message": data.decode(errors="replace")[:500]}

"""The page server and the gatherer without a node: who may ask, what is answered, what cannot be served."""

import http.client
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from test_observe_page import answer

from p2pstate.agent.page_server import PageServer
from p2pstate.agent.serving import ANSWER_S, Gatherer
from rendezvous.types import MemberKey, Role


class Asked:
    """What the node would do."""

    def __init__(self) -> None:
        self.fails: Exception | None = None

    def gather(self) -> dict[str, Any]:
        if self.fails is not None:
            raise self.fails
        return {"n0": answer()}

    def metrics(self) -> bytes:
        if self.fails is not None:
            raise self.fails
        return b"p2pstate_up 1\n"


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture(params=[None, "sesame"])
def server(request: pytest.FixtureRequest, asked: Asked) -> Iterator[PageServer]:
    found = PageServer("127.0.0.1:0", request.param, "n0", asked.gather, asked.metrics)
    found.start()
    yield found
    found.close()


def ask(server: PageServer, path: str, method: str = "GET", token: str = "sesame") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=10)
    connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body


def test_server_answers_what_there_is(server: PageServer) -> None:
    assert b"training, protected" in ask(server, "/")[1]
    assert b'"run_id": "job"' in ask(server, "/status.json")[1]
    assert ask(server, "/metrics") == (200, b"p2pstate_up 1\n")
    assert ask(server, "/", "HEAD") == (200, b"")
    assert ask(server, "/../etc/passwd")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_server_is_read_only(method: str, server: PageServer) -> None:
    assert ask(server, "/", method)[0] == 501


@pytest.mark.parametrize("server", ["sesame"], indirect=True)
def test_server_with_a_token_tells_nothing_without_it(server: PageServer) -> None:
    for path in ("/", "/status.json", "/metrics", "/nothing"):
        code, body = ask(server, path, token="wrong")
        assert code == 401
        assert b"job" not in body
    assert ask(server, "/?token=sesame", token="")[0] == 200


def test_server_of_a_node_that_hangs_says_so(server: PageServer, asked: Asked) -> None:
    asked.fails = FutureTimeout()
    assert ask(server, "/")[0] == 503


def test_server_without_the_metrics_library_says_what_to_install(server: PageServer, asked: Asked) -> None:
    asked.fails = ValueError("metrics need prometheus-client")
    assert ask(server, "/metrics") == (501, b"metrics need prometheus-client\n")


@pytest.mark.parametrize("bind", ["localhost", "127.0.0.1:", "127.0.0.1:http", ":8600"])
def test_server_at_no_address_is_refused_in_words(bind: str, asked: Asked) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        PageServer(bind, None, "n0", asked.gather, asked.metrics)


def test_server_at_a_port_that_is_taken_is_an_error(server: PageServer, asked: Asked) -> None:
    with pytest.raises(OSError, match="in use"):
        PageServer(urlsplit(server.url).netloc, None, "n0", asked.gather, asked.metrics)


class ManualNode:
    """Of three nodes, one dead, the first. Calls at once what its thread is to call; time does not pass."""

    def __init__(self) -> None:
        self.key, self.timers, self.asked = MemberKey("n0", 1), [], []

    def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
        function()

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Any:
        self.timers.append((delay_s, function))
        return SimpleNamespace(cancel=self.timers.clear)

    def members(self) -> dict[MemberKey, Any]:
        member = SimpleNamespace(role=Role.NODE)
        return {MemberKey(f"n{i}", 1): SimpleNamespace(live=i < 2, member=member) for i in range(3)}

    def broadcast(self, _kind: str, number: int) -> None:
        self.asked.append(number)


def test_gatherer_waits_for_every_live_node_and_no_longer() -> None:
    node: Any = ManualNode()
    gatherer = Gatherer(node, lambda: {"of": "n0"})
    future: Future[Any] = Future()
    gatherer._ask(future)
    assert not future.done()
    gatherer.heard(MemberKey("n1", 1), "seen", [node.asked[0], {"of": "n1"}])
    assert future.result(0) == {"n0": {"of": "n0"}, "n1": {"of": "n1"}}
    assert not node.timers


@pytest.mark.parametrize(
    ("kind", "body"), [("look", float("inf")), ("look", [1]), ("seen", 5), ("seen", [[], {}]), ("seen", [1, {}, 2])]
)
def test_gatherer_refuses_nonsense_of_other_nodes(kind: str, body: Any) -> None:
    gatherer = Gatherer(ManualNode(), dict)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be"):
        gatherer.heard(MemberKey("n1", 1), kind, body)


def test_gatherer_tells_what_it_has_when_a_node_does_not_answer() -> None:
    node: Any = ManualNode()
    gatherer = Gatherer(node, lambda: {"of": "n0"})
    future: Future[Any] = Future()
    gatherer._ask(future)
    ((delay_s, finish),) = node.timers
    assert delay_s == ANSWER_S
    finish()
    assert future.result(0) == {"n0": {"of": "n0"}}
    gatherer.heard(MemberKey("n1", 1), "seen", [node.asked[0], {"of": "n1"}])  # too late: nobody waits


def test_error_on_the_nodes_thread_reaches_who_asked() -> None:
    def fail() -> None:
        raise ValueError("metrics need prometheus-client")

    gatherer = Gatherer(ManualNode(), dict)  # type: ignore[arg-type]
    assert gatherer.on_node(lambda: 5) == 5
    with pytest.raises(ValueError, match="prometheus-client"):
        gatherer.on_node(fail)

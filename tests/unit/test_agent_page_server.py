"""What a node's page answers to requests that no browser makes."""

import socket
import struct
import threading
import time
from contextlib import ExitStack

import pytest

from p2pstate.agent import page_server
from p2pstate.agent.page_server import PageServer


def answer_to(url: str, request: bytes) -> bytes:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client, client.makefile("rb") as answer:
        client.sendall(request)
        return answer.readline()


def test_page_server_answers_nonsense_in_words_and_fills_no_console(capfd: pytest.CaptureFixture[str]) -> None:
    asked, gone = threading.Event(), threading.Event()

    def metrics() -> bytes:
        asked.set()
        gone.wait(30)
        return bytes(8 << 20)  # more than a socket takes for a client that does not read

    server = PageServer("127.0.0.1:0", None, "n0", lambda: {"n0": {"live": {}}}, metrics)
    server.start()
    try:
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        client = socket.create_connection((host, int(port)))
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert asked.wait(30)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # a reset, while its answer is on the way
        gone.set()
        assert b" 500 " in answer_to(server.url, b"GET / HTTP/1.1\r\n\r\n")  # what n0 tells is of another release
        assert b" 400 " in answer_to(server.url, b"GET http://[::1 HTTP/1.1\r\n\r\n")
        assert b" 404 " in answer_to(server.url, b"GET /../../etc/passwd HTTP/1.1\r\n\r\n")
        assert b" 501 " in answer_to(server.url, b"POST / HTTP/1.1\r\n\r\n")
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_page_server_hangs_up_on_a_crowd_and_on_who_never_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "MAX_CLIENTS", 2)
    monkeypatch.setattr(page_server, "CLIENT_S", 0.5)
    server = PageServer("127.0.0.1:0", None, "n0", dict, bytes)
    server.start()
    try:
        host, port = server.url.removeprefix("http://").rstrip("/").split(":")
        with ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(2)]
            for client in slow:
                client.sendall(b"GET /metrics HT")
            third = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            assert third.recv(1) == b""
            assert [client.recv(1) for client in slow] == [b"", b""]
        until_s = time.monotonic() + 30.0
        while b" 200 " not in answer_to(server.url, b"GET /metrics HTTP/1.1\r\n\r\n"):
            assert time.monotonic() < until_s, "their places were not given back"
    finally:
        server.close()

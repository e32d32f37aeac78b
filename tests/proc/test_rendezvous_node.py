"""Real nodes as real processes on loopback: they are killed, frozen and restarted, and views go on."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from rendezvous_cluster import Process, cluster, in_view, start_three

from ports import free_ports

SIZES = {"num_nodes_min": 2, "num_nodes_max": 2, "num_spares_expected": 1}
SILENCE_S = 5.0  # Config.failure_s: after that a silent member is dead; proof of its death takes less
KEY = "00112233445566778899aabbccddeeff"


def knows_progress(process: Process, name: str) -> bool:
    """Asks again each time, because progress comes with a heartbeat."""
    process.command("members")
    return any(event["members"][name] == ["ALIVE", {"step": 7}] for event in process.find("members"))


def test_each_of_three_contacts_killed_one_after_the_other_and_the_run_goes_on_with_newcomers() -> None:
    with cluster(**SIZES) as running:
        a, b, c = start_three(running)
        killed_s = a.signal(signal.SIGKILL)
        running.wait(lambda: in_view(b, "bc") and in_view(c, "bc"), "a view of b and c")
        for process in (b, c):
            dead = process.find("member", kind="dead", name="a")[0]
            view = process.find("view")[-1]
            assert dead["proof"]
            assert dead["t"] <= view["t"] < killed_s + SILENCE_S
            # c took the place of a, so the training membership changed.
            assert view["members"] == [["c", "b"], [], []]
            assert view["round"] == view["epoch"]
        contacts = [process.find("ready")[0]["address"] for process in (a, b, c)]
        d = running.start("d", bind="127.0.0.1:0", contacts=contacts)
        running.wait(lambda: in_view(c, "bcd") and in_view(d, "bcd"), "a view with the first newcomer")
        b.signal(signal.SIGKILL)
        running.wait(lambda: in_view(c, "cd") and in_view(d, "cd"), "a view without the second contact")
        e = running.start("e", bind="127.0.0.1:0", contacts=contacts)
        running.wait(lambda: in_view(d, "cde") and in_view(e, "cde"), "a view with the second newcomer")
        c.signal(signal.SIGKILL)
        running.wait(lambda: in_view(d, "de") and in_view(e, "de"), "a view of newcomers only")
        assert {e.find("view")[-1]["nonce"]} == {view["nonce"]}  # the same run


def test_two_nodes_one_killed_the_other_goes_on_alone() -> None:
    with cluster(num_nodes_min=1, num_nodes_max=2, key=KEY) as running:
        ports = free_ports(2)
        contacts = [f"127.0.0.1:{port}" for port in ports]
        a, b = (running.start(n, bind=c, contacts=contacts) for n, c in zip("ab", contacts, strict=True))
        running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view of both, over encrypted connections")
        a.signal(signal.SIGKILL)
        running.wait(lambda: in_view(b, "b"), "a view of b alone")


def test_frozen_member_replaced_by_silence_and_evicted_when_it_wakes() -> None:
    with cluster(**SIZES) as running:
        a, b, c = start_three(running)
        stopped_s = a.signal(signal.SIGSTOP)
        running.wait(lambda: in_view(b, "bc") and in_view(c, "bc"), "a view without the frozen member")
        assert b.find("member", kind="suspect", name="a")
        assert not b.find("member", kind="dead", name="a")[0]["proof"]
        assert b.find("view")[-1]["t"] < stopped_s + 2 * SILENCE_S
        a.signal(signal.SIGCONT)
        running.wait(lambda: a.find("evicted"), "the eviction of the member that woke up")
        assert not in_view(a, "bc")


def test_killed_member_restarted_at_its_address_joins_as_spare_without_disturbing_the_round() -> None:
    with cluster(**SIZES) as running:
        a, b, c = start_three(running)
        a.signal(signal.SIGKILL)
        running.wait(lambda: in_view(b, "bc") and in_view(c, "bc"), "a view of b and c")
        a.popen.wait(10)
        again = running.start("a", bind=a.find("ready")[0]["address"], contacts=[b.find("ready")[0]["address"]])
        running.wait(lambda: all(in_view(p, "abc") for p in (again, b, c)), "a view with the new incarnation of a")
        before, after = b.find("view")[-2:]
        assert after["members"] == [["c", "b"], ["a"], []]
        assert after["epoch"] == before["epoch"] + 1
        assert after["round"] == before["round"]
        assert after["nonce"] == again.find("view")[-1]["nonce"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_members_find_each_other_over_ipv6_and_a_killed_one_is_noticed_at_once() -> None:
    with cluster(**SIZES, key=KEY) as running:
        contacts = [f"[::1]:{port}" for port in free_ports(3)]
        a, b, c = (running.start(n, bind=at, contacts=contacts[:2]) for n, at in zip("abc", contacts, strict=True))
        running.wait(lambda: all(in_view(p, "abc") for p in (a, b, c)), "a view of all three")
        assert a.find("ready")[0]["address"] == contacts[0]
        a.signal(signal.SIGKILL)
        running.wait(lambda: in_view(b, "bc") and in_view(c, "bc"), "a view of b and c")
        assert b.find("member", kind="dead", name="a")[0]["proof"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_name_with_many_records_is_read_again_until_one_of_them_answers(tmp_path: Path) -> None:
    """A headless service: its records are of both families, most lead nowhere, and the right one comes late."""
    (port,), names = free_ports(1), tmp_path / "names.json"
    names.write_text(json.dumps({"service": ["127.0.0.9", "::1"]}))
    contact = {"contacts": [f"service:{port}"], "names": str(names)}
    with cluster(num_nodes_min=2, num_nodes_max=2) as running:
        a = running.start("a", bind=f"127.0.0.2:{port}", **contact)
        b = running.start("b", bind=f"127.0.0.3:{port}", **contact)
        nobody = f"no contact answers (127.0.0.9:{port}, [::1]:{port})"
        running.wait(lambda: any(nobody in event["reason"] for event in a.find("waiting")), "the list of contacts")
        names.write_text(json.dumps({"service": ["127.0.0.9", "::1", "127.0.0.3", "127.0.0.2"]}))
        running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view of both")


def test_member_without_places_to_fill_waits_and_says_why() -> None:
    with cluster(**SIZES) as running:
        a, b, c = start_three(running)
        a.signal(signal.SIGKILL)
        running.wait(lambda: in_view(b, "bc") and in_view(c, "bc"), "a view of b and c")
        c.signal(signal.SIGKILL)
        reason = "2 of 2 training nodes are needed, 1 is alive and no spare is left: waiting for a node to join"
        running.wait(lambda: b.find("waiting", reason=reason), "the sentence that says what is missing")
        running.start("d", bind="127.0.0.1:0", contacts=[b.find("ready")[0]["address"]])
        running.wait(lambda: in_view(b, "bd"), "a view with the newcomer")
        assert b.find("view")[-1]["members"][0] == ["d", "b"]


def test_survivor_of_two_silent_ones_waits_until_somebody_vouches_for_their_death() -> None:
    with cluster(num_nodes_min=1, num_nodes_max=3) as running:
        a, b, c = start_three(running)
        for process in (a, b):
            process.signal(signal.SIGSTOP)
        running.wait(
            lambda: any("2 of 3 votes are needed and 1 came" in e["reason"] for e in c.find("waiting")),
            "the sentence about missing votes",
        )
        assert in_view(c, "abc")
        c.command("assume_dead", "a")
        c.command("assume_dead", "b")
        running.wait(lambda: in_view(c, "c"), "a view of c alone")
        for process in (a, b):
            process.signal(signal.SIGCONT)
        running.wait(lambda: a.find("evicted") and b.find("evicted"), "the eviction of those that were frozen")


def test_two_of_three_killed_at_once_the_last_goes_on_where_proof_suffices() -> None:
    with cluster(num_nodes_min=1, num_nodes_max=3, proof_suffices=True) as running:
        a, b, c = start_three(running)
        for process in (a, b):
            process.signal(signal.SIGKILL)
        running.wait(lambda: in_view(c, "c"), "a view of c alone")


def test_verdict_messages_requests_and_departure_reach_everybody() -> None:
    with cluster(**SIZES, key=KEY) as running:
        a, b, c = start_three(running)
        b.command("broadcast", "hello", {"n": [1, b"x".decode()]})
        running.wait(lambda: a.find("message", kind="hello") and c.find("message", kind="hello"), "the message")
        assert a.find("message")[0]["body"] == {"n": [1, "x"]}
        assert not b.find("message")
        epoch = b.find("view")[-1]["epoch"]
        c.command("propose", "a worker died")
        running.wait(lambda: all(p.find("view", epoch=epoch + 1) for p in (a, b, c)), "the requested epoch")
        assert a.find("view", epoch=epoch + 1)[0]["reason"] == "a worker died"
        running.wait(lambda: knows_progress(a, "b"), "b's progress in a's table")
        c.command("leave", "done here")
        running.wait(lambda: in_view(a, "ab") and in_view(b, "ab"), "a view without the one that left")
        assert a.find("member", kind="left", name="c")[0]["reason"] == "done here"
        a.command("declare", 3, "the end")
        running.wait(lambda: a.find("verdict", code=3) and b.find("verdict", code=3), "the verdict")
        running.wait(lambda: a.find("closed") and b.find("closed"), "the end of both processes")


def test_store_answers_across_nodes_and_a_lost_publisher_of_an_id_frees_those_that_wait_for_it() -> None:
    with cluster(**SIZES) as running:
        a, b, c = start_three(running)
        for index in range(8):
            a.command("store", "get", [f"key{index}"], 20.0)
        for index in range(8):
            b.command("store", "set", [f"key{index}", f"value{index}"], 5.0)
        running.wait(lambda: len(a.find("store", op="get", ok=True)) == 8, "the answers of the blocked calls")
        assert {e["value"] for e in a.find("store", op="get")} == {f"value{index}" for index in range(8)}
        b.command("store", "num_keys", [], 5.0)
        running.wait(lambda: b.find("store", op="num_keys", value=8), "the number of keys over all shards")
        c.command("store", "get", ["absent"], 0.2)
        running.wait(lambda: c.find("store", op="get", timed_out=True), "the deadline of a call nobody answers")
        # As ProcessGroupNCCL does: rank 0 of a group sets its unique id, the others get it.
        unique_id = "default_pg/0//cuda//0"
        b.command("store", "get", [unique_id], 60.0)
        c.command("store", "wait", [[unique_id]], 60.0)
        a.signal(signal.SIGKILL)  # before it published
        running.wait(lambda: b.find("store", op="get", ended=True), "the end of the round for who waits for the id")
        running.wait(lambda: c.find("store", op="wait", ended=True), "the end of the round for the other one")
        running.wait(lambda: in_view(b, "bc") and in_view(c, "bc"), "the next round")
        b.command("store", "set", [unique_id, "id of b"], 5.0)
        c.command("store", "get", [unique_id], 20.0)
        running.wait(lambda: c.find("store", op="get", value="id of b"), "the new id")
        c.command("store", "get", ["default_pg/0//cuda//1"], 60.0)
        b.signal(signal.SIGKILL)  # after it published
        running.wait(lambda: c.find("store", op="get", ended=True), "the end of that round, although too few are left")

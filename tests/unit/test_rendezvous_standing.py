"""What a node tells of its run."""

from __future__ import annotations

from core_bench import member

from rendezvous.membership import Record
from rendezvous.messages import Status
from rendezvous.standing import latest_lives


def test_of_each_name_the_living_is_told_of_else_the_newest() -> None:
    lives = [
        ("a", 9, Status.GONE),
        ("a", 2, Status.ALIVE),  # its host's clock was set back
        ("b", 1, Status.GONE),
        ("b", 3, Status.DEAD),
        ("b", 2, Status.GONE),
        ("c", 1, Status.SUSPECT),
    ]
    records = [Record(member(name, life), status, 0, "", False, "a", 0.0, 0.0) for name, life, status in lives]
    told = latest_lives({record.member.key: record for record in records})
    assert sorted(map(str, told)) == ["a#2", "b#3", "c#1"]
    assert all(record.member.key == key for key, record in told.items())

"""What a run on one machine counts as left behind in shared memory."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

from cluster import shared_memory, unused


def test_segment_counts_as_left_behind_once_no_process_uses_it() -> None:
    before = shared_memory()
    segment = SharedMemory(create=True, size=4096)
    try:
        assert {segment.name} <= shared_memory() - before
        assert unused({segment.name}) == set()
        segment.close()
        assert unused({segment.name}) == {segment.name}
    finally:
        segment.unlink()

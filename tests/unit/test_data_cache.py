"""Copies of remote files: fetched once, shared, verified, bounded, and never in the way of training."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation

from p2pstate.data import CachedFiles, DataChanged, Loader, MmapTokens
from p2pstate.data.chunks import BLOCK_BYTES
from p2pstate.data.counters import COUNTERS
from p2pstate.data.pack import bytes_of, pack

CHUNK = 2 * BLOCK_BYTES
SIZE = 7 * CHUNK + 1234
SOON_S = 30.0
MANY = 1_000_000
FORK = multiprocessing.get_context("fork")


class CountedFileSystem(MemoryFileSystem):
    """Memory that counts its requests over all processes of the node, and can be slow, fail, or hang."""

    protocol = "counted"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012 - as the class it derives from has it
    pseudo_dirs = [""]  # noqa: RUF012
    num_reads = FORK.Value("i", 0)
    num_looks = FORK.Value("i", 0)
    fail_next = FORK.Value("i", 0)
    pause_s = 0.0
    num_allowed = FORK.Value("i", 0, lock=False)  # later reads wait; no killed process can leave it locked

    def info(self, path: str, **kwargs: Any) -> Any:
        with self.num_looks.get_lock():
            self.num_looks.value += 1
        return super().info(path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        with self.num_reads.get_lock():
            self.num_reads.value += 1
            number = self.num_reads.value
            if self.fail_next.value:
                self.fail_next.value -= 1
                raise OSError("503 slow down")
        until(lambda: number <= self.num_allowed.value)
        time.sleep(self.pause_s)
        return super().cat_file(path, start=start, end=end, **kwargs)


register_implementation("counted", CountedFileSystem)


def content(seed: int = 0, size: int = SIZE) -> bytes:
    return bytes(size) if seed < 0 else (f"{seed}:".encode() + bytes(range(256)) * (size // 256 + 1))[:size]


def put(url: str, data: bytes) -> str:
    CountedFileSystem().pipe_file(url, data)
    return url


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountedFileSystem]]:
    CountedFileSystem.store.clear()
    CountedFileSystem.num_reads.value = CountedFileSystem.num_looks.value = CountedFileSystem.fail_next.value = 0
    CountedFileSystem.num_allowed.value = MANY
    COUNTERS.clear()
    yield CountedFileSystem
    CountedFileSystem.num_allowed.value = MANY
    settle()
    _made.clear()


def cache(folder: Path, **options: Any) -> CachedFiles:
    files = CachedFiles(folder, **{"chunk_bytes": CHUNK, **options})
    _made.append(files)
    return files


_made: list[CachedFiles] = []


def settle() -> None:
    """Until no thread fetches any more, and counts."""
    until(lambda: not any(files.num_pending for files in _made))


def in_a_process(call: Any) -> int | None:
    process = FORK.Process(target=call)
    process.start()
    process.join(SOON_S)
    process.kill()
    return process.exitcode


def until(condition: Any) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["path", "file", "memory", "counted"])
def test_cached_file_reads_and_seeks_like_the_file_itself(kind: str, tmp_path: Path) -> None:
    local = tmp_path / "a file.bin"
    local.write_bytes(content())
    MemoryFileSystem().pipe_file("/cached.bin", content())
    urls = {"path": local, "file": f"file://{local}", "memory": "memory://cached.bin"}
    files = cache(tmp_path / "cache")
    with files.open(urls.get(kind) or put("counted://a", content())) as file, local.open("rb") as real:
        for whence, offset, length in ((0, 0, 10), (1, 5, 100), (0, CHUNK - 3, 7), (2, -5, 99), (0, SIZE + 5, 4)):
            assert (file.seek(offset, whence), file.read(length)) == (real.seek(offset, whence), real.read(length))
        file.seek(0)
        real.seek(0)
        assert file.read() == real.read()
    assert files.read(urls.get(kind) or "counted://a") == content()


def test_cached_file_is_fetched_once_for_all_processes_and_later_runs(tmp_path: Path, source: Any) -> None:
    url = put("counted://a", content())
    source.pause_s = 0.01

    def read() -> None:
        assert cache(tmp_path).read(url) == content()

    readers = [FORK.Process(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(SOON_S)
    source.pause_s = 0.0
    assert [reader.exitcode for reader in readers] == [0] * 4
    assert source.num_reads.value == 8
    looks = source.num_looks.value
    assert in_a_process(read) == 0  # as a replaced worker, or the next run
    assert source.num_reads.value == 8
    assert source.num_looks.value == looks + 1


def test_cached_file_read_in_one_place_waits_for_that_chunk_only(tmp_path: Path, source: Any) -> None:
    url = put("counted://a", content())
    files = cache(tmp_path, num_threads=1)
    source.num_allowed.value = 0
    opened = files.source(url)
    reader = threading.Thread(target=lambda: opened.read(5 * CHUNK, 5 * CHUNK + 10))
    reader.start()
    until(lambda: source.num_reads.value == 2)  # the first chunk, in the background, and the one that is asked for
    source.num_allowed.value = MANY
    reader.join(SOON_S)
    assert not reader.is_alive()
    until(lambda: files.num_pending == 0)
    assert source.num_reads.value == 8  # the rest came by itself


def test_cached_files_are_fetched_ahead_in_the_background(tmp_path: Path, source: Any) -> None:
    urls = [put(f"counted://{number}", content(number)) for number in range(3)]
    files = cache(tmp_path)
    files.prefetch(urls)
    until(lambda: files.num_pending == 0)
    assert (source.num_reads.value, COUNTERS["fetched_bytes"]) == (24, 3 * SIZE)
    assert [files.read(url) for url in urls] == [content(number) for number in range(3)]
    assert (COUNTERS["cache_hits"], COUNTERS["cache_misses"]) == (24, 0)
    assert source.num_reads.value == 24


def test_cached_file_that_changes_is_a_new_one_and_the_old_bytes_never_come_back(tmp_path: Path) -> None:
    url = put("counted://a", content(1))
    assert cache(tmp_path).read(url) == content(1)
    put(url, content(2))  # the same size, another time of modification
    assert cache(tmp_path).read(url) == content(2)
    put(url, content(3, size=100))
    assert cache(tmp_path).read(url) == content(3, size=100)


def test_cached_file_replaced_while_it_is_fetched_is_an_error_with_its_name(tmp_path: Path, source: Any) -> None:
    for replacement in (content(2), content(2, size=CHUNK)):
        url = put("counted://a", content(1))
        source.num_allowed.value = source.num_reads.value + 2  # this thread's and one in the background
        files = cache(tmp_path, num_threads=1)
        opened = files.source(url)
        opened.read(0, 10)
        put(url, replacement)
        source.num_allowed.value = MANY
        with pytest.raises(DataChanged, match="counted://a"):
            opened.read(0, SIZE)
        opened.close()
        settle()
        assert files.read(url) == replacement, "whoever begins again in this process gets it"
        settle()


def test_cached_bytes_that_rot_on_local_storage_are_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = put("counted://a", content())
    assert cache(tmp_path).read(url) == content()
    (copy,) = tmp_path.glob("*.data")
    with copy.open("r+b") as file:
        file.seek(3 * CHUNK + 17)
        file.write(b"rot")
    assert cache(tmp_path).read(url) == content()
    assert "was damaged on local storage" in caplog.text


def test_cached_chunk_whose_fetcher_is_killed_is_fetched_by_another(tmp_path: Path, source: Any) -> None:
    url = put("counted://a", content())
    source.num_allowed.value = 0
    fetcher = FORK.Process(target=lambda: cache(tmp_path).read(url))
    fetcher.start()
    until(lambda: source.num_reads.value >= 1)
    waiting = threading.Thread(target=lambda: cache(tmp_path, num_threads=1).read(url))
    waiting.start()
    os.kill(fetcher.pid or 0, signal.SIGKILL)
    fetcher.join()
    source.num_allowed.value = MANY
    waiting.join(SOON_S)
    assert not waiting.is_alive()
    assert cache(tmp_path).read(url) == content()


def test_cache_evicts_what_was_opened_longest_ago_and_never_what_is_open(tmp_path: Path, source: Any) -> None:
    urls = [put(f"counted://{number}", content(number)) for number in range(5)]
    files = cache(tmp_path, max_bytes=3 * SIZE)
    held = files.open(urls[0])
    assert held.read(5) == content(0)[:5]
    for url in urls[1:3]:
        files.read(url)
    files.read(urls[1])  # now 2 is the oldest that is not open
    until(lambda: files.num_pending == 0)
    files.read(urls[3])
    assert files.num_bytes() == 3 * SIZE
    until(lambda: files.num_pending == 0)
    files.read(urls[1])
    assert held.read() == content(0)[5:]
    assert source.num_reads.value == 32
    files.read(urls[2])
    assert source.num_reads.value == 40
    held.close()


def test_cache_evicts_what_was_closed_though_a_process_was_forked_while_it_was_open(tmp_path: Path) -> None:
    urls = [put(f"counted://{name}", content(number)) for number, name in enumerate("ab")]
    files = cache(tmp_path, max_bytes=SIZE)
    file = files.open(urls[0])
    assert file.read() == content(0)
    settle()

    def read_again() -> None:
        file.seek(0)
        os._exit(0 if file.read() == content(0) else 1)

    child = FORK.Process(target=time.sleep, args=(SOON_S,))
    child.start()
    assert in_a_process(read_again) == 0  # what was open then can be read in the forked process, too
    file.close()
    before = COUNTERS["fetched_bytes"]
    assert files.read(urls[1]) == content(1)
    settle()
    assert files.read(urls[1]) == content(1)
    assert COUNTERS["fetched_bytes"] - before == SIZE  # it has a copy
    child.kill()
    child.join()


def test_cache_keeps_count_over_processes_and_after_a_crash(tmp_path: Path) -> None:
    urls = [put(f"counted://{number}", content(number, size=CHUNK)) for number in range(30)]

    def fill(first: int) -> None:
        files = cache(tmp_path, max_bytes=5 * CHUNK, num_threads=1)
        for url in urls[first::2]:
            files.read(url)
            until(lambda: files.num_pending == 0)
            assert files.num_bytes() <= 5 * CHUNK

    both = [FORK.Process(target=fill, args=(first,)) for first in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(SOON_S)
    assert [each.exitcode for each in both] == [0, 0]
    (tmp_path / "left.data").write_bytes(bytes(4 * CHUNK))  # a process died before it had made the map
    (tmp_path / "lock").write_bytes((77 * CHUNK).to_bytes(8, "little"))  # or before it had counted
    files = cache(tmp_path, max_bytes=5 * CHUNK)
    for url in urls[:3]:
        files.read(url)
    assert files.num_bytes() == 5 * CHUNK
    assert not (tmp_path / "left.data").exists()


def test_cache_too_small_for_a_file_reads_it_from_its_source_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    urls = [put(f"counted://{number}", content(number)) for number in range(2)]
    files = cache(tmp_path, max_bytes=SIZE - 1)
    with caplog.at_level(logging.WARNING):
        for number in (0, 1, 0):
            with files.open(urls[number]) as file:
                assert file.read() == content(number)
    assert caplog.text.count("It is read from its source; training goes on") == 1
    assert files.num_bytes() == 0


def test_cache_on_full_storage_evicts_then_passes_through(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a full disk: allocating space fails with an error of the kernel."""
    url, small = put("counted://a", content()), put("counted://b", content(1, size=CHUNK))

    def read() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, SIZE - 1))
        files = cache(tmp_path)
        assert files.read(small) == content(1, size=CHUNK)
        assert files.num_bytes() == CHUNK
        until(lambda: files.num_pending == 0)
        assert files.read(url) == content()
        assert files.num_bytes() == 0

    assert in_a_process(read) == 0
    assert cache(tmp_path).read(url) == content()


def test_cache_whose_source_stumbles_tries_again_and_then_raises_what_it_said(
    tmp_path: Path, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pstate.data.remote.FIRST_PAUSE_S", 0.001)
    url = put("counted://a", content(size=100))
    source.fail_next.value = 2
    assert cache(tmp_path, num_threads=1).read(url) == content(size=100)
    source.fail_next.value = 1000
    with pytest.raises(OSError, match="503 slow down"):
        cache(tmp_path / "other").read(url)
    with pytest.raises(FileNotFoundError):
        cache(tmp_path).read("counted://nothing")


def test_cache_whose_source_hangs_gives_up_in_time(tmp_path: Path, source: Any) -> None:
    url = put("counted://a", content())
    source.num_allowed.value = 0
    with pytest.raises(TimeoutError, match=r"counted://a: an attempt to read it did not end within 0\.2 s"):
        cache(tmp_path, timeout_s=0.2).read(url)


def test_cache_folder_held_by_a_stopped_process_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pstate.data.chunks._LOCK_WITHIN_S", 0.1)
    url = put("counted://a", content())
    tmp_path.mkdir(exist_ok=True)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cache(tmp_path).read(url) == content()


def test_cache_object_goes_into_loader_workers(tmp_path: Path, source: Any) -> None:
    url = put("counted://a", content())
    files = cache(tmp_path)
    with files.open(url) as file:
        assert file.read() == content()

        def read() -> None:
            assert files.read(url) == content()

        assert in_a_process(read) == 0
    assert source.num_reads.value == 8


def test_tokens_from_anywhere_are_those_of_local_files_and_fetched_as_they_are_needed(
    tmp_path: Path, source: Any
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be. " * 40_000)
    local = [tmp_path / f"{number}.bin" for number in range(2)]
    urls = []
    for path in local:
        pack([text, text], path, bytes_of, dtype="uint8")
        urls.append(put(f"counted://{path.name}", path.read_bytes()))
        for suffix in (".json", ".ends.npy"):
            put(urls[-1] + suffix, Path(f"{path}{suffix}").read_bytes())
    expected = MmapTokens(local, length=1000, stride=7000, documents=True)
    tokens = MmapTokens(urls, length=1000, stride=7000, documents=True, files=cache(tmp_path / "cache"))
    settle()
    assert source.num_reads.value == 4  # what lies beside the files; of themselves, nothing yet
    loader = Loader(tokens, 16, num_workers=2)
    batches = list(loader)
    loader.close()
    for key in ("tokens", "documents", "positions"):
        assert torch.equal(torch.cat([batch[key] for batch in batches]), torch.stack([each[key] for each in expected]))
    size = local[0].stat().st_size
    assert source.num_reads.value == 4 + 2 * -(-size // CHUNK)
    assert 0 < loader.stats().fetched_bytes <= 2 * size
    state = tokens.state_dict()
    MmapTokens(urls, length=1000, stride=7000, files=cache(tmp_path / "cache")).load_state_dict(state)
    put(urls[1], local[0].read_bytes())
    with pytest.raises(DataChanged, match=r"counted://1\.bin is not the file"):
        MmapTokens(urls, length=1000, stride=7000, files=cache(tmp_path / "cache")).load_state_dict(state)


def test_cache_refuses_sizes_that_make_no_sense(tmp_path: Path) -> None:
    for options in ({"chunk_bytes": 1000}, {"num_threads": 0}, {"timeout_s": 0}, {"max_bytes": -1}):
        with pytest.raises(ValueError, match=r"chunk_bytes|num_threads|timeout_s"):
            cache(tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot hold copies of files"):
        cache(tmp_path / "file")


@pytest.mark.parametrize("suffix", ["data", "map"])
def test_cached_copy_with_a_file_lost_or_cut_off_is_made_again(tmp_path: Path, source: Any, suffix: str) -> None:
    url = put("counted://a", content())
    for harm in (Path.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)):
        assert cache(tmp_path).read(url) == content()
        settle()
        (path,) = tmp_path.glob(f"*.{suffix}")
        harm(path)
        assert cache(tmp_path).read(url) == content()
        settle()


def test_cache_whose_folder_is_gone_reads_from_the_source_with_a_warning(
    tmp_path: Path, source: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = cache(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert files.read(put("counted://a", content())) == content()
    assert "cannot be used" in caplog.text

"""memory: what bounds a process, read from /proc and control groups that the test has made up."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from p2pstate.memory import Bound, address_space, bounds, room

MIB = 1 << 20
MEMINFO = {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable:    8192 kB\n"}
HOST = (8 * MIB, "the host's available memory")
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: str, used_mib: int, clean_mib: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used_mib * MIB}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {clean_mib * MIB}\nactive_file 7\n",
    }


def legacy_group(folder: str, limit: int, used_mib: int, clean_mib: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used_mib * MIB}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {clean_mib * MIB}\n",
    }


def found(root: Path) -> list[tuple[int, str]]:
    return [(bound.left_bytes, bound.what.replace(str(root), "")) for bound in bounds(root)]


def test_host_without_groups_is_bounded_by_what_it_has_available(tmp_path: Path) -> None:
    assert found(tree(tmp_path, MEMINFO)) == [HOST]


def test_nothing_known_is_no_bound(tmp_path: Path) -> None:
    assert bounds(tmp_path) == []
    assert room(tmp_path).what == "nothing known"


def test_every_group_around_the_own_one_bounds_it(tmp_path: Path) -> None:
    files = MEMINFO | {"proc/self/cgroup": "0::/job/node/agent\n", "proc/self/mountinfo": V2_MOUNT}
    files |= group("sys/fs/cgroup/job/node/agent", "max", 1) | group("sys/fs/cgroup/job/node", str(6 * MIB), 2)
    files |= group("sys/fs/cgroup/job", str(4 * MIB), 3)
    root = tree(tmp_path, files)
    assert found(root) == [
        (4 * MIB, "the memory limit of control group /sys/fs/cgroup/job/node, 6 MiB"),
        (1 * MIB, "the memory limit of control group /sys/fs/cgroup/job, 4 MiB"),
        HOST,
    ]
    assert room(root).left_bytes == MIB


def test_clean_file_pages_of_a_group_count_as_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
    root = tree(tmp_path, files | group("sys/fs/cgroup/a", str(8 * MIB), 6, clean_mib=5))
    assert room(root).left_bytes == 7 * MIB


def test_group_that_is_slowed_down_before_its_limit_is_bounded_there(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
    files |= group("sys/fs/cgroup/a", str(8 * MIB), 1) | {"sys/fs/cgroup/a/memory.high": f"{3 * MIB}\n"}
    assert room(tree(tmp_path, files)).left_bytes == 2 * MIB


def test_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
    assert room(tree(tmp_path, files | group("sys/fs/cgroup/a", str(MIB), 2))).left_bytes == 0


def test_container_with_a_name_space_of_its_own_is_bounded_by_what_it_sees(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT}
    assert room(tree(tmp_path, files | group("sys/fs/cgroup", str(5 * MIB), 1))).left_bytes == 4 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/worker"])
def test_container_that_sees_its_group_mounted_as_the_top_is_bounded_by_it(path: str, tmp_path: Path) -> None:
    mounts = V1_MOUNTS.replace("0:32 /", "0:32 /docker/abc")
    files = {"proc/self/cgroup": f"4:memory:{path}\n0::/\n", "proc/self/mountinfo": mounts}
    files |= legacy_group("sys/fs/cgroup/memory", 5 * MIB, 2) | legacy_group("sys/fs/cgroup/memory/worker", 1 << 63, 1)
    assert room(tree(tmp_path, files)).left_bytes == 3 * MIB


def test_first_version_is_found_by_its_memory_controller_wherever_it_is_mounted(tmp_path: Path) -> None:
    mounts = "35 31 0:32 / /cg/cpu,memory rw - cgroup cgroup rw,cpu,memory\n"
    files = MEMINFO | {"proc/self/cgroup": "9:cpuset:/\n4:cpu,memory:/a/b\n0::/\n", "proc/self/mountinfo": mounts}
    files |= legacy_group("cg/cpu,memory/a/b", 9223372036854771712, 1) | legacy_group("cg/cpu,memory/a", 7 * MIB, 4, 1)
    root = tree(tmp_path, files)
    assert found(root) == [(4 * MIB, "the memory limit of control group /cg/cpu,memory/a, 7 MiB"), HOST]


def test_both_versions_at_once_both_bound(tmp_path: Path) -> None:
    mounts = V1_MOUNTS + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    files = {"proc/self/cgroup": "4:memory:/a\n0::/b\n", "proc/self/mountinfo": mounts}
    files |= legacy_group("sys/fs/cgroup/memory/a", 5 * MIB, 1) | group("sys/fs/cgroup/unified/b", str(3 * MIB), 1)
    assert sorted(left for left, _ in found(tree(tmp_path, files))) == [2 * MIB, 4 * MIB]


def test_files_that_say_nonsense_are_no_bound(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "nonsense\n::\n0::/a\n", "proc/self/mountinfo": f"x - y\n{V2_MOUNT} - \n"}
    files |= {"sys/fs/cgroup/a/memory.max": "many\n", "sys/fs/cgroup/a/memory.current": "1\n"}
    assert bounds(tree(tmp_path, files)) == []


def test_address_space_is_what_the_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, {"proc/self/status": "Name: x\nVmSize:\t 2048 kB\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert address_space(root) is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (6 * MIB, resource.RLIM_INFINITY))
    assert address_space(root) == Bound(4 * MIB, "the process's address space (ulimit -v), 6 MiB")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (MIB, resource.RLIM_INFINITY))
    assert address_space(root) == Bound(0, "the process's address space (ulimit -v), 1 MiB")


def test_this_machine_has_some_memory_left() -> None:
    assert room().left_bytes > MIB
    assert room().what != "nothing known"

"""A large group needs more open files than systems allow unless asked."""

import resource
from collections.abc import Iterator

import pytest

from rendezvous.open_files import allow_open_files, num_open_files
from rendezvous.types import RendezvousError


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit; the soft one is a system's usual one during the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("max_size", "soft"), [(2, 1024), (128, 1024), (256, 1792)])
def test_soft_limit_grows_with_the_group_and_never_shrinks(hard: int, max_size: int, soft: int) -> None:
    allow_open_files(max_size)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_hard_limit_that_is_too_low_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert num_open_files(1000) > 4096
    with pytest.raises(RendezvousError, match="1000 nodes needs up to 6256 open files on each, and 4096 are allowed"):
        allow_open_files(1000)

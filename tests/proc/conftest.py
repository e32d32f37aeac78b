"""Runs that tests of several files compare with: each is done once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from mishaps import Outcome, train


@pytest.fixture(scope="session")
def without_mishaps(tmp_path_factory: pytest.TempPathFactory, fork_server: dict[str, str]) -> Callable[..., Outcome]:
    """Of arguments of scripts/mishaps.py: the outcome of an undisturbed run."""

    @cache
    def outcome(*args: str) -> Outcome:
        return train(tmp_path_factory.mktemp("without"), fork_server, args=args)

    return outcome

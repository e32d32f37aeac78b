"""The job's secret: made once, readable by its owner, never shown."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from p2pstate.cli import main
from rendezvous.keys import derive_keys, key_from_hex, make_key_file, read_key_file


def test_keygen_makes_a_file_for_its_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    before = os.umask(0)
    try:
        assert main(["keygen", str(path)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_key_file(str(path))) == 32


def test_keygen_never_overwrites_and_never_shows_the_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.key"
    assert main(["keygen", str(path)]) == 0
    secret = path.read_text()
    assert main(["keygen", str(path)]) == 1
    said = capsys.readouterr()
    assert path.read_text() == secret
    assert "is not overwritten" in said.err
    assert secret.strip() not in said.out + said.err


def test_keygen_where_nothing_can_be_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "none" / "run.key")]) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_two_secrets_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_key_file(str(tmp_path / name))
    assert read_key_file(str(tmp_path / "a")) != read_key_file(str(tmp_path / "b"))


def test_key_file_that_every_user_can_read_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    make_key_file(str(path))
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"mode 644.*chmod 600"):
        read_key_file(str(path))
    path.chmod(0o640)
    assert len(read_key_file(str(path))) == 32


@pytest.mark.parametrize(("text", "why"), [("not hex", "hexadecimal"), ("abcdef", "at least 16 bytes"), ("", "16")])
def test_wrong_secret_is_refused_without_being_shown(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        key_from_hex(text, "P2PSTATE_KEY")
    assert not text or text not in str(caught.value)


def test_keys_depend_on_secret_and_run() -> None:
    keys = {derive_keys(secret, run) for secret in (b"a" * 32, b"b" * 32) for run in ("one", "two")}
    assert len(keys) == 4

"""Token files: what comes out of them, and what is said when they are not what they were."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pstate.cli import main
from p2pstate.data import DataChanged, MmapTokens
from p2pstate.data.files import BLOCK_BYTES, NUM_BLOCKS
from p2pstate.data.pack import bytes_of, load_tokenizer, pack
from p2pstate.data.shards import Shards


def raw(path: Path, count: int, dtype: str = "uint16", first: int = 0) -> np.ndarray:
    tokens = ((np.arange(first, first + count) * 7919) % 60000).astype(dtype)
    tokens.tofile(path)
    return tokens


def rewrite(path: Path, place: int) -> None:
    """Another byte at ``place``, at the same size and time of modification."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)
        file.seek(place)
        file.write(bytes([old[0] ^ 255]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_tokens_windows_of_several_files_are_one_array(tmp_path: Path, dtype: str, suffix: str) -> None:
    paths, parts = [], []
    for number, count in enumerate((1000, 3, 1, 2500)):
        paths.append(tmp_path / f"{number}{suffix}")
        parts.append(((np.arange(count) * 7919 + number) % 251).astype(dtype))
        if suffix == ".npy":
            np.save(paths[-1], parts[-1])
        else:
            parts[-1].tofile(paths[-1])
    whole = np.concatenate(parts)
    data = MmapTokens(paths, length=65, stride=64, dtype=dtype)
    assert len(data) == (3504 - 65) // 64 + 1
    for index in range(len(data)):
        assert data[index].dtype == torch.int64
        assert data[index].tolist() == whole[index * 64 : index * 64 + 65].tolist()
    with pytest.raises(IndexError):
        data[len(data)]


def test_tokens_truncated_while_open_give_an_error_that_names_the_file(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", 50_000)
    raw(tmp_path / "b.bin", 50_000)
    data = MmapTokens([tmp_path / "a.bin", tmp_path / "b.bin"], length=100, dtype="uint16")
    data[900]
    os.truncate(tmp_path / "b.bin", 10_000)
    with pytest.raises(DataChanged, match=r"b\.bin has changed since it was opened: it has 10000 bytes instead of"):
        data[900]
    with pytest.raises(DataChanged, match=r"b\.bin"):
        data[500]  # whose bytes are still there, but belong to another file now
    assert len(data[0]) == 100  # the other file is as it was


def test_tokens_overwritten_while_open_give_an_error_that_names_the_file(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", 50_000)
    data = MmapTokens([tmp_path / "a.bin"], length=100, dtype="uint16")
    raw(tmp_path / "a.bin", 50_000, first=1)
    os.utime(tmp_path / "a.bin", ns=(0, 0))
    with pytest.raises(DataChanged, match="its size is the same"):
        data[0]


def test_tokens_resumed_on_other_files_are_refused_by_name(tmp_path: Path) -> None:
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path in paths:
        raw(path, 40_000)
    state = MmapTokens(paths, length=10, dtype="uint16").state_dict()
    MmapTokens(paths, length=10, dtype="uint16").load_state_dict(state)
    rewrite(tmp_path / "b.bin", 79_999)
    with pytest.raises(DataChanged, match=r"b\.bin is not the file in which the saved position was counted"):
        MmapTokens(paths, length=10, dtype="uint16").load_state_dict(state)
    with pytest.raises(DataChanged, match="counted in 2 token files, and now there are 1"):
        MmapTokens(paths[:1], length=10, dtype="uint16").load_state_dict(state)
    with pytest.raises(ValueError, match="windows of length 10; here length=11"):
        MmapTokens(paths, length=11, dtype="uint16").load_state_dict(state)


def test_tokens_resumed_on_a_copy_elsewhere_are_accepted(tmp_path: Path) -> None:
    raw(tmp_path / "a.bin", 40_000)
    state = MmapTokens([tmp_path / "a.bin"], length=10, dtype="uint16").state_dict()
    (tmp_path / "copy.bin").write_bytes((tmp_path / "a.bin").read_bytes())
    MmapTokens([tmp_path / "copy.bin"], length=10, dtype="uint16").load_state_dict(state)


@pytest.mark.parametrize(
    ("content", "dtype", "sentence"),
    [
        (b"abc", "uint16", "no whole number"),
        (b"abcd", None, "give dtype="),
        (b"abcd", "int64", "token files hold"),
        (b"", "uint16", "less than one window"),
        (b"abcd", "uint16", "less than one window"),
    ],
)
def test_tokens_of_files_that_hold_none_say_why(
    tmp_path: Path, content: bytes, dtype: str | None, sentence: str
) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        MmapTokens([tmp_path / "a.bin"], length=3, dtype=dtype)


def test_tokens_take_one_path_and_numpys_types_and_refuse_other_arguments(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(12)))
    assert MmapTokens(tmp_path / "a.bin", length=3, dtype=np.uint8)[1].tolist() == [3, 4, 5]
    assert len(MmapTokens(str(tmp_path / "a.bin"), length=3, dtype="uint16")) == 2
    with pytest.raises(ValueError, match="both count tokens"):
        MmapTokens(tmp_path / "a.bin", length=1.5, dtype="uint8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is no regular file"):
        MmapTokens(tmp_path, length=3, dtype="uint8")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"dtype": "uint8"}', b"\xff"])
def test_tokens_beside_a_description_that_is_none_say_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(12)))
    (tmp_path / "a.bin.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.bin\.json is damaged, or is not of p2pstate data pack"):
        MmapTokens(tmp_path / "a.bin", length=3, dtype="uint8")


@pytest.mark.parametrize("ends", [np.array([5, 3, 12]), np.array([99]), np.array([1.5]), None])
def test_tokens_with_damaged_ends_of_documents_say_so(tmp_path: Path, ends: Any) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(12)))
    if ends is None:
        (tmp_path / "a.bin.ends.npy").write_bytes(b"torn")
    else:
        np.save(tmp_path / "a.bin.ends.npy", ends)
    with pytest.raises(DataChanged, match=r"a\.bin\.ends\.npy"):
        MmapTokens(tmp_path / "a.bin", length=3, dtype="uint8", documents=True)


def test_tokens_of_npy_files_that_hold_something_else_say_so(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2), dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.zeros(4))
    np.save(tmp_path / "c.npy", np.zeros(4, dtype=np.uint16))
    np.save(tmp_path / "d.npy", np.zeros(4, dtype=np.uint8))
    (tmp_path / "e.npy").write_bytes(b"not NumPy's")
    np.save(tmp_path / "f.npy", np.zeros(4, dtype=np.uint16))
    torn = (tmp_path / "f.npy").read_bytes().replace(b"'shape': (4,), }", b"'shape': (4}    ")
    (tmp_path / "f.npy").write_bytes(torn)
    for name, sentence in (("a", "shape"), ("b", "float64"), ("e", "no .npy file"), ("f", "no .npy file")):
        with pytest.raises(ValueError, match=sentence):
            MmapTokens([tmp_path / f"{name}.npy"], length=2)
    with pytest.raises(ValueError, match="different types"):
        MmapTokens([tmp_path / "c.npy", tmp_path / "d.npy"], length=2)
    os.truncate(tmp_path / "c.npy", (tmp_path / "c.npy").stat().st_size - 2)
    with pytest.raises(DataChanged, match=r"c\.npy has changed since it was written"):
        MmapTokens([tmp_path / "c.npy"], length=2)


MEMORY_PROGRAM = """
import os, resource, sys
from p2pstate.data import MmapTokens
data = MmapTokens([sys.argv[1]], length=4096, dtype="uint16")
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
for index in range(len(data)):
    data[index]
print(resident() - before)
"""


def test_tokens_of_a_large_file_leave_memory_flat_and_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.resize(np.arange(60_000, dtype=np.uint16), 150_000_000).tofile(path)
    path.chmod(0o444)
    before = path.stat()
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert grown < 16 << 20, f"300 MB were read, and {grown >> 20} MB stayed resident"
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_shards_of_many_files_keep_few_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.bin" for number in range(300)]
    for path in paths:
        path.write_bytes(b"\x01\x00")
    shards = Shards(paths, dtype="uint16")
    before = len(os.listdir("/proc/self/fd"))
    for start in range(300):
        shards.read(start, 1)
    assert len(os.listdir("/proc/self/fd")) - before <= 128
    shards.close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- packing


def jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def test_pack_keeps_documents_and_their_boundaries(tmp_path: Path) -> None:
    texts = ["first", "", "the second document", "x"]
    (tmp_path / "a.txt").write_text("plain ümlaut")
    packed = pack([jsonl(tmp_path / "b.jsonl", texts), tmp_path / "a.txt"], tmp_path / "o.bin", bytes_of, end_token=256)
    expected = [token for text in [*texts, "plain ümlaut"] for token in [*text.encode(), 256]]
    assert (packed.num_documents, packed.num_tokens) == (5, len(expected))
    data = MmapTokens([tmp_path / "o.bin"], length=4, documents=True)
    data.check_all()
    place = 0
    seen: list[tuple[int, int]] = []
    for index in range(len(data)):
        window = data[index]
        for token, document, position in zip(*(window[key].tolist() for key in window), strict=True):
            assert token == expected[place]
            if position == 0:
                assert place == 0 or expected[place - 1] == 256
            seen.append((document, position))
            place += 1
        assert window["documents"][0] == 0
    starts = [number for number, (_, position) in enumerate(seen) if position == 0]
    assert starts == [0, *(number + 1 for number, token in enumerate(expected[: len(seen) - 1]) if token == 256)]


def test_pack_of_two_files_read_together_keeps_their_documents_apart(tmp_path: Path) -> None:
    pack([jsonl(tmp_path / "a.jsonl", ["aaa", "bb"])], tmp_path / "a.bin", bytes_of)
    pack([jsonl(tmp_path / "b.jsonl", ["cccc", "d"])], tmp_path / "b.bin", bytes_of)
    window = MmapTokens([tmp_path / "a.bin", tmp_path / "b.bin"], length=10, documents=True)[0]
    assert bytes(window["tokens"].tolist()) == b"aaabbccccd"
    assert window["documents"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert window["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]


def test_pack_finds_a_flipped_byte_at_open_or_by_reading_all(tmp_path: Path) -> None:
    document = "0123456789abcdef" * (NUM_BLOCKS * BLOCK_BYTES // 8)
    pack([jsonl(tmp_path / "a.jsonl", [document])], tmp_path / "a.bin", bytes_of, dtype="uint8")
    rewrite(tmp_path / "a.bin", BLOCK_BYTES + 1)  # between the blocks that a fingerprint reads
    data = MmapTokens([tmp_path / "a.bin"], length=4)
    with pytest.raises(DataChanged, match=r"a\.bin has changed since it was packed"):
        data.check_all()
    rewrite(tmp_path / "a.bin", 0)
    with pytest.raises(DataChanged, match=r"a\.bin has changed since it was packed"):
        MmapTokens([tmp_path / "a.bin"], length=4)
    os.truncate(tmp_path / "a.bin", 1000)
    with pytest.raises(DataChanged, match="it has 1000 bytes instead of"):
        MmapTokens([tmp_path / "a.bin"], length=4)


def test_pack_that_fails_leaves_nothing_but_what_was_there(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "good.jsonl", ["one"])
    pack([good], tmp_path / "o.bin", bytes_of)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "no text"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: no JSON object with a field 'text'"):
        pack([good, tmp_path / "bad.jsonl"], tmp_path / "o.bin", bytes_of)
    with pytest.raises(ValueError, match=r"good\.jsonl:1: tokens from 300 to 300 do not fit into uint8"):
        pack([good], tmp_path / "o.bin", lambda _: [300], dtype="uint8")
    for tokens, sentence in (
        ({"input_ids": [1]}, "takes its input_ids"),
        ([1.5], "not integers in a row"),
        (["1"], "not integers in a row"),
        ([[1, 2]], "not integers in a row"),
        (None, "the tokenizer failed: TypeError"),
    ):
        with pytest.raises(ValueError, match=rf"good\.jsonl:1: .*{sentence}"):
            pack([good], tmp_path / "o.bin", lambda _, tokens=tokens: tokens)  # type: ignore[misc]
    with pytest.raises(ValueError, match="there is no folder"):
        pack([good], tmp_path / "nowhere" / "o.bin", bytes_of)
    with pytest.raises(ValueError, match="is an input, too"):
        pack([tmp_path / "o.bin"], tmp_path / "o.bin", bytes_of)
    (tmp_path / "bad.jsonl").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_pack_reads_compressed_files_and_leaves_out_marks_of_byte_order(tmp_path: Path) -> None:
    line = b'{"text": "ab"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfab")
    packed = pack([tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.txt")], tmp_path / "o.bin", bytes_of)
    assert (packed.num_documents, packed.num_tokens) == (4, 8)
    assert (tmp_path / "o.bin").read_bytes() == b"a\0b\0" * 4
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(line * 100)[:-9])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz is no whole \.gz file"):
        pack([tmp_path / "cut.jsonl.gz"], tmp_path / "p.bin", bytes_of)
    assert not list(tmp_path.glob("p.bin*"))


def test_pack_command_writes_what_the_data_set_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["hello", "world"], field="body")
    arguments = ["data", "pack", str(source), "--output", str(tmp_path / "o.bin"), "--field", "body"]
    assert main([*arguments, "--end-token", "10"]) == 0
    assert "12 tokens of 2 documents" in capsys.readouterr().out
    assert bytes(MmapTokens([tmp_path / "o.bin"], length=12)[0].tolist()) == b"hello\nworld\n"
    assert main([*arguments, "--tokenizer", "no_such_module:f"]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
    assert main([*arguments, "--dtype", "int7"]) == 1
    assert "token files hold" in capsys.readouterr().err


def test_pack_tokenizer_is_named_by_module_and_function() -> None:
    assert list(load_tokenizer("p2pstate.data.pack:bytes_of")("ab")) == [97, 98]
    assert list(load_tokenizer("builtins:str.encode")("ab")) == [97, 98]
    for name, sentence in (("json", "name it module:function"), ("json:decoder", "cannot be called")):
        with pytest.raises(ValueError, match=sentence):
            load_tokenizer(name)


def test_pack_of_a_pipe_or_a_folder_says_what_it_takes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is no regular file: give files"):
            pack([path], tmp_path / "o.bin", bytes_of)

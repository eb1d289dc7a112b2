"""Checkpoints: bits that come back, damage that is named, saves that are interrupted. The reference reader is safetensors'."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.serialization._base import parse_size_to_int
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fusedblock.io as fio
from fusedblock.io import Checkpoint, CheckpointError, parse_size_bytes, write_checkpoint


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {key: bits(value) for key, value in tensors.items()}


def read(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(path) as checkpoint:
        return {key: checkpoint.tensor(key) for key in checkpoint}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def sample(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (16, 8), "layer.q": (8, 8), "layer.k": (4, 8), "norm": (8,), "head": (16, 8)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, 16), dtype=torch.uint8)  # NaN patterns included
    tensors = {"matrix": raw.view(dtype), "scalar": raw.view(dtype)[0, 0, 0].clone(), "empty": raw[:0].view(dtype)}
    write_checkpoint(tensors, tmp_path)
    assert all_bits(read(tmp_path)) == all_bits(tensors) == all_bits(load_file(tmp_path / "model.safetensors"))
    with Checkpoint(tmp_path) as checkpoint:
        assert {checkpoint.dtype(key) for key in checkpoint} == {dtype}
        assert checkpoint.shape("matrix") == tensors["matrix"].shape and checkpoint.shape("scalar") == ()
        assert checkpoint.shape("empty") == tensors["empty"].shape


def test_views_and_shared_storage_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {"base": base, "again": base, "row": base[1], "overlap": base[1:3], "transposed": base.T, "strided": base[:, ::2]}
    tensors |= {"expanded": base[0].expand(3, 6), "conj": torch.complex(base, base + 1).conj(), "inside": torch.ones(9)[2:5]}
    write_checkpoint(tensors, tmp_path / "one.safetensors")
    expected = {key: value.clone().resolve_conj() for key, value in tensors.items()}
    assert all_bits(load_file(tmp_path / "one.safetensors")) == all_bits(expected)


def test_parameters_are_written_and_keep_their_gradients(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    weight.grad = torch.ones(3)
    write_checkpoint({"weight": weight}, tmp_path)
    assert weight.requires_grad and torch.equal(weight.grad, torch.ones(3))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], weight.detach())


@pytest.mark.parametrize("limit", [300, "400B", 513, "0.6KB", "1KB", "5GB"])
def test_shards_are_those_of_huggingface(tmp_path: Path, limit: int | str) -> None:
    tensors = sample(0)
    written = write_checkpoint(tensors, tmp_path, limit)
    expected = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=parse_size_bytes(limit)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)
    assert {name: sorted(load_file(tmp_path / name)) for name in expected.filename_to_tensors} == {
        name: sorted(keys) for name, keys in expected.filename_to_tensors.items()
    }
    for name in expected.filename_to_tensors:
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    if expected.is_sharded:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index == {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
        assert written[-1].name == "model.safetensors.index.json"
    assert all_bits(read(tmp_path)) == all_bits(tensors)


@pytest.mark.parametrize("size", ["5GB", "20KB", "1.5MB", "2TB", "750KB"])
def test_sizes_are_those_of_huggingface(size: str) -> None:
    assert parse_size_bytes(size) == parse_size_to_int(size)


def test_sizes() -> None:
    assert [parse_size_bytes(size) for size in (7, "7", "7b", "2KiB", " 1 GiB ")] == [7, 7, 7, 2048, 1 << 30]
    for bad in ("", "GB", "5XB", "-5GB", "1e9", 0, -1, "0KB", True, None, 1.5):
        with pytest.raises(ValueError, match=re.escape(repr(bad))):
            parse_size_bytes(bad)  # type: ignore[arg-type]


def test_reading_is_lazy_and_sliced(tmp_path: Path) -> None:
    tensors = sample(1) | {"scalar": torch.tensor(3.0)}
    write_checkpoint(tensors, tmp_path, 600)
    with Checkpoint(tmp_path / "model.safetensors.index.json") as checkpoint:
        assert set(checkpoint.keys()) == set(tensors) and len(checkpoint) == len(tensors) and "norm" in checkpoint
        assert {checkpoint.file_of(key) for key in checkpoint} == set(checkpoint.files) and len(checkpoint.files) > 1
        mapped = Path("/proc/self/maps").read_text() if sys.platform == "linux" else str(checkpoint.files)
        assert all(path.name in mapped for path in checkpoint.files)
        for path in tmp_path.iterdir():
            path.unlink()  # the mapping holds the files
        assert torch.equal(checkpoint.slice("embed", (slice(3, 9), slice(2, 8))), tensors["embed"][3:9, 2:8])
        assert torch.equal(checkpoint.slice("embed", 5), tensors["embed"][5])
        assert torch.equal(checkpoint.slice("scalar", ...), tensors["scalar"])
        kept = checkpoint.tensor("head")
        with pytest.raises(KeyError, match="'nothing'"):
            checkpoint.tensor("nothing")
    assert torch.equal(kept, tensors["head"])
    with pytest.raises(ValueError, match="closed"):
        checkpoint.tensor("head")


def test_what_is_read_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    write_checkpoint({"x": torch.ones(4)}, tmp_path)
    read(tmp_path)["x"].zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], torch.ones(4))


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.safetensors"
    write_checkpoint({"first": torch.ones(3), "second": torch.ones(2, 2)}, file)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=rf"cut\.safetensors: truncated.*\b{size} bytes"):
            Checkpoint(file)
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"'second' ends at byte {len(whole)}, the file has {len(whole) - 1} bytes"):
        Checkpoint(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=f"end at byte {len(whole)}, the file has {len(whole) + 1} bytes"):
        Checkpoint(file)


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS: dict[str, tuple[object, int, str]] = {
    "not_json": (b"{'x': 1}", 8, "header is not JSON"),
    "not_utf8": (b'{"\xff": 1}', 8, "header is not JSON"),
    "a_list": ([], 8, "header is not a JSON object"),
    "duplicate": (f'{{"x": {json.dumps(entry())}, "x": {json.dumps(entry("I32"))}}}'.encode(), 8, "duplicate key 'x'.*F32.*I32"),
    "no_shape": ({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "entry of 'x' is malformed"),
    "negative": ({"x": entry(shape=[-2])}, 8, "entry of 'x' is malformed"),
    "three_offsets": ({"x": entry(offsets=[0, 4, 8])}, 8, "entry of 'x' is malformed"),
    "dtype_list": ({"x": {**entry(), "dtype": []}}, 8, "entry of 'x' is malformed"),
    "huge_number": (b'{"x": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', 8, "header is not JSON"),
    "dtype": ({"x": entry("Q4")}, 8, "'x' has dtype 'Q4'"),
    "shape": ({"x": entry(shape=[3])}, 8, "'x' of shape.*takes 12 bytes, its header entry gives 8"),
    "overlap": ({"x": entry(), "y": entry(offsets=[4, 12])}, 12, "'y' starts at data byte 4, the tensor before it ends at 8"),
    "hole": ({"x": entry(), "y": entry(offsets=[12, 20])}, 20, "'y' starts at data byte 12, the tensor before it ends at 8"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_bad_header_is_named(tmp_path: Path, name: str) -> None:
    header, data_bytes, message = BAD_HEADERS[name]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "bad.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: .*" + message):
        Checkpoint(file)


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
BAD_INDICES: dict[str, tuple[dict[str, list[str]], object, str]] = {
    "missing_shard": ({A: ["x"]}, {"x": A, "y": B}, f"'y' is in shard '{B}', which does not exist"),
    "in_two_shards": ({A: ["x", "y"], B: ["y"]}, {"x": A, "y": B}, f"duplicate key 'y', in '{A}' and in '{B}'"),
    "in_the_other": ({A: ["x", "y"], B: ["z"]}, {"x": A, "y": B, "z": B}, f"'y' is in '{B}', .* not hold it; '{A}' does"),
    "in_no_shard": ({A: ["x"], B: ["y"]}, {"x": A, "y": B, "z": B}, f"'z' is in '{B}', .* not hold it; no shard does"),
    "not_listed": ({A: ["x", "w"], B: ["y"]}, {"x": A, "y": B}, f"{A}: holds 'w', which model.safetensors.index.json does not"),
    "listed_twice": ({A: ["x"], B: ["y"]}, f'{{"x": "{A}", "y": "{A}", "y": "{B}"}}', f"duplicate key 'y'.*'{A}' and '{B}'"),
    "elsewhere": ({A: ["x"]}, {"x": f"../{A}"}, f"'x' is in '../{A}', which is not a file name"),
    "no_map": ({A: ["x"]}, [], "has no weight_map"),
    "no_name": ({A: ["x"]}, {"x": 1}, "has no weight_map from names to file names"),
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_index_and_shards_that_disagree_are_named(tmp_path: Path, name: str) -> None:
    shards, weight_map, message = BAD_INDICES[name]
    for file, keys in shards.items():
        save_file({key: torch.ones(2) for key in keys}, tmp_path / file)
    text = weight_map if isinstance(weight_map, str) else json.dumps(weight_map)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {text}}}')
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_no_checkpoint_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        Checkpoint(tmp_path / "absent")
    save_file({"x": torch.ones(2)}, tmp_path / A)
    with pytest.raises(FileNotFoundError, match=rf"neither model\.safetensors nor .*{A}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "key, value, kind, message",
    [
        ("x", torch.ones(2, 3, device="meta"), ValueError, r"'x' of shape \(2, 3\) is on the meta device"),
        ("x", torch.eye(2).to_sparse(), ValueError, "'x'.*sparse"),
        ("x", torch.ones(2, dtype=torch.complex128), ValueError, "'x' has dtype torch.complex128"),
        ("x", [1.0], TypeError, "'x' is no tensor but list"),
        (3, torch.ones(2), TypeError, "got 3 of type int"),
        ("__metadata__", torch.ones(2), ValueError, "'__metadata__' is reserved"),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(
    tmp_path: Path, key: object, value: object, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        write_checkpoint({"good": torch.ones(2), key: value}, tmp_path / "new")  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_one_file_is_one_file(tmp_path: Path) -> None:
    (tmp_path / A).write_bytes(b"another")
    write_checkpoint(sample(0), tmp_path / "weights.safetensors", "10KB")
    assert sorted(path.name for path in tmp_path.iterdir()) == [A, "weights.safetensors"]  # a single file cleans up nothing
    with pytest.raises(ValueError, match=r"one file would hold 1440 bytes, max_shard_size is 1000 bytes \('1KB'\)"):
        write_checkpoint(sample(0), tmp_path / "other.safetensors", "1KB")
    for taken in (tmp_path / "model.safetensors.index.json", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="neither a directory nor a name ending in .safetensors"):
            write_checkpoint(sample(0), taken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", A, "weights.safetensors"]


def test_files_get_the_mode_the_umask_grants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files = write_checkpoint(sample(0), tmp_path, 600)
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {oct(0o640)}


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-extra.safetensors").write_bytes(b"not ours")
    for seed, limit in enumerate(["5GB", 600, 300, 600, "5GB", 300]):
        files = write_checkpoint(sample(seed), tmp_path, limit)
        expected = {"config.json", "model-extra.safetensors", *(file.name for file in files)}
        assert {path.name for path in tmp_path.iterdir()} == expected
        assert all_bits(read(tmp_path)) == all_bits(sample(seed))


def test_a_checkpoint_can_be_saved_over_itself(tmp_path: Path) -> None:
    write_checkpoint(sample(0), tmp_path, 600)
    with Checkpoint(tmp_path) as checkpoint:
        write_checkpoint({key: checkpoint.tensor(key) for key in checkpoint}, tmp_path, 600)
    assert all_bits(read(tmp_path)) == all_bits(sample(0))


class Stop(Exception):
    pass


def nth_call(function: Callable, number: int, action: Callable[[], None]) -> Callable:
    """`function`, but its `number`-th call leaves half a file, if it writes one, and then does `action`."""
    count = 0

    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        if count == number:
            if function is save_file:
                Path(args[1]).write_bytes(b"half a file")
            action()
        return function(*args, **kwargs)

    return wrapped


def stop() -> None:
    raise Stop


@pytest.mark.parametrize("old_limit", ["5GB", 600, 300])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_save_that_fails_while_writing_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_limit: int | str, call: int
) -> None:
    write_checkpoint(sample(0), tmp_path, old_limit)
    before = contents(tmp_path)
    monkeypatch.setattr(fio, "save_file", nth_call(save_file, call, stop))
    with pytest.raises(Stop):
        write_checkpoint(sample(1), tmp_path, 600)
    assert contents(tmp_path) == before
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "save_file", nth_call(save_file, 2, stop))
    with pytest.raises(Stop):
        write_checkpoint(sample(1), tmp_path, 600)
    assert list(tmp_path.iterdir()) == []


def readable_is(directory: Path, *allowed: dict[str, torch.Tensor]) -> bool:
    """True: it opens and is one of `allowed`, whole. False: it does not open."""
    try:
        now = all_bits(read(directory))
    except (CheckpointError, FileNotFoundError):
        return False
    assert now in [all_bits(tensors) for tensors in allowed]
    return True


@pytest.mark.parametrize("old_limit", ["5GB", 600, 300])
@pytest.mark.parametrize("function, call", [("save_file", 1), ("save_file", 3), *(("replace", n) for n in (1, 2, 3, 4))])
def test_a_killed_save_never_mixes_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_limit: int | str, function: str, call: int
) -> None:
    old, new = sample(0), sample(1)
    write_checkpoint(old, tmp_path, old_limit)
    owner = fio if function == "save_file" else os
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(owner, function, nth_call(getattr(owner, function), call, lambda: os._exit(7)))
            write_checkpoint(new, tmp_path, 600)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for path in tmp_path.glob("*.safetensors"):  # whole files under final names, whoever wrote them
        held = all_bits(read(path)).items()
        assert held <= all_bits(old).items() or held <= all_bits(new).items()
    opened = readable_is(tmp_path, old, new)
    # only where new shards take the names of old ones can the directory be without an index for a moment
    assert opened or (old_limit == 600 and function == "replace")
    write_checkpoint(new, tmp_path, 600)
    assert all_bits(read(tmp_path)) == all_bits(new)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir()), "what the killed save left is gone"


def test_no_transformers_needed() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(fio.__file__).parents[1])!r}); sys.modules["transformers"] = None
import fusedblock.io
assert not any(name.startswith("fusedblock.") and name not in ("fusedblock.io", "fusedblock.options") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

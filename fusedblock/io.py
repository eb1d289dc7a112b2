"""Safetensors checkpoints: read lazily, write atomically.

This room knows names and tensors, no modules. The format is the one of https://github.com/huggingface/safetensors
(8 bytes little-endian header length, JSON header, data); the layout of a directory is the one HuggingFace reads and writes:
``model.safetensors``, or ``model-00001-of-0000N.safetensors`` shards with ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["Checkpoint", "CheckpointError", "parse_size_bytes", "write_checkpoint"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SHARD_NAME = "model-{:05d}-of-{:05d}.safetensors"
_SHARD_PATTERN = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY_SUFFIX = ".tmp"

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
_Index = int | slice | EllipsisType


class CheckpointError(ValueError):
    """A checkpoint that is damaged, contradicts itself, or does not fit what it is loaded into."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """The tensors of a safetensors checkpoint by name, read from memory-mapped files when asked for.

    Opening reads the headers alone and checks them: every file is exactly as long as its header says, every name of the
    index is in the shard that the index names, no name is in two places. After that, reading a tensor can fail no more.

    Args:
        path: a ``.safetensors`` file, an index ``.json`` file, or a directory with ``model.safetensors`` or, failing that,
            ``model.safetensors.index.json``.
        prefix: only the names that start with it. The shards that the index gives none of them are not opened, and need not be
            there.

    Raises:
        FileNotFoundError: ``path`` or, for a directory, a checkpoint in it does not exist.
        CheckpointError: a truncated or malformed file, a missing shard, an index and shards that disagree, or a duplicate
            name. The message names file, key and both values.

    A context manager; leaving it unmaps the files. Tensors already read stay valid.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str = "") -> None:
        self.path = Path(path)
        self._handles: dict[Path, Any] = {}
        source = _resolve(self.path)
        if source.suffix == ".json":
            self._entries = _read_sharded(source, prefix)
        else:
            self._entries = {key: entry for key, entry in _read_header(source).items() if key.startswith(prefix)}
        try:
            for file in self.files or (() if source.suffix == ".json" else (source,)):
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            self.close()
            raise CheckpointError(f"{file}: cannot be read: {error}") from error

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._handles.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold at least one tensor."""
        return tuple(dict.fromkeys(entry.file for entry in self._entries.values()))

    def keys(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of ``key``, from the header."""
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """dtype of ``key``, from the header."""
        return self._entry(key).dtype

    def file_of(self, key: str) -> Path:
        """The file that holds ``key``."""
        return self._entry(key).file

    def tensor(self, key: str) -> Tensor:
        """The tensor ``key`` on the CPU, backed by a private mapping of the file: pages are read when touched."""
        return self._handle(key).get_tensor(key)

    def slice(self, key: str, index: _Index | tuple[_Index, ...]) -> Tensor:
        """``tensor(key)[index]`` for integers, slices and an ellipsis; only the part asked for is read."""
        return self._handle(key).get_slice(key)[index]

    def _entry(self, key: str) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise KeyError(f"{self.path}: no tensor {key!r}") from None

    def _handle(self, key: str) -> Any:
        entry = self._entry(key)
        if not self._handles:
            raise ValueError(f"{self.path}: the checkpoint is closed")
        return self._handles[entry.file]


def _resolve(path: Path) -> Path:
    if path.is_dir():
        for name in (SINGLE_NAME, INDEX_NAME):
            if (path / name).is_file():
                return path / name
        present = sorted(file.name for file in path.glob("*.safetensors"))
        found = f"; it holds {present}, pass one of them" if present else ""
        raise FileNotFoundError(f"{path}: holds neither {SINGLE_NAME} nor {INDEX_NAME}{found}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file or directory")
    return path


def names_of(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names in the checkpoint at ``path``, as `Checkpoint` takes it. Of a sharded one, only the index is read."""
    source = _resolve(Path(path))
    return tuple(_weight_map(source) if source.suffix == ".json" else _read_header(source))


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index.read_bytes(), index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map from names to file names")
    return weight_map


def _read_sharded(index: Path, prefix: str) -> dict[str, _Entry]:
    whole = _weight_map(index)
    weight_map = {key: name for key, name in whole.items() if key.startswith(prefix)}
    first_key = {name: key for key, name in reversed(weight_map.items())}
    headers: dict[str, dict[str, _Entry]] = {}
    for name, key in first_key.items():
        if name != Path(name).name:
            raise CheckpointError(f"{index}: {key!r} is in {name!r}, which is not a file name in the index's own directory")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: {key!r} is in shard {name!r}, which does not exist in {index.parent}")
        headers[name] = _read_header(index.parent / name)

    for name, header in headers.items():
        for key in header:
            owner = whole.get(key)
            if owner is None:
                raise CheckpointError(f"{index.parent / name}: holds {key!r}, which {index.name} does not list")
            if owner != name and key in headers.get(owner, ()):
                raise CheckpointError(f"{index}: duplicate key {key!r}, in {name!r} and in {owner!r}")
    for key, name in weight_map.items():
        if key not in headers[name]:
            holders = [other for other, header in headers.items() if key in header]
            raise CheckpointError(
                f"{index}: says that {key!r} is in {name!r}, but that file does not hold it; "
                + (f"{holders[0]!r} does" if holders else "no shard does")
            )
    return {key: headers[name][key] for key, name in weight_map.items()}


def _read_header(file: Path) -> dict[str, _Entry]:
    """Names, shapes and dtypes of one file, checked against its size.

    ``safe_open`` checks sizes too, but names neither the file nor the tensor, and takes the last of two equal names.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: truncated: {file_bytes} bytes, the header length alone takes 8")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if 8 + header_bytes > file_bytes or header_bytes > _HEADER_LIMIT_BYTES:
            raise CheckpointError(
                f"{file}: truncated or not a safetensors file: its header ends at byte {8 + header_bytes}, "
                f"the file has {file_bytes} bytes (headers are at most {_HEADER_LIMIT_BYTES} bytes)"
            )
        header = _read_json(stream.read(header_bytes), file, "header")
    header.pop("__metadata__", None)

    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for key, value in header.items():
        try:
            dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            valid = isinstance(dtype, str) and all(isinstance(number, int) and number >= 0 for number in (*shape, start, end))
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise CheckpointError(f"{file}: the header entry of {key!r} is malformed: {value!r}")
        if dtype not in _DTYPES:
            raise CheckpointError(f"{file}: {key!r} has dtype {dtype!r}, which torch or this version does not know")
        entries[key] = _Entry(file, shape, _DTYPES[dtype])
        nbytes = _nbytes(shape, _DTYPES[dtype])
        if end - start != nbytes:
            raise CheckpointError(
                f"{file}: {key!r} of shape {shape} and dtype {dtype} takes {nbytes} bytes, its header entry gives {end - start}"
            )
        spans.append((start, end, key))

    base = 8 + header_bytes
    position = 0
    for start, end, key in sorted(spans):
        if start != position:
            raise CheckpointError(f"{file}: {key!r} starts at data byte {start}, the tensor before it ends at {position}")
        if base + end > file_bytes:
            raise CheckpointError(f"{file}: truncated: {key!r} ends at byte {base + end}, the file has {file_bytes} bytes")
        position = end
    if base + position != file_bytes:
        raise CheckpointError(f"{file}: its tensors end at byte {base + position}, the file has {file_bytes} bytes")
    return entries


def _read_json(text: bytes, file: Path, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{file}: duplicate key {key!r} in its {what}: {result[key]!r} and {value!r}")
            result[key] = value
        return result

    try:
        result = json.loads(text, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or an integer of too many digits
        raise CheckpointError(f"{file}: its {what} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise CheckpointError(f"{file}: its {what} is not a JSON object")
    return result


def _nbytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return count


def parse_size_bytes(size: int | str) -> int:
    """Bytes of a size such as ``5_000_000``, ``"5GB"`` (decimal, 10^9, as HuggingFace counts) or ``"5GiB"`` (2^30).

    Raises:
        ValueError: not a positive number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        count: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size) if isinstance(size, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"size {size!r} is not a number of bytes such as 5000000, '5GB' or '5GiB'")
        count = float(match[1]) * _UNITS[match[2].upper()]
    if count < 1:
        raise ValueError(f"size {size!r} is less than one byte")
    return int(count)


def write_checkpoint(
    tensors: Mapping[str, Tensor], path: str | os.PathLike[str], max_shard_size: int | str = "5GB"
) -> list[Path]:
    """Write ``tensors`` as a safetensors checkpoint that HuggingFace's ``from_pretrained`` reads.

    Every tensor is written with its own values, bit for bit, under its own name; strides and shared storage are not kept.

    Args:
        tensors: name -> dense tensor, any device but meta.
        path: a directory (made if need be), which gets ``model.safetensors`` or, above ``max_shard_size``, shards and an
            index; or a name ending in ``.safetensors``, which gets exactly one file.
        max_shard_size: bytes, or a string such as ``"5GB"``. Tensors are put into shards in their order, as HuggingFace does;
            one larger than this gets a shard of its own.

    Returns:
        The files written, the index last.

    Raises:
        TypeError: a name that is no string or a value that is no tensor.
        ValueError: a meta, sparse, quantised or distributed tensor, a dtype that safetensors lacks (the message names the key);
            a single file asked for that would exceed ``max_shard_size``; a ``path`` that is neither kind.

    All files are first written and synced in a temporary directory inside the target directory, then renamed, the index
    last, so no final name ever holds half a file, and a failure while writing leaves the checkpoint that was there before.
    Where new shards take the names of old ones, the old index is removed before the first rename: a crash between two renames
    leaves a directory that refuses to open, never one that mixes two checkpoints. Last, what the previous save left and this
    one does not use (shards, index or single file, the temporary directory of a killed save) is removed.
    """
    limit = parse_size_bytes(max_shard_size)
    path = Path(path)
    for key, value in tensors.items():
        _check_writable(key, value)
    shards = _split(tensors, limit)
    if path.suffix == ".safetensors":
        if len(shards) > 1:
            total = sum(_nbytes(value.shape, value.dtype) for value in tensors.values())
            raise ValueError(
                f"{path}: one file would hold {total} bytes, max_shard_size is {limit} bytes ({max_shard_size!r}); "
                "give a directory, or a larger max_shard_size"
            )
        directory, names = path.parent, [path.name]
    elif path.suffix == ".json" or (path.exists() and not path.is_dir()):
        raise ValueError(f"{path}: is neither a directory nor a name ending in .safetensors")
    else:
        directory = path
        names = [_SHARD_NAME.format(i + 1, len(shards)) for i in range(len(shards))] if len(shards) > 1 else [SINGLE_NAME]
    directory.mkdir(parents=True, exist_ok=True)

    final = [directory / name for name in names]
    # a directory and not temporary names, because save_file makes temporary names of its own next to its target
    temporary = Path(tempfile.mkdtemp(prefix=_temporary_prefix(path, directory), suffix=_TEMPORARY_SUFFIX, dir=directory))
    try:
        for name, keys in zip(names, shards, strict=True):
            _write_shard({key: tensors[key] for key in keys}, temporary / name)
        if len(shards) > 1:
            weight_map = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
            total = sum(_nbytes(value.shape, value.dtype) for value in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            with (temporary / INDEX_NAME).open("w", encoding="utf-8") as stream:
                stream.write(json.dumps(index, indent=2, sort_keys=True) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            if any(file.exists() for file in final):
                (directory / INDEX_NAME).unlink(missing_ok=True)
                _sync_directory(directory)
            final.append(directory / INDEX_NAME)
        for file in final:
            os.replace(temporary / file.name, file)
        _sync_directory(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if path == directory:
        _remove_stale(directory, {file.name for file in final})
    return final


def _temporary_prefix(path: Path, directory: Path) -> str:
    return f".{SINGLE_NAME if path == directory else path.name}."


def _check_writable(key: str, value: Tensor) -> None:
    if not isinstance(key, str):
        raise TypeError(f"tensor names are strings, got {key!r} of type {type(key).__name__}")
    if key == "__metadata__":
        raise ValueError("'__metadata__' is reserved by the safetensors format and cannot name a tensor")
    if not isinstance(value, Tensor):
        raise TypeError(f"{key!r} is no tensor but {type(value).__name__}")
    if value.is_meta:
        raise ValueError(f"{key!r} of shape {tuple(value.shape)} is on the meta device and has no values to save")
    if type(value.data) is not Tensor or value.layout is not torch.strided or value.is_quantized:
        kind = type(value.data).__name__
        raise ValueError(f"{key!r} is a {kind} of layout {value.layout}; only whole dense tensors can be saved, gather it first")
    if value.dtype not in _DTYPES.values():
        raise ValueError(f"{key!r} has dtype {value.dtype}, which safetensors cannot hold")


def _split(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Names per shard, filled in order: the rule of huggingface_hub's ``split_torch_state_dict_into_shards``."""
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for key, value in tensors.items():
        nbytes = _nbytes(value.shape, value.dtype)
        if nbytes > limit:  # alone, and the shard being filled goes on after it
            shards.append([key])
            continue
        if current_bytes + nbytes > limit:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(key)
        current_bytes += nbytes
    if current or not shards:
        shards.append(current)
    return shards


def _write_shard(tensors: Mapping[str, Tensor], file: Path) -> None:
    file.touch()
    mode = file.stat().st_mode & 0o777  # save_file makes files of mode 600; keep what the umask grants
    seen: set[int] = set()
    values: dict[str, Tensor] = {}
    for key, value in tensors.items():
        value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = value.untyped_storage()
        # save_file refuses tensors that share storage, and those that are part of a larger one would be ambiguous
        if value.numel() and (storage.data_ptr() in seen or storage.nbytes() != value.nbytes):
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        values[key] = value
    save_file(values, file, metadata={"format": "pt"})
    os.chmod(file, mode)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(directory: Path, keep: set[str]) -> None:
    prefix = _temporary_prefix(directory, directory)
    for entry in directory.iterdir():
        if entry.is_dir():
            if entry.name.startswith(prefix) and entry.name.endswith(_TEMPORARY_SUFFIX):
                shutil.rmtree(entry, ignore_errors=True)
        elif entry.name not in keep and (entry.name in (SINGLE_NAME, INDEX_NAME) or _SHARD_PATTERN.fullmatch(entry.name)):
            entry.unlink(missing_ok=True)

"""A checkpoint's digest identifies the weights in a folder of safetensors: equal for every split into files and every
path.

Headers are read whole and tensors in samples, by at most `MOST_READS` reads, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvmover.errors import KvmoverError
from kvmover.prepared import prepared

#: The number of tensors that are sampled, and the bytes of each sample.
SAMPLED_TENSORS = 768
SAMPLE_BYTES = 4096

#: The most reads of a checkpoint: its index, one header a file (two if it is long), and the samples.
MOST_READS = 1100

#: The format's limit of a header and of an index; the part of a header that is read first.
MOST_HEADER_BYTES = 100_000_000
_FIRST_BYTES = 256 << 10

#: Bytes of an adapter in memory at a time.
_PART_BYTES = 4 << 20

#: Names of tensors that are always sampled: every fine-tuning changes them, and every model has them.
_ALWAYS = ("norm", "embed", "wte", "wpe", "ln_", ".ln")

#: Fields of an adapter's configuration that have no effect on its output.
_ASIDE = {"base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version"}
_CONFIGURATION = "adapter_config.json"

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class UnknownWeights(KvmoverError):
    """Weights that their files cannot identify; the message has the reason."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: Annotated[str, msgspec.Meta(max_length=64)]
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


@prepared
class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class TensorPlace(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a checkpoint: bytes `start` to `stop` of `file`, numbers of `dtype` in `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    def described(self) -> bytes:
        """Returns name, dtype and shape as bytes, different for any two triples."""
        return msgspec.json.encode((self.name, self.dtype, self.shape)) + b"\n"

    def sampled(self) -> tuple[int, int]:
        """Returns the position in the file and the length of the sample, whose place in the tensor is drawn by its
        name.
        """
        nbytes = min(SAMPLE_BYTES, self.stop - self.start)
        room = self.stop - self.start - nbytes + 1
        return self.start + int.from_bytes(_drawn(self.name), "little") % room, nbytes


@dataclass(frozen=True, slots=True)
class CheckpointDigest:
    """A digest of 64 hexadecimal digits, the number of tensors, and the number of reads made."""

    digest: str
    tensors: int
    reads: int


def digest_of_checkpoint(folder: Path) -> CheckpointDigest:
    """Returns the digest of the safetensors in `folder`: (name, dtype, shape) of all tensors in order of their names,
    and SAMPLE_BYTES of up to SAMPLED_TENSORS.

    The result is cached until a file changes. Raises UnknownWeights if the folder has no safetensors, files contradict
    each other, or a file cannot be read.
    """
    try:
        files, reads = _files_of(folder)
        return _digest_of_files(_signed(files), reads)
    except OSError as error:
        raise UnknownWeights(f"{folder} cannot be read: {error}") from error


def digest_of_adapter(folder: Path) -> str:
    """Returns the digest of a LoRA adapter, 64 hexadecimal digits: its configuration without names such as the base
    model's, and all bytes of its tensors.

    The result is cached until a file changes. Raises UnknownWeights if the folder is no adapter in safetensors or a
    file cannot be read.
    """
    configuration, weights = folder / _CONFIGURATION, sorted(folder.glob("*.safetensors"))
    if not configuration.is_file() or not weights:
        raise UnknownWeights(
            f"{folder} has no {_CONFIGURATION} with safetensors beside it: it is no adapter that is known"
        )
    try:
        return _digest_of_adapter(*_signed([configuration, *weights]))
    except OSError as error:
        raise UnknownWeights(f"{folder} cannot be read: {error}") from error


def sampled_of(tensors: Iterable[TensorPlace]) -> list[TensorPlace]:
    """Returns the tensors to sample: norms and embeddings first, then by a hash of the name."""
    held = (tensor for tensor in tensors if tensor.stop > tensor.start)
    return sorted(held, key=lambda each: (not _is_always(each.name), _drawn(each.name)))[:SAMPLED_TENSORS]


def _is_always(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in _ALWAYS)


def _drawn(name: str) -> bytes:
    return sha256(name.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class _Signature:
    """A file's path, size, time and inode, which change if the file is replaced."""

    path: Path
    nbytes: int
    changed_ns: int
    inode: int


def _signed(files: Iterable[Path]) -> tuple[_Signature, ...]:
    stats = [(file, file.stat()) for file in files]
    return tuple(_Signature(file, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in stats)


def _files_of(folder: Path) -> tuple[list[Path], int]:
    """Returns the files that an engine loads (those in the index, or all), and the number of reads made."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        others = sorted(
            {file.suffix for pattern in ("*.gguf", "*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)}
        )
        has = f"weights in {', '.join(others)}" if others else "no weights"
        raise UnknownWeights(f"{folder} has {has} and no safetensors")
    for name in ("model.safetensors.index.json", "consolidated.safetensors.index.json"):
        index = folder / name
        if index.is_file():
            if index.stat().st_size > MOST_HEADER_BYTES:
                raise UnknownWeights(
                    f"{index} has {index.stat().st_size} bytes; an index has {MOST_HEADER_BYTES} at most"
                )
            try:
                named = {*msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()}
            except (msgspec.DecodeError, UnicodeError) as error:
                raise UnknownWeights(f"{index} is no index of safetensors: {error}") from error
            missing = sorted(named - {file.name for file in found})
            if missing:
                raise UnknownWeights(f"{index} names {missing[0]}, which is not in {folder}")
            return [file for file in found if file.name in named], 1
    whole = [file for file in found if not file.name.startswith("consolidated")]
    return whole or found, 0


@lru_cache(maxsize=64)
def _digest_of_files(files: tuple[_Signature, ...], reads: int) -> CheckpointDigest:
    with ExitStack() as stack:
        opened = {file.path: _opened(file.path, stack) for file in files}
        tensors, reads = _tensors_of(files, opened, reads)
        samples: dict[str, bytes] = {}
        for tensor in sampled_of(tensors.values()):
            position, nbytes = tensor.sampled()
            samples[tensor.name] = _read(opened[tensor.file], tensor.file, nbytes, position)
    whole = sha256(b"kvmover-weights-1\n")
    for name in sorted(tensors):
        whole.update(tensors[name].described())
    for name in sorted(samples):
        whole.update(samples[name])
    return CheckpointDigest(whole.hexdigest(), len(tensors), reads + len(samples))


def _tensors_of(
    files: Sequence[_Signature], opened: Mapping[Path, int], reads: int
) -> tuple[dict[str, TensorPlace], int]:
    """Returns all tensors by name, and the number of reads made, with `reads` of before."""
    tensors: dict[str, TensorPlace] = {}
    for file in files:
        if reads + 2 + SAMPLED_TENSORS > MOST_READS:
            raise UnknownWeights(f"{file.path.parent} has {len(files)} files of safetensors: more than are looked at")
        header, taken = _header(opened[file.path], file)
        reads += taken
        for name, tensor in header.items():
            if name in tensors:
                raise UnknownWeights(f"{file.path} and {tensors[name].file} both have a tensor {name}")
            tensors[name] = tensor
    return tensors, reads


def samples_of(folder: Path) -> Iterator[tuple[TensorPlace, int, bytes]]:
    """Yield the sampled tensors of a checkpoint: each with the number of the first whole element in its sample, and the
    bytes of the sample's whole elements. Raises UnknownWeights as `digest_of_checkpoint`.
    """
    try:
        files, reads = _files_of(folder)
        with ExitStack() as stack:
            opened = {file: _opened(file, stack) for file in files}
            for each in sampled_of(_tensors_of(_signed(files), opened, reads)[0].values()):
                count, nbytes = prod(each.shape), each.stop - each.start
                width = max(1, nbytes // max(1, count))
                first = (each.sampled()[0] - each.start) // width
                read = min(SAMPLE_BYTES // width, count - first) * width
                yield each, first, _read(opened[each.file], each.file, read, each.start + first * width)
    except OSError as error:
        raise UnknownWeights(f"{folder} cannot be read: {error}") from error


@lru_cache(maxsize=1024)
def _digest_of_adapter(configuration: _Signature, *weights: _Signature) -> str:
    try:
        said = msgspec.json.decode(configuration.path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnknownWeights(f"{configuration.path} is no configuration of an adapter: {error}") from error
    meant = {name: _in_order(value) for name, value in said.items() if name not in _ASIDE and value is not None}
    whole = sha256(b"kvmover-adapter-1\n" + msgspec.json.encode(meant, order="deterministic") + b"\n")
    with ExitStack() as stack:
        opened = {file.path: _opened(file.path, stack) for file in weights}
        tensors = [tensor for file in weights for tensor in _header(opened[file.path], file)[0].values()]
        for tensor in sorted(tensors, key=lambda each: (each.name, each.file)):
            whole.update(tensor.described())
            for start in range(tensor.start, tensor.stop, _PART_BYTES):
                nbytes = min(_PART_BYTES, tensor.stop - start)
                whole.update(_read(opened[tensor.file], tensor.file, nbytes, start))
    return whole.hexdigest()


def _in_order(value: Any) -> Any:
    """Returns a list of names sorted: `target_modules` is a set, written in any order."""
    try:
        return sorted(msgspec.convert(value, list[str]))
    except msgspec.ValidationError:
        return value


def _opened(path: Path, stack: ExitStack) -> int:
    file = os.open(path, os.O_RDONLY)
    stack.callback(os.close, file)
    return file


def _header(file: int, of: _Signature) -> tuple[Mapping[str, TensorPlace], int]:
    """Returns the tensors of a file by name, and the number of reads made. Raises UnknownWeights for a malformed
    header.
    """
    first = _read(file, of.path, min(_FIRST_BYTES, of.nbytes), 0)
    nbytes = int.from_bytes(first[:8], "little")
    if len(first) < 8 or nbytes > min(MOST_HEADER_BYTES, of.nbytes - 8):
        raise UnknownWeights(
            f"{of.path} says that its header has {nbytes} bytes; the file has {of.nbytes}, and a header"
            f" {MOST_HEADER_BYTES} at most"
        )
    text, reads, data = first[8 : 8 + nbytes], 1, 8 + nbytes
    if len(text) < nbytes:
        text, reads = text + _read(file, of.path, nbytes - len(text), len(first)), 2
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: _decode_entry(each) for name, each in raw.items()}
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnknownWeights(f"{of.path} is no file of safetensors: {error}") from error
    placed: dict[str, TensorPlace] = {}
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if not start <= stop <= of.nbytes - data:
            raise UnknownWeights(f"{of.path} puts {name} at bytes {start} to {stop} of {of.nbytes - data}")
        placed[name] = TensorPlace(name, entry.dtype, entry.shape, of.path, data + start, data + stop)
    return placed, reads


_decode_entry = msgspec.json.Decoder(_Entry).decode


def _read(file: int, path: Path, nbytes: int, position: int) -> bytes:
    found = os.pread(file, nbytes, position)
    if len(found) < nbytes:
        raise UnknownWeights(f"{path} ends at byte {position + len(found)}: it has become shorter")
    return found


def combined(digests: Sequence[str]) -> str:
    """Returns one digest of several, in this order: a model's and its draft's. A single digest is returned unchanged.

    >>> combined(["ab"]), combined(["ab", "cd"])[:8]
    ('ab', '93096fae')
    """
    if len(digests) == 1:
        return digests[0]
    return sha256("\n".join(["kvmover-weights-together", *digests]).encode()).hexdigest()

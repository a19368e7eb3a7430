"""Archives of compiled kernels: packed from Triton's disk cache, unpacked into the cache of another machine.

Triton looks a kernel up by a key made of its source, its constants, the compiler and the GPU's architecture.
`cache_keys` makes that key the same in all processes, so Triton finds a kernel that was compiled elsewhere, without a
GPU, and does not compile it again. An archive of another version is harmless: its keys are never looked up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import triton

SHIPPED_FOLDER = Path(__file__).with_name("compiled")  # folder of archives that a wheel may contain
_PACKED_SUFFIXES = (".cubin", ".json")  # files of a compilation that are packed; the others are only for debugging
_GROUP_PREFIX = "__grp__"


def cache_folder() -> Path:
    """Return the folder of Triton's disk cache."""
    return Path(triton.knobs.cache.dir)


def pack(cache: Path, archive: Path) -> int:
    """Write the kernels of a cache to `archive` (.tar.xz), and return their number."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with tempfile.NamedTemporaryFile(dir=archive.parent, delete=False) as temporary_file:
        unfinished_archive = Path(temporary_file.name)
    with tarfile.open(unfinished_archive, "w:xz", preset=6) as tar:
        for group in sorted(cache.glob(f"*/{_GROUP_PREFIX}*.json")):
            names = [name for name in json.loads(group.read_text())["child_paths"] if name.endswith(_PACKED_SUFFIXES)]
            if not any(name.endswith(".cubin") for name in names):
                continue  # a launcher, or another file built for this machine
            _add_file(tar, f"{group.parent.name}/{group.name}", json.dumps(sorted(names)).encode())
            for name in sorted(names):
                _add_file(tar, f"{group.parent.name}/{name}", (group.parent / name).read_bytes())
            count += 1
    unfinished_archive.replace(archive)
    return count


def _add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)  # no time and no owner, so that equal kernels produce equal archives
    info.size = len(content)
    tar.addfile(info, BytesIO(content))


def unpack(archive: Path, cache: Path) -> int:
    """Copy the kernels of `archive` into Triton's disk cache `cache`, and return the number of new ones.

    Raises:
        ValueError: the file is not an archive of kernels.
    """
    try:
        # The whole archive is decompressed first, which verifies its checksum; tarfile alone stops before the checksum.
        with tarfile.open(fileobj=BytesIO(lzma.decompress(archive.read_bytes()))) as tar:
            files = {member.name: _read_member(tar, member) for member in tar if member.isfile()}
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{archive} is not an archive of kernels ({error}).") from error
    count = 0
    for file_name, listed_names in files.items():
        key, _, group = file_name.partition("/")
        if not group.startswith(_GROUP_PREFIX) or (cache / key / group).exists():
            continue
        folder = cache / key
        paths = {name: str(folder / name) for name in json.loads(listed_names)}
        missing_names = [name for name in paths if f"{key}/{name}" not in files]
        if missing_names or any(Path(name).name != name for name in (key, group, *paths)):
            raise ValueError(
                f"{archive} is not an archive of kernels: the list {group} in {key} names {sorted(paths)}."
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in paths:
            _write_atomically(folder / name, files[f"{key}/{name}"])
        # Last, because Triton finds a kernel by this file.
        _write_atomically(folder / group, json.dumps({"child_paths": paths}).encode())
        count += 1
    return count


def _read_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _write_atomically(path: Path, content: bytes) -> None:
    unfinished_file = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished_file.write_bytes(content)
    unfinished_file.replace(path)


def install_shipped_kernels() -> int:
    """Unpack the archives shipped with this installation, once per cache, and return the number of new kernels.

    A cache that cannot be written is left alone: Triton reports it when it compiles.
    """
    count = 0
    for archive in sorted(SHIPPED_FOLDER.glob("*.tar.xz")) if SHIPPED_FOLDER.is_dir() else ():
        with contextlib.suppress(OSError):
            stamp = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
            marker = cache_folder() / f"fused_tp-{stamp}"
            if not marker.exists():
                count += unpack(archive, cache_folder())
                marker.touch()
    return count

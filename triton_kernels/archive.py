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

SHIPPED = Path(__file__).with_name("compiled")  # folder of archives that a wheel may contain
_KEPT = (".cubin", ".json")  # packed files of a compilation; the others are only for debugging
_GROUP = "__grp__"


def cache_folder() -> Path:
    """Return the folder of Triton's disk cache."""
    return Path(triton.knobs.cache.dir)


def pack(cache: Path, archive: Path) -> int:
    """Write the kernels of a cache to `archive` (.tar.xz), and return their number."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with tempfile.NamedTemporaryFile(dir=archive.parent, delete=False) as made:
        unfinished = Path(made.name)
    with tarfile.open(unfinished, "w:xz", preset=6) as tar:
        for group in sorted(cache.glob(f"*/{_GROUP}*.json")):
            names = [name for name in json.loads(group.read_text())["child_paths"] if name.endswith(_KEPT)]
            if not any(name.endswith(".cubin") for name in names):
                continue  # a launcher, or another file built for this machine
            _add(tar, f"{group.parent.name}/{group.name}", json.dumps(sorted(names)).encode())
            for name in sorted(names):
                _add(tar, f"{group.parent.name}/{name}", (group.parent / name).read_bytes())
            count += 1
    unfinished.replace(archive)
    return count


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
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
            files = {member.name: _content(tar, member) for member in tar if member.isfile()}
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{archive} is no archive of kernels ({error}).") from error
    count = 0
    for name, listed in files.items():
        key, _, group = name.partition("/")
        if not group.startswith(_GROUP) or (cache / key / group).exists():
            continue
        folder = cache / key
        paths = {one: str(folder / one) for one in json.loads(listed)}
        missing = [one for one in paths if f"{key}/{one}" not in files]
        if missing or any(Path(one).name != one for one in (key, group, *paths)):
            raise ValueError(f"{archive} is no archive of kernels (it names {sorted(paths)} in {key}).")
        folder.mkdir(parents=True, exist_ok=True)
        for one in paths:
            _write(folder / one, files[f"{key}/{one}"])
        _write(folder / group, json.dumps({"child_paths": paths}).encode())  # last: Triton finds a kernel by this file
        count += 1
    return count


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def install_shipped() -> int:
    """Unpack the archives shipped with this installation, once per cache, and return the number of new kernels.

    A cache that cannot be written is left alone: Triton reports it when it compiles.
    """
    count = 0
    for archive in sorted(SHIPPED.glob("*.tar.xz")) if SHIPPED.is_dir() else ():
        with contextlib.suppress(OSError):
            stamp = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
            done = cache_folder() / f"fused_tp-{stamp}"
            if not done.exists():
                count += unpack(archive, cache_folder())
                done.touch()
    return count

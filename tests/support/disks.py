"""File systems to be filled, broken and cut off: mounted for a test, for root on Linux; skipped by name elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["LoopDisk", "remount", "tmpfs"]

# <linux/fs.h> of 6.x, XFS's and ext4's own before: _IOR('X', 125, __u32); 2: the log is not flushed.
_FS_IOC_SHUTDOWN = 0x8004587D
_NO_FLUSH = 2

_MKFS = {"xfs": ["mkfs.xfs", "-q"], "ext4": ["mkfs.ext4", "-q", "-F"]}
_NBYTES = 320 * 1024 * 1024  # sparse; XFS takes no less than 300 MiB


def _run(*words: str | Path) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True, timeout=60)


def _need_mounts(folder: Path) -> None:
    """Skip the test where nothing can be mounted."""
    if os.getuid() != 0:
        pytest.skip("needs root, to mount file systems")
    try:
        _run("mount", "-t", "tmpfs", "none", folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount file systems")
    _run("umount", folder)


@contextlib.contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory, with these options of mount."""
    folder.mkdir()
    _need_mounts(folder)
    _run("mount", "-t", "tmpfs", "-o", options, "none", folder)
    try:
        yield folder
    finally:
        _run("umount", "-l", folder)


def remount(folder: Path, options: str) -> None:
    """Change the options of a mounted file system."""
    _run("mount", "-o", f"remount,{options}", folder)


class LoopDisk:
    """A file system in a file, that can lose power.

    Parameters
    ----------
    folder
        Where the file and the mount point are made.
    kind
        ``xfs`` or ``ext4``.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / "mount"
        self._image = folder / "image"
        self._is_mounted = False
        self.path.mkdir()
        _need_mounts(self.path)
        if shutil.which(_MKFS[kind][0]) is None:
            pytest.skip(f"needs {_MKFS[kind][0]}")
        with open(self._image, "wb") as file:
            file.truncate(_NBYTES)
        try:
            _run(*_MKFS[kind], self._image)
            self.mount()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs loop devices and {kind}: {error.stderr.decode()}")

    def mount(self) -> None:
        """Mount it."""
        _run("mount", "-o", "loop", self._image, self.path)
        self._is_mounted = True

    def cut(self) -> None:
        """Cut it off at once: what was not synced never reaches the file, and every call fails from now on."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_FLUSH))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Unmount it, if it is, in any case: whoever clears temporary folders must not meet it."""
        # Not os.path.ismount: what is cut off fails in every call.
        if self._is_mounted:
            try:
                _run("umount", self.path)
            except subprocess.CalledProcessError:
                _run("umount", "-l", self.path)
                raise
            finally:
                self._is_mounted = False

    def power_on(self) -> None:
        """Mount what is left after `cut`."""
        self.unmount()
        self.mount()

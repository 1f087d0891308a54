"""File systems to be filled, broken and cut off: mounted for a test, for root on Linux; skipped by name elsewhere."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wait import wait_until

__all__ = ["BadDisk", "LoopDisk", "remount", "tmpfs"]

# <linux/fs.h> of 6.x, XFS's and ext4's own before: _IOR('X', 125, __u32); 2: the log is not flushed.
_FS_IOC_SHUTDOWN = 0x8004587D
_NO_FLUSH = 2

_MKFS = {"xfs": ["mkfs.xfs", "-q", "-s", "size=4096"], "ext4": ["mkfs.ext4", "-q", "-F", "-b", "4096"]}
_NBYTES = 320 * 1024 * 1024  # sparse; XFS takes no less than 300 MiB


def _run(*words: str | Path) -> str:
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True, timeout=60).stdout


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
        self._make_image()
        try:
            _run(*_MKFS[kind], self._image)
            self.mount()
        except subprocess.CalledProcessError as error:
            self.unmount()
            pytest.skip(f"needs loop devices and {kind}: {error.stderr}")

    def _make_image(self) -> None:
        with open(self._image, "wb") as file:
            file.truncate(_NBYTES)

    def mount(self) -> None:
        """Mount it."""
        _run("mount", "-o", "loop", self._image, self.path)
        self._is_mounted = True

    def cut(self) -> None:
        """Cut it off at once: what was not synced never reaches the file, and every call fails from now on."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return  # XFS has done it to itself, over an error of its disk
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
        # Else mount(8) takes the device again, and with it the file system that was cut off.
        if found := _run("losetup", "-j", self._image):
            raise RuntimeError(
                f"{self._image} is still mounted, in a mount namespace that another program made meanwhile: "
                f"{found}run this in a namespace of its own, unshare --mount"
            )
        self.mount()


class BadDisk(LoopDisk):
    """A file system on a disk that can't write some of what it is to write, as long as it is told so.

    The disk is in the memory of nbdkit, whose filter ``error`` fails writes, a file by nbdfuse, and a loop device.

    Parameters
    ----------
    folder, kind
        As of `LoopDisk`.
    percent
        How many of the writes fail.
    """

    def __init__(self, folder: Path, kind: str, percent: int) -> None:
        missing = [name for name in ("nbdkit", "nbdfuse") if shutil.which(name) is None]
        if missing:
            pytest.skip(f"needs {' and '.join(missing)}")
        self._switch = folder / "bad"
        self._percent = percent
        self._servers: list[subprocess.Popen[bytes]] = []
        self._sockets: Path | None = None
        try:
            super().__init__(folder, kind)
        except BaseException:
            self.unmount()
            self.remove()
            raise

    def _make_image(self) -> None:
        # Not in the folder of a test: a socket's name has at most 107 bytes.
        self._sockets = Path(tempfile.mkdtemp(prefix="mpistream-nbd-"))
        socket = self._sockets / "socket"
        self._serve(
            *("nbdkit", "-f", "-U", socket, "--filter=error", "memory", str(_NBYTES), "error-pwrite=EIO"),
            *(f"error-pwrite-rate={self._percent}%", f"error-file={self._switch}"),
        )
        wait_until(socket.exists, 30, "nbdkit")
        self._image.touch()
        self._serve("nbdfuse", self._image, "--unix", socket)
        wait_until(lambda: self._image.stat().st_size == _NBYTES, 30, "nbdfuse")

    def _serve(self, *words: str | Path) -> None:
        # They say much about each error that they were told to make.
        null = subprocess.DEVNULL
        self._servers.append(subprocess.Popen([*map(str, words)], stdin=null, stdout=null, stderr=null))

    def mount(self) -> None:
        """Mount it, so that each request is one page, and lies in one.

        Another one may be written in part, and what Linux's loop device makes of that is a success.
        """
        device = _run("losetup", "--sector-size", "4096", "--find", "--show", self._image).strip()
        try:
            Path("/sys/block", Path(device).name, "queue/max_sectors_kb").write_text("4")
            _run("mount", device, self.path)
            self._is_mounted = True
        finally:
            # At once, or when it is unmounted.
            _run("losetup", "--detach", device)

    def go_bad(self) -> None:
        """Let writes fail from now on."""
        self._switch.touch()

    def mend(self) -> None:
        """Let writes succeed again; what the file system has made of the errors remains."""
        self._switch.unlink(missing_ok=True)

    def remove(self) -> None:
        """End the disk, once it is unmounted."""
        for server in reversed(self._servers):
            server.terminate()
            server.wait(30)
        self._servers.clear()
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

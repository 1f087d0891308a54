"""Three hosts on one machine; one is cut off in the middle of a commit, the job is resumed elsewhere, the link heals.

The hosts are network namespaces with host names and ssh servers of their own, so that MPI takes them for three. The
rank on the second one hangs at a point of the commit; then its link is cut, the ranks on the other hosts are killed,
and a process elsewhere resumes the store and goes on. When the link is there again and the rank goes on, too, no byte
of what is committed may change. Last, one host gets a folder of its own in the place of the shared one: every rank
has to hear of it. For root on Linux, with ip, sshd and ssh. See ci/soak.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mpistream as ms
from tests.support import writing_job
from tests.support.scene import assert_holds
from tests.support.wait import wait_until
from tests.support.writing_job import SCENE, said_path

ROOT = Path(__file__).resolve().parents[2]
HUB, HOSTS = "ms-hub", ("ms-h1", "ms-h2", "ms-h3")
DEADLINE = 60.0

# The rank that hangs, and where; rank 0 is on the host that is cut off where it is the owner that hangs.
POINTS: dict[str, tuple[dict[str, Any], int]] = {
    "contributor, before it stages": ({"rank": 1, "call": "stage", "prefix": ""}, 0),
    "contributor, before it places": ({"rank": 1, "call": "place", "prefix": "u/c/"}, 0),
    "contributor, before it syncs": ({"rank": 1, "call": "sync_folders", "prefix": "u/c/"}, 0),
    "owner, before the manifest": ({"rank": 0, "call": "place", "prefix": ".mpistream/manifest.json"}, 0),
    "owner, before the documents": ({"rank": 0, "call": "place", "prefix": "zarr.json"}, 1),
}


def run(*words: str | Path, check: bool = True) -> None:
    subprocess.run([*map(str, words)], check=check, capture_output=True, timeout=60)


def inside(name: str, *words: str | Path, first: str = ":") -> list[str]:
    """Return a command as it is run on a host, with names and mounts of its own."""
    script = f'hostname {name} && {first} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", script, "sh", *map(str, words)]


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Path]:
    """Make the hosts; give the command that stands for ssh."""
    servers = []
    for own in ("local", "other"):
        (folder / own).mkdir()
    try:
        run("ip", "netns", "add", HUB)
        run("ip", "-n", HUB, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", HUB, "link", "set", "br0", "up")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
        Path("/run/sshd").mkdir(exist_ok=True)
        table = "".join(f"10.77.0.{i} {name}\n" for i, name in enumerate(HOSTS, 1))
        for i, name in enumerate(HOSTS, 1):
            own = Path("/etc/netns") / name
            own.mkdir(parents=True, exist_ok=True)
            (own / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
            run("ip", "netns", "add", name)
            run("ip", "-n", HUB, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", HUB, "link", "set", f"p{i}", "master", "br0", "up")
            run("ip", "-n", name, "address", "add", f"10.77.0.{i}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            config = folder / f"sshd-{name}"
            config.write_text(
                f"ListenAddress 10.77.0.{i}\nHostKey {folder}/key\nAuthorizedKeysFile {folder}/key.pub\n"
                f"PidFile {folder}/sshd-{name}.pid\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
            )
            # What lies in `local` is shared by two of the hosts; the other one has a folder of its own there.
            first = f"mount --bind {folder}/other {folder}/local" if name == HOSTS[1] else ":"
            servers.append(subprocess.Popen(inside(name, "/usr/sbin/sshd", "-D", "-f", config, first=first)))
        wrap = folder / "wrap"
        wrap.write_text(
            f"#!/bin/sh\nexec ssh -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
            '-o LogLevel=ERROR -o ConnectTimeout=10 "$@"\n'
        )
        wrap.chmod(0o755)
        for i in range(1, 4):
            wait_until(partial(_answers, inside(HOSTS[0], wrap, f"10.77.0.{i}", "true")), 30, "sshd")
        yield wrap
    finally:
        for name in HOSTS:
            for pid in pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for server in servers:
            server.wait(10)
        for name in (*HOSTS, HUB):
            run("ip", "netns", "delete", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _answers(words: list[str]) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def pids(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def ranks(name: str) -> list[int]:
    """Return the ranks on a host."""
    found = []
    for pid in pids(name):
        with contextlib.suppress(OSError):
            if writing_job.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def mpiexec(wrap: Path, order: list[str], url: Path, n_records: int, how: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the writing job with one rank on each host, in this order."""
    program = [sys.executable, "-m", "mpi4py", writing_job.__file__, str(url), str(n_records), json.dumps(how)]
    launcher = shutil.which("mpiexec") or "mpiexec"
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open" in version or "PRRTE" in version or "prte" in version:
        command = [launcher, "--prtemca", "plm_ssh_agent", str(wrap), "--host", ",".join(f"{h}:1" for h in order)]
        # ci/venv lets ranks be more than there are slots: all would come to the first host.
        command += ["--map-by", "ppr:1:node", "-n", "3", "-x", "PYTHONPATH", "-x", "PATH"]
    else:
        command = [launcher, "-launcher", "ssh", "-launcher-exec", str(wrap), "-hosts", ",".join(order), "-n", "3"]
        command += ["-ppn", "1"]
    log = open(url.parent / "log", "ab")  # noqa: SIM115 - the job's own
    return subprocess.Popen(
        inside(HOSTS[0], *command, *program),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def said(url: Path, word: str) -> list[dict[str, Any]]:
    if not said_path(url).exists():
        return []
    lines = said_path(url).read_text().splitlines()
    return [line for text in lines if word in (line := json.loads(text))]


def contents(url: Path) -> dict[str, bytes]:
    """Return everything but what is staged and the lease."""
    files = (p for p in url.rglob("*") if p.is_file())
    names = {str(p.relative_to(url)): p for p in files}
    return {n: p.read_bytes() for n, p in names.items() if not n.startswith((".mpistream/stage/", ".mpistream/lease"))}


def kill(found: list[int]) -> None:
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut_at(wrap: Path, folder: Path, point: str) -> str:
    hang, n_more = POINTS[point]
    url, until = folder / "s", folder / "until"
    how = {
        "hang": {**hang, "until": str(until)},
        "arm_at": 3,
        "options": {"timeout": 8, "exit_timeout": 2, "threads": 0},
    }
    order = [HOSTS[0], HOSTS[1], HOSTS[2]] if hang["rank"] else [HOSTS[1], HOSTS[0], HOSTS[2]]
    job = mpiexec(wrap, order, url, 100, how)
    try:
        wait_until(lambda: said(url, "hanging") or job.poll() is not None, DEADLINE, "the rank to hang")
        assert said(url, "hanging"), (folder / "log").read_text()
        zombies = ranks(HOSTS[1])
        assert len(zombies) == 1, zombies
        run("ip", "-n", HUB, "link", "set", "p2", "down")
        kill([*ranks(HOSTS[0]), *ranks(HOSTS[2]), job.pid])
        n = 3 + n_more
        with ms.write_resume(url, takeover=hang["rank"] == 0) as w:
            assert w.n_records == n, (w.n_records, n)
            for i in range(n, n + 2):
                SCENE.write(w, i, 1)
                w.commit()
        before = contents(url)
        run("ip", "-n", HUB, "link", "set", "p2", "up")
        until.touch()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in zombies), DEADLINE, "the zombie to end")
        after = contents(url)
        changed = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
        assert not changed, changed
        assert_holds(url, SCENE, [0] * n + [1, 1])
    finally:
        run("ip", "-n", HUB, "link", "set", "p2", "up")
        for name in HOSTS:
            kill(ranks(name))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(10)
    return "no byte has changed"


def node_local(wrap: Path, folder: Path) -> str:
    """Let the second host have a folder of its own where the others share one."""
    url = folder / "s"
    job = mpiexec(wrap, list(HOSTS), url, 3, {"options": {"timeout": 8}})
    try:
        code = job.wait(DEADLINE)
    finally:
        for name in HOSTS:
            kill(ranks(name))
    text = (folder / "log").read_text()
    assert code, text
    assert "StoreError" in text, text
    assert "is not the folder that rank 0 sees" in text, text
    assert not (url / ".mpistream/manifest.json").exists()
    return f"refused, with code {code}, and no store was made"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mpistream-hosts-") as name, hosts(Path(name)) as wrap:
        for k, point in enumerate([*POINTS, "node-local folder"]):
            folder = Path(name) / (str(k) if point in POINTS else "local")
            folder.mkdir(exist_ok=True)
            began = time.monotonic()
            found = cut_at(wrap, folder, point) if point in POINTS else node_local(wrap, folder)
            print(f"hosts: {point}: {found}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""A real Slurm cluster of simulated nodes on this machine: no systemd, no cgroups, its own munge, ports and folder.

    python -m tests.slurm.cluster up ROOT [NODES]
    export SLURM_CONF=ROOT/etc/slurm.conf
    python -m tests.slurm.cluster crash ROOT node2      # kill -9 of everything on it, as in a power loss
    python -m tests.slurm.cluster start ROOT node2
    python -m tests.slurm.cluster down ROOT

Needs root (host names of its nodes, /etc/hosts) and Debian's packages: slurmctld slurmd slurm-client munge. A node is a
UTS namespace, so ``hostname`` is the node's and its processes are known by it. Everything that was started is known by
a pid file below ROOT; nothing else is ever ended.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare")
KILL_WAIT_S = 15  # from SIGTERM to SIGKILL at a cancellation or limit
_HOSTS = Path("/etc/hosts")
_SEARCH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing_programs() -> list[str]:
    """What is not installed of all that a cluster needs."""
    return [name for name in PROGRAMS if shutil.which(name, path=_SEARCH) is None]


class Cluster:
    """A cluster below ``root`` (a short path: sockets lie in it)."""

    def __init__(self, root: Path, nodes: int = 2, cpus: int = 4, memory_mb: int = 8000):
        self.root = root.resolve()
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.cpus, self.memory_mb = cpus, memory_mb
        self.conf = self.root / "etc" / "slurm.conf"
        self._mark = f"# slurm-cluster {self.root}"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with the clients' configuration in it."""
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": _SEARCH}

    def run(self, *words: str, timeout: float = 30) -> str:
        """Standard output of a Slurm client."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    # ------------------------------------------------------------------ up and down

    def up(self) -> None:
        """Start all daemons and wait until every node is idle."""
        for name in ("etc", "state", "spool", "pid", "log", "munge"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "state").chmod(0o700)
        if not self.conf.is_file():
            self._configure()
        if not self._is_alive(self._pid("munged"), "munged"):
            self._start_munged()
        if not self._is_alive(self._pid("slurmctld"), "slurmctld"):
            self._daemon("slurmctld", "-f", str(self.conf))
        for node in self.nodes:
            if not self._is_alive(self._pid(f"slurmd.{node}"), "slurmd"):
                self.start(node)
        self.wait_idle()

    def down(self) -> None:
        """End the jobs, then every daemon that :meth:`up` or :meth:`start` started."""
        if self._is_alive(self._pid("slurmctld"), "slurmctld"):
            self._cancel_jobs()
        self._stop("slurmd", *(f"slurmd.{node}" for node in self.nodes))
        for process in _processes():
            if _comm(process) == "slurmstepd" and f"SLURM_CONF={self.conf}" in _environ(process):
                _kill(process, signal.SIGKILL)
        self._stop("slurmctld", "slurmctld")
        self._stop("munged", "munged")
        lines = _HOSTS.read_text().splitlines(keepends=True)
        if any(self._mark in line for line in lines):  # written in place: it may be a mount
            _HOSTS.write_text("".join(line for line in lines if self._mark not in line))

    def wait_idle(self, timeout: float = 60) -> None:
        """Wait until every node is idle; bring back those that a test has left down or drained."""

        def idle() -> bool:
            states = dict(line.split()[:2] for line in self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines())
            bad = [node for node, state in states.items() if state.rstrip("*") in ("down", "drained", "draining")]
            if bad:
                self._try("scontrol", "update", f"nodename={','.join(bad)}", "state=resume")
            return len(states) == len(self.nodes) and set(states.values()) == {"idle"}

        wait_for(idle, timeout, "every node is idle")

    def _configure(self) -> None:
        ports = _free_ports(len(self.nodes) + 1)
        values = {
            "ROOT": self.root,
            "HOST": socket.gethostname().partition(".")[0],
            "USER": getpass.getuser(),
            "PORT": ports[0],
            "NODE_PORTS": ",".join(map(str, ports[1:])),
            "NODES": len(self.nodes),
            "CPUS": self.cpus,
            "MEMORY": self.memory_mb,
            "KILL_WAIT": KILL_WAIT_S,
            "CRED_EXPIRE": KILL_WAIT_S + 5,
        }
        text = Path(__file__).with_name("slurm.conf.template").read_text()
        for name, value in values.items():
            text = text.replace(f"@{name}@", str(value))
        self.conf.write_text(text)
        present = _HOSTS.read_text()
        if self._mark not in present:
            names = "".join(f"127.0.0.1 {node} {self._mark}\n" for node in self.nodes)
            _HOSTS.write_text(present + ("" if present.endswith("\n") else "\n") + names)

    def _start_munged(self) -> None:
        folder = self.root / "munge"
        key = folder / "munge.key"
        if not key.is_file():
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(128))
        self._daemon(
            "munged",
            "--force",
            f"--socket={folder / 'munge.socket'}",
            f"--key-file={key}",
            f"--pid-file={self.root / 'pid' / 'munged.pid'}",
            f"--seed-file={folder / 'munge.seed'}",
            f"--log-file={self.root / 'log' / 'munged.log'}",
        )

    def _cancel_jobs(self) -> None:
        jobs = self._try("squeue", "-h", "-o", "%A").split()
        if jobs:
            self._try("scancel", "--full", *jobs)
            deadline = time.monotonic() + KILL_WAIT_S + 10
            while self._try("squeue", "-h", "-o", "%A").split() and time.monotonic() < deadline:
                time.sleep(0.2)

    # ------------------------------------------------------------------ nodes

    def start(self, node: str) -> None:
        """Start the daemon of ``node``."""
        (self.root / "spool" / node).mkdir(exist_ok=True)
        command = 'hostname "$0" && exec slurmd -N "$0" -f "$1"'
        self._daemon("unshare", "--uts", "sh", "-c", command, node, str(self.conf))
        wait_for(lambda: self._is_alive(self._pid(f"slurmd.{node}"), "slurmd"), 10, f"slurmd of {node} runs")

    def crash(self, node: str) -> None:
        """Kill every process of ``node`` at once and tell the controller, which would notice after 30 s."""
        space = os.readlink(f"/proc/{self._pid(f'slurmd.{node}')}/ns/uts")
        assert space != os.readlink("/proc/self/ns/uts")
        for _ in range(3):  # those that were just being started
            for process in _processes():
                if _namespace(process) == space:
                    _kill(process, signal.SIGKILL)
        (self.root / "pid" / f"slurmd.{node}.pid").unlink(missing_ok=True)
        self._try("scontrol", "update", f"nodename={node}", "state=down", "reason=crash")

    # ------------------------------------------------------------------ daemons

    def _daemon(self, *words: str) -> None:
        subprocess.run(
            words, env=self.environment, check=True, timeout=30, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def _try(self, *words: str) -> str:
        try:
            return self.run(*words)
        except (RuntimeError, subprocess.TimeoutExpired):
            return ""

    def _pid(self, name: str) -> int | None:
        try:
            return int((self.root / "pid" / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None

    @staticmethod
    def _is_alive(pid: int | None, comm: str) -> bool:
        return pid is not None and _comm(pid) == comm

    def _stop(self, comm: str, *names: str) -> None:
        """End the daemons of these pid files together."""
        pids = [pid for name in names if (pid := self._pid(name)) is not None and self._is_alive(pid, comm)]
        for pid in pids:
            _kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(self._is_alive(pid, comm) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            if self._is_alive(pid, comm):
                _kill(pid, signal.SIGKILL)
        for name in names:
            (self.root / "pid" / f"{name}.pid").unlink(missing_ok=True)


def wait_for(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Poll ``condition`` until it holds. AssertionError after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout:g} s still not true: {what}"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range that nobody listens on now."""
    found: list[int] = []
    start = 15000 + os.getpid() * 7 % 4000
    for port in range(start, start + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _environ(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main(words: list[str]) -> int:
    """``up | down | crash | start ROOT [NODE or number of nodes]``."""
    action, root = words[0], Path(words[1])
    more = words[2] if len(words) > 2 else ""
    cluster = Cluster(root, nodes=int(more) if action == "up" and more else max(2, len(list(root.glob("spool/*")))))
    actions = {"up": cluster.up, "down": cluster.down}
    if action in actions:
        actions[action]()
    else:
        {"crash": cluster.crash, "start": cluster.start}[action](more)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

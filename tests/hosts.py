"""Two hosts with addresses, names and disks of their own, made of this machine's namespaces.

Each has a network with a cable to the other, a hostname that both can look up, a table of mounts in
which one path leads to a folder of its own. Programs that were started on a host end with it.
Nothing reaches this machine's own network. ``tc`` slows the cable down.
"""

import ctypes
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import TracebackType
from typing import Self

import children

_COMMANDS = ("ip", "mount", "nsenter", "tc", "unshare")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
CABLE = "cable"
"""The network interface of each host that leads to the other."""
NAMES = ("host0", "host1")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_START = """
set -e
hostname {name}
mkdir -p {disk} {local}
mount --bind {disk} {local}
mount --bind {names} /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
exec cat
"""


class Program:
    """A program that runs on a host."""

    def __init__(
        self, host: "Host", command: Sequence[str | Path], environment: Mapping[str, str]
    ) -> None:
        """Start it."""
        self._output = TemporaryFile(buffering=0)  # noqa: SIM115  # closed when it has ended
        entrance = ("-m", "hosts", str(host.pid), *command)
        streams = {"stdout": self._output, "stderr": self._output}
        self._child = children.start(*entrance, environment=environment, **streams)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self._child.kill()

    def wait_for_end(self) -> None:
        """Wait until it has ended, and let others read what it wrote."""
        self._child.wait(100)

    def wait(self) -> tuple[int, str]:
        """Return its exit status, and what it wrote, when it has ended."""
        status = self._child.wait(100)
        written = self.written()
        self._output.close()
        return status, written

    def written(self) -> str:
        """Return what it has written so far."""
        return os.pread(self._output.fileno(), 1 << 20, 0).decode()


class Host:
    """One of the hosts."""

    def __init__(self, number: int, folder: Path, within: Sequence[str]) -> None:
        """Start it within the namespaces that ``within``, a command's first words, enters."""
        self.name, self.address = NAMES[number], _ADDRESSES[number]
        self.disk = folder / f"disk-of-{self.name}"
        """What the host sees as ``local``, seen from outside."""
        self.local = folder / "local"
        names = folder / "names"
        start = _START.format(name=self.name, disk=self.disk, local=self.local, names=names)
        own = ["unshare", "--net", "--mount", "--uts", "--ipc"]
        self._holder = _hold([*within, *own, "sh", "-c", start])
        self.pid = self._holder.pid
        self._programs: list[Program] = []

    def start(self, *command: str | Path, environment: Mapping[str, str]) -> "Program":
        """Start ``-m`` module with its arguments on the host, with torch loaded."""
        self._programs.append(Program(self, command, environment))
        return self._programs[-1]

    def run(self, *words: str | Path) -> str:
        """Run a program of the system on the host to its end; return what it wrote."""
        return _run([*self.entrance(), *map(str, words)])

    def plug(self, *, into: bool) -> None:
        """Plug the cable in, or pull it out."""
        self.run("ip", "link", "set", CABLE, "up" if into else "down")

    def slow_down(self, rate: str) -> None:
        """Let the host send no more than ``rate``, such as "100mbit", over the cable."""
        shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
        self.run("tc", "qdisc", "replace", "dev", CABLE, "root", *shape)

    def sent(self) -> int:
        """Return the bytes that the host has sent over the cable, with the headers of packets."""
        (link,) = json.loads(self.run("ip", "-stats", "-json", "link", "show", CABLE))
        return int(link["stats64"]["tx"]["bytes"])

    def kill(self) -> None:
        """End all processes of the host at once, as a loss of power does."""
        for program in self._programs:
            program.kill()
        for program in self._programs:
            program.wait_for_end()
        self._holder.kill()
        self._holder.communicate()

    def entrance(self) -> list[str]:
        spaces = ["--user", "--net", "--mount", "--uts", "--ipc"]
        return ["nsenter", f"--target={self.pid}", *spaces, "--preserve-credentials"]


class Hosts:
    """Both hosts, which are taken away at the end of a block."""

    def __init__(self, folder: Path) -> None:
        """Make them, with their disks in ``folder``."""
        names = "".join(
            f"{address} {name}\n" for address, name in zip(_ADDRESSES, NAMES, strict=True)
        )
        (folder / "names").write_text(f"127.0.0.1 localhost\n{names}", encoding="ascii")
        own = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
        self._holder = _hold([*own, "sh", "-c", "echo ready; exec cat"])
        spaces = ["--user", "--mount", "--net", "--preserve-credentials"]
        within = ["nsenter", f"--target={self._holder.pid}", *spaces]
        self._folder, self._within = folder, within
        self.hosts = [Host(number, folder, within) for number in range(2)]
        self._connect()

    def restart(self, number: int) -> None:
        """Start a host that was killed again, with what is on its disk."""
        self.hosts[number] = Host(number, self._folder, self._within)
        self._connect()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in self.hosts:
            host.kill()
        self._holder.kill()
        self._holder.communicate()

    def _connect(self) -> None:
        first, second = self.hosts
        for host in self.hosts:  # the kernel may still hold the end of a cable to a dead host
            with suppress(AssertionError):
                host.run("ip", "link", "delete", CABLE)
        ends = ["type", "veth", "peer", "name", CABLE, "netns"]
        link = ["ip", "link", "add", CABLE, "netns", str(first.pid), *ends, str(second.pid)]
        _run([*self._within, *link])
        for host in self.hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
            host.plug(into=True)


def start_ranks(places: "Sequence[Host]", *command: str | Path) -> list[Program]:
    """Start a rank of a program at each of ``places``; they meet at the first."""
    ranks = []
    for rank, host in enumerate(places):
        on_host = [number for number, place in enumerate(places) if place is host]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(on_host.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(on_host)),
            "MASTER_ADDR": places[0].name,
            "MASTER_PORT": "29500",
        }
        ranks.append(host.start(*command, environment=environment))
    return ranks


def end(ranks: Sequence[Program], *expected: int) -> list[str]:
    """Return what each rank has written when all have ended, with the ``expected`` statuses."""
    statuses, written = zip(*(rank.wait() for rank in ranks), strict=True)
    assert statuses == expected, "\n".join(written)
    return list(written)


@cache
def why_not() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    lacking = [name for name in _COMMANDS if shutil.which(name, path=_PATH) is None]
    if lacking:
        return f"{', '.join(lacking)}: not installed"
    with TemporaryDirectory() as folder:
        try:
            with Hosts(Path(folder)) as hosts:
                hosts[0].slow_down("1gbit")
        except (AssertionError, RuntimeError) as error:
            return f"no namespaces: {error}"
    return ""


def _hold(words: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a program that holds namespaces, and wait until it says that they are ready."""
    environment = {**os.environ, "PATH": _PATH}
    streams: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen(
        words, env=environment, stderr=subprocess.STDOUT, text=True, **streams
    )
    assert holder.stdout is not None
    line = holder.stdout.readline()
    if line != "ready\n":
        holder.kill()
        message = f"{line}{holder.communicate()[0]}"
        raise RuntimeError(message)
    return holder


def _run(words: Sequence[str]) -> str:
    """Run a program to its end; return what it wrote."""
    ended = subprocess.run(
        words, env={**os.environ, "PATH": _PATH}, check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def _enter_and_run(pid: str, flag: str, module: str, *arguments: str) -> None:
    """Enter the namespaces of a process, and run a module as a program."""
    assert flag == "-m"
    folder = Path.cwd()
    libc = ctypes.CDLL(None, use_errno=True)
    for space in ("user", "net", "uts", "ipc", "mnt"):
        with Path(f"/proc/{pid}/ns/{space}").open("rb") as file:
            if libc.setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {space}")
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _enter_and_run(*sys.argv[1:])

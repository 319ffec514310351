"""A SLURM of several nodes on this machine, on the loopback only: started from nothing, broken on purpose, ended.

    with slurm_cluster.started(nodes=3) as slurm: subprocess.run(["sbatch", ...], env=slurm.environment)

Needs root, and of Debian slurmctld, slurmd, slurm-client and munge; with `accounting` slurmdbd and mariadb-server too.
Each node's daemon has a host name of its own. The GPUs are none: nothing computes on them. SLURM's own default that
jobs are queued again (JobRequeue) is off, as on many clusters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun", "unshare")
ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb", "mariadb-install-db")


def lacking(accounting: bool = False) -> str:
    """Why no SLURM can be started here; empty: it can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "a SLURM of one's own is started by root"
    missing = [name for name in PROGRAMS + ACCOUNTING * accounting if shutil.which(name, path=PATH) is None]
    return f"no {missing[0]} here (Debian: slurm-wlm, munge; slurmdbd, mariadb-server)" if missing else ""


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass
class Cluster:
    """A SLURM that runs."""

    folder: Path
    nodes: list[str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which SLURM's commands find it."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str, check: bool = True) -> str:
        """What a command prints."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=120)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def jobs(self, states: str = "all") -> dict[str, str]:
        """job -> its state."""
        out = self.call("squeue", "--noheader", "--array", f"--states={states}", "--format=%i %T")
        return dict(line.split() for line in out.splitlines())

    def start_controller(self) -> None:
        """Start slurmctld, the first time or again."""
        self._start("slurmctld", "slurmctld", "-D", "-i")
        until(lambda: "UP" in self.call("scontrol", "ping", check=False), 30)

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, the first time or again; it has a host name of its own."""
        alone = 'hostname "$2" && mount --bind "$1/hosts" /etc/hosts && exec slurmd -D -N "$2"'
        self._start(node, "unshare", "--uts", "--mount", "sh", "-c", alone, "sh", str(self.folder), node)

    def kill(self, name: str) -> None:
        """Kill a daemon, "slurmctld" or a node's; what jobs it has started live on."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def crash(self, node: str) -> None:
        """A node is gone with all that runs on it."""
        namespace = os.readlink(f"/proc/{self.daemons[node].pid}/ns/uts")  # which all of the node's processes share
        for pid in [pid for pid in pids() if namespace_of(pid) == namespace]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons.pop(node).wait()

    def ready(self) -> None:
        """Wait until every node may be given jobs, with none of an earlier test."""
        for state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.call("scancel", "--me", f"--state={state}", check=False)
        for node in self.nodes:
            if node not in self.daemons:
                self.start_node(node)
        for node in self.nodes:
            self.call("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        idle = lambda: self.call("sinfo", "-h", "-N", "-p", "all", "-t", "idle", "-o", "%N").split()  # noqa: E731
        until(lambda: sorted(idle()) == sorted(self.nodes), 90)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """End what was started, by the ids that were kept."""
        for node in self.daemons.keys() & {*self.nodes}:
            self.crash(node)
        for name in reversed([*self.daemons]):
            end(self.daemons.pop(name))


@contextlib.contextmanager
def started(nodes: int = 3, accounting: bool = False, max_array: int = 1001) -> Iterator[Cluster]:
    """A SLURM that is gone at the end. RuntimeError: it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="fatbench-slurm-", dir="/tmp"))  # MariaDB runs as another user
    folder.chmod(0o755)
    for name in ("munge", "state", "spool", "gpus"):
        (folder / name).mkdir()
    cluster = Cluster(folder, [f"n{number}" for number in range(1, nodes + 1)])
    ports = free_ports(nodes + 3)
    try:
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o400)
        (folder / "munge").chmod(0o711)
        munge = folder / "munge"
        places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge}/{name}" for option, name in places.items()]
        cluster._start("munged", "munged", "--foreground", "--force", *options)
        until((munge / "socket").exists, 20)
        for number in range(nodes):  # a device like /dev/null
            os.mknod(folder / "gpus" / f"gpu{number}", 0o20666, os.makedev(1, 3))
        lines = [
            f"NodeName={node} Name=gpu File={folder}/gpus/gpu{number}" for number, node in enumerate(cluster.nodes)
        ]
        (folder / "gres.conf").write_text("\n".join([*lines, ""]))
        own = "".join(f"127.0.0.1 {node}\n" for node in cluster.nodes)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        (folder / "slurm.conf").write_text(configuration(cluster, ports, accounting, max_array))
        if accounting:
            start_accounting(cluster, ports[0], ports[1])
        cluster.start_controller()
        for node in cluster.nodes:
            cluster.start_node(node)
        cluster.ready()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def configuration(cluster: Cluster, ports: list[int], accounting: bool, max_array: int) -> str:
    """slurm.conf."""
    folder, host = cluster.folder, socket.gethostname().partition(".")[0]
    lines = f"""
ClusterName=own
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[2]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=12
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=bf_interval=3,sched_interval=3
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MinJobAge=300
MaxArraySize={max_array}
JobRequeue=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=5
PartitionName=gpu Nodes=ALL MaxTime=INFINITE PriorityTier=5
PartitionName=short Nodes=ALL MaxTime=2 PriorityTier=5
PartitionName=low Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=0
PartitionName=grace Nodes=ALL MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=cancel Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=down Nodes=ALL State=DOWN
"""
    if accounting:
        lines += f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports[0]}
AccountingStoragePass={folder}/munge/socket
AccountingStorageEnforce=associations,limits,qos
"""
    for node, port in zip(cluster.nodes, ports[3:], strict=True):
        lines += (
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=8000 Gres=gpu:1\n"
        )
    return lines


def start_accounting(cluster: Cluster, port: int, sql_port: int) -> None:
    """MariaDB and slurmdbd."""
    folder = cluster.folder
    data = folder / "mysql"
    data.mkdir()
    shutil.chown(data, "mysql")
    cluster.call("mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}",
                 "--auth-root-authentication-method=normal")  # fmt: skip
    options = ["--user=mysql", f"--datadir={data}", f"--pid-file={data}/pid", f"--socket={data}/socket"]
    cluster._start("mariadbd", "mariadbd", "--no-defaults", *options, "--bind-address=127.0.0.1", f"--port={sql_port}")
    sql = ["mariadb", "--no-defaults", f"--socket={data}/socket", "-u", "root", "-e"]
    until(lambda: cluster.call(*sql, "select 1", check=False) != "", 60)
    grants = [f"create user slurm@{host} identified by 'slurm'; grant all on slurm_acct.* to slurm@{host};"
              for host in ("127.0.0.1", "localhost")]  # fmt: skip
    cluster.call(*sql, f"create database slurm_acct; {' '.join(grants)}")
    (folder / "slurmdbd.conf").write_text(f"""AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
CommunicationParameters=NoInAddrAny
""")
    (folder / "slurmdbd.conf").chmod(0o600)
    cluster._start("slurmdbd", "slurmdbd", "-D")
    until(lambda: "Cluster" in cluster.call("sacctmgr", "show", "cluster", check=False), 60)
    cluster.call("sacctmgr", "-i", "add", "cluster", "own", check=False)
    cluster.call("sacctmgr", "-i", "add", "account", "us", "cluster=own", check=False)
    cluster.call("sacctmgr", "-i", "add", "user", "root", "account=us", check=False)


def until(true: Callable[[], object], seconds: float) -> None:
    """Wait for something. RuntimeError: it does not come."""
    end_at = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end_at:
            raise RuntimeError(f"waited {seconds:g} s in vain")
        time.sleep(0.2)


def end(daemon: subprocess.Popen[bytes]) -> None:
    """End a process that we started: SIGTERM, after ten seconds SIGKILL."""
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def namespace_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/uts")
    return ""

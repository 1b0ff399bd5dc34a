"""The configuration files, as text."""

from __future__ import annotations

from slurm.settings import Settings

#: The accounting account that every user of the cluster submits under.
ACCOUNT = "vitra"
CLUSTER = "vitra"
#: The beginning of the file that `set` writes: Slurm complains of an empty one in every command.
EXTRA_CONF = "# Changes by `slurm/cluster set`.\n"


def slurm_conf(settings: Settings, host: str) -> str:
    """slurm.conf of a cluster whose controller runs on `host`, the machine's own name."""
    s = settings
    accounting = (
        f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={s.host_address}
AccountingStoragePort={s.slurmdbd_port}
# Between slurmctld and slurmdbd this socket counts, not the one in AuthInfo.
AccountingStoragePass={s.munge_socket}
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
"""
        if s.accounting
        else "AccountingStorageType=accounting_storage/none\n"
    )
    parameters = f"SlurmctldParameters={s.ctld_params}\n" if s.ctld_params else ""
    hardware = (
        f"CPUs={s.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={s.cpus} ThreadsPerCore=1 "
        f"RealMemory={s.memory_mb} TmpDisk=0 Gres=gpu:{s.gpus} State=UNKNOWN"
    )
    nodes = "".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={s.node_address(node)} {hardware}\n"
        for node in s.node_names
    )
    any_time = "Nodes=ALL State=UP MaxTime=INFINITE DefaultTime=60"
    return f"""\
ClusterName={CLUSTER}
SlurmctldHost={host}({s.host_address})
SlurmctldPort={s.port}
SlurmdPort={s.slurmd_port}
SlurmUser=slurm
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also the pause before a requeued job may start again.
AuthInfo=socket={s.munge_socket},cred_expire={s.cred_expire_s}
StateSaveLocation={s.state}/ctld
SlurmdSpoolDir={s.state}/spool/%n
SlurmctldPidFile={s.run}/slurmctld.self.pid
SlurmdPidFile={s.run}/slurmd.%n.self.pid
SlurmctldLogFile={s.log}/slurmctld.log
SlurmdLogFile={s.log}/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
# Without cgroups, which a container seldom may use. Signals reach every process of a step.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait={s.kill_wait_s}
SlurmdTimeout={s.slurmd_timeout_s}
SlurmctldTimeout=30
MessageTimeout=10
BatchStartTimeout=10
InactiveLimit=0
WaitTime=0
MinJobAge=600
MaxArraySize=1001
# The nodes claim more than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=256
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,\
bf_yield_interval=100000,batch_sched_delay=0
PriorityType=priority/multifactor
PriorityWeightAge=100
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=00:00:00
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
{parameters}{accounting}{nodes}\
PartitionName=low {any_time} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={s.grace_s}
PartitionName=scav {any_time} PriorityTier=1 PreemptMode=CANCEL GraceTime={s.grace_s}
PartitionName=nograce {any_time} PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high {any_time} PriorityTier=10 PreemptMode=OFF
include {s.extra_conf}
"""


def gres_conf(settings: Settings) -> str:
    """The fake GPUs: device files that jobs see as CUDA_VISIBLE_DEVICES with their indices."""
    devices = f"{settings.state}/dev/nvidia[0-{settings.gpus - 1}]"
    return f"AutoDetect=off\nNodeName=node[1-{settings.nodes}] Name=gpu File={devices}\n"


def slurmdbd_conf(settings: Settings, host: str) -> str:
    """slurmdbd.conf; it holds the password of a data base that listens on loopback only."""
    s = settings
    return f"""\
DbdHost={host}
DbdAddr={s.host_address}
DbdPort={s.slurmdbd_port}
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket={s.munge_socket}
LogFile={s.log}/slurmdbd.log
PidFile={s.run}/slurmdbd.self.pid
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={s.mysql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""


def mysql_setup() -> str:
    """SQL that makes what slurmdbd needs, however often it is run."""
    users = ("slurm@'127.0.0.1'", "slurm@localhost")
    return "create database if not exists slurm_acct_db;" + "".join(
        f"create user if not exists {user} identified by 'slurm';"
        f"grant all on slurm_acct_db.* to {user};"
        for user in users
    )


def hosts(settings: Settings, host: str) -> str:
    """/etc/hosts of the nodes."""
    lines = [f"{settings.node_address(node)} {node}" for node in settings.node_names]
    return "\n".join(["127.0.0.1 localhost", f"{settings.host_address} {host}", *lines, ""])

"""The table [slurm] of fatbench.toml, and the batch script that is made from it.

A key is one of KEYS or a long option of sbatch (`partition`, `account`, `mail-type`), written with `_` or `-`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping

from fatbench.errors import SpecError, did_you_mean

# fatbench's own keys -> their meaning
KEYS = {
    "time": 'how long a job may take: minutes, or as SLURM writes it: "4:00:00", "1-12:00:00"',
    "cpus": "cores of a job; without a GPU it works on as many cells side by side",
    "gpus": "GPUs of a job; a cell has one, or with run.per_gpu a part of one",
    "jobs": "jobs in the queue at most, as --jobs",
    "setup": 'lines of shell before the work: ["module load cuda"]; one that fails ends the job',
    "python": 'the command in place of Python: "apptainer exec --nv image.sif python"',
    "srun": 'options of srun, which starts the work: ["--container-image=image"]',
    "warning": "seconds before the end of a job's time at which it stops; 90",
    "attacks": "a table of the same keys: jobs of their own for the attacks, once all cells are trained",
}
# the options of sbatch that a user may set
OPTIONS = (  # noqa: SIM905  a list of 70 lines
    "account acctg-freq bb bbf begin clusters cluster-constraint comment constraint container contiguous core-spec"
    " cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution exclude"
    " exclusive extra-node-info gpu-bind gpu-freq gpus-per-node gres gres-flags hint hold job-name licenses mail-type"
    " mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice nodefile nodelist no-kill"
    " oversubscribe overcommit partition power prefer priority profile propagate qos reboot reservation"
    " sockets-per-node spread-job switches thread-spec threads-per-core time-min tmp tres-bind tres-per-task"
    " use-min-nodes wckey"
).split()
# options that fatbench decides on -> why a user cannot set them
OURS = dict.fromkeys(
    ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-core", "gpus-per-task", "ntasks-per-socket"),
    "a job is one process on one node; more jobs work side by side (jobs)",
) | dict.fromkeys(
    ("array", "chdir", "error", "export", "input", "no-requeue", "open-mode", "output", "parsable", "requeue", "signal",
     "test-only", "wait", "wrap"),
    "fatbench sets it itself",
)  # fmt: skip
SHORT = {"cpus": "cpus-per-task", "gpus": "gpus-per-node"}
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
MINUTES = 240  # the default `time` of a job
WARNING = 90  # seconds before the end of a job's time at which it stops
REQUEUE_CODE = 75  # exit code of a job that asks to be queued again: EX_TEMPFAIL of sysexits.h


def checked(table: Mapping[str, object], section: str = "[slurm]") -> dict[str, object]:
    """The table with keys as sbatch writes them. SpecError: a key or value is not valid."""
    result: dict[str, object] = {}
    for user_key, value in table.items():
        key = user_key.replace("_", "-")
        if key in OURS:
            raise SpecError(f"fatbench.toml: {section}: {user_key}: {OURS[key]}")
        if key not in KEYS and key not in OPTIONS:
            raise SpecError(f"fatbench.toml: {section}: unknown key '{user_key}'{did_you_mean(key, [*KEYS, *OPTIONS])}")
        if (key == "attacks") != isinstance(value, dict) or (key == "attacks" and section != "[slurm]"):
            raise SpecError(f"fatbench.toml: {section}: {user_key}: " + (
                "expected a table [slurm.attacks]" if key == "attacks" else "expected one value"
            ))  # fmt: skip
        if key == "time":
            minutes(value)
        elif key in ("cpus", "gpus", "jobs", "warning") and not (type(value) is int and value >= (key != "gpus")):
            raise SpecError(f"fatbench.toml: {section}: {user_key}: expected a whole number, got {value!r}")
        elif key in ("setup", "srun") and not isinstance(value, str | list):
            raise SpecError(
                f"fatbench.toml: {section}: {user_key}: expected {KEYS[key].partition(': ')[2]}, got {value!r}"
            )
        result[key] = value
    return result


def of_attacks(table: Mapping[str, object]) -> dict[str, object] | None:
    """The table for the attacks' own jobs, [slurm] updated by [slurm.attacks]; None if training's jobs attack too."""
    attack_table = table.get("attacks")
    if not isinstance(attack_table, dict):
        return None
    return {key: value for key, value in table.items() if key != "attacks"} | checked(attack_table, "[slurm.attacks]")


def minutes(value: object) -> float:
    """A time limit in minutes. SpecError: it is not written as SLURM's."""
    if type(value) is int and value > 0:
        return float(value)
    match = TIME.fullmatch(str(value)) if not isinstance(value, bool | int) else None
    if match is None:
        raise SpecError(f"fatbench.toml: [slurm]: time: expected {KEYS['time'].partition(': ')[2]}; got {value!r}")
    days, first_field, second_field, third_field = (int(group or 0) for group in match.groups())
    if match[1] is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        return days * 1440.0 + first_field * 60 + second_field + third_field / 60
    if match[4] is not None:  # HH:MM:SS
        return first_field * 60.0 + second_field + third_field / 60
    return first_field + second_field / 60  # MM, MM:SS


def wants_gpu(table: Mapping[str, object]) -> bool:
    """Whether the table's jobs ask for a GPU."""
    if table.get("gpus") == 0:
        return False
    return (
        bool({"gpus", "gpus-per-node"} & table.keys()) or "gpu" in f"{table.get('gres')} {table.get('tres-per-task')}"
    )


def width(table: Mapping[str, object], device: str, per_gpu: int) -> int:
    """How many cells a job works on side by side."""
    if device == "cpu":
        return int(str(table.get("cpus", table.get("cpus-per-task", 1))))
    gpu_request = str(table.get("gpus", table.get("gpus-per-node", table.get("gres", 1)))).rpartition(":")[2]
    return per_gpu * (int(gpu_request) if gpu_request.isdecimal() else 1)


def warning(table: Mapping[str, object]) -> int:
    """How many seconds before the end of its time a job stops; at most a quarter of its time."""
    return int(str(table.get("warning", min(WARNING, int(15 * minutes(table.get("time", MINUTES)))))))


def script(table: Mapping[str, object], device: str, pool: str) -> str:
    """The batch script of a job. pool: that of the run.

    A job that has work left ends with REQUEUE_CODE and is queued again, unless SLURM has already ended it.
    """
    options = {"job-name": "fatbench", "cpus": 1, "time": MINUTES, **table}
    options["time"] = _clock(minutes(options["time"]))
    if device != "cpu" and not wants_gpu(table):
        options["gpus"] = 1
    own_keys = {key: options.pop(key, None) for key in KEYS if key not in ("time", *SHORT)}
    lines = [f"#SBATCH --{_option(SHORT.get(key, key), value)}" for key, value in options.items() if value is not False]
    lines += [
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --requeue",  # needed where the site has JobRequeue=0
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=USR1@{warning(table)}",
    ]
    # newer versions of srun do not take over the number of cores from sbatch
    step = ["srun", "--ntasks=1", f"--cpus-per-task={options.get('cpus', options.get('cpus-per-task', 1))}"]
    python = shlex.split(str(own_keys["python"] or "")) or [sys.executable]
    work = [*step, *_lines(own_keys["srun"]), *python, "-m", f"{__package__}.job", pool]
    return "\n".join([
        "#!/bin/bash", *lines, "set -e", *_lines(own_keys["setup"]), "set +e",
        "trap : TERM",  # preemption sends TERM: the work ends by itself, and the shell waits for its exit code
        f"{shlex.join(work)} &",
        "while kill -0 $! 2> /dev/null; do wait $!; done; wait $!; code=$?",
        'job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; job=${job:-$SLURM_JOB_ID}',
        f'if [ $code = {REQUEUE_CODE} ] && [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then',
        '    scontrol requeue "$job" && sleep 600', "fi", "exit $code", "",
    ])  # fmt: skip


def _option(key: str, value: object) -> str:
    if value is True:
        return key
    return f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}"


def _lines(value: object) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else [value] if isinstance(value, str) else []


def _clock(value: float) -> str:
    """Minutes as SLURM writes them: "240", or "1:30" if they are not whole."""
    return str(int(value)) if value == int(value) else f"{int(value)}:{round(value % 1 * 60):02}"

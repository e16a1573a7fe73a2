"""The launch files: restarts that work, a job that goes back into SLURM's queue before its time is up, spare nodes,
and jobs of Kubernetes whose fields exist."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
BATCH, ONE_NODE = LAUNCH / "slurm.sbatch", LAUNCH / "torchrun.sh"
JOBS = ("jobset", "pytorchjob")


@pytest.mark.parametrize("script", [BATCH, ONE_NODE], ids=lambda script: script.name)
def test_restarts_get_a_store_of_their_own(script):
    """See docs/torchrun.md: the variable alone is not enough."""
    subprocess.run(["bash", "-n", str(script)], check=True)
    commands = "\n".join(line for line in script.read_text().splitlines() if not line.startswith("#"))
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in commands
    assert "--standalone" in commands or "--rdzv-backend=c10d" in commands
    assert "--max-restarts" in commands
    assert "--master-port" not in commands


HALF_AN_ERROR = """
import os, signal
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull), "w").close()
    os.kill(os.getpid(), signal.SIGTERM)
print("on with", os.sys.argv[1])
"""


def test_a_process_that_is_ended_while_it_writes_its_error_is_started_again(tmp_path):
    """torchrun fails at half an error file, as ``@record`` leaves it when torchrun ends its process meanwhile."""
    (tmp_path / "program.py").write_text(HALF_AN_ERROR)
    environment = os.environ | {"NPROC": "1", "PYTHON": sys.executable}
    command = [str(ONE_NODE), str(tmp_path / "program.py"), "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on with a b" in done.stdout


# --- SLURM ---

CPUS_PER_TASK = re.search(r"^#SBATCH --cpus-per-task=(\d+)$", BATCH.read_text(), re.M)[1]  # type: ignore[index]
WORDS = {"JOB_ID": "77", "JOB_NAME": "run", "NNODES": "3", "JOB_NODELIST": "node[1-3]", "CPUS_PER_TASK": CPUS_PER_TASK}


@pytest.fixture
def slurm(tmp_path):
    """``start(lasts, code)``: the script under a ``scontrol`` that notes what it is asked, and an ``srun`` that does
    what ``lasts`` says, in words of the shell, and exits with ``code``."""
    fakes = tmp_path / "bin"
    fakes.mkdir()
    asked = tmp_path / "asked"
    started = []

    def fake(name, text):
        (fakes / name).write_text(f"#!/bin/sh\n{text}\n")
        (fakes / name).chmod(0o755)

    def start(lasts, code, **more):
        fake("scontrol", f'echo "$@" >> {asked}; [ "$1" = show ] && printf "node1\\nnode2\\n"; true')
        fake("srun", f'printf "%s\\n" "$@" > {asked}.new; mv {asked}.new {asked}.srun; {lasts}; exit {code}')
        environment = {f"SLURM_{key}": value for key, value in WORDS.items()} | {"SLURM_SUBMIT_DIR": str(tmp_path)}
        environment |= {"PATH": f"{fakes}:{os.environ['PATH']}", **more}
        words = ["bash", str(BATCH), "program.py", "extra=1"]
        started.append(subprocess.Popen(words, env=environment, start_new_session=True))
        deadline = time.monotonic() + 120
        while not Path(f"{asked}.srun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return started[-1], asked

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def srun_words(asked) -> list[str]:
    return Path(f"{asked}.srun").read_text().splitlines()


def test_a_job_whose_time_is_nearly_up_is_requeued_and_goes_on_until_slurm_ends_it(slurm):
    assert "#SBATCH --signal=B:USR1@" in BATCH.read_text()
    process, asked = slurm("until grep -q requeue asked; do sleep 0.05; done; sleep 0.3", 0)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 0
    assert asked.read_text().splitlines() == ["show hostnames node[1-3]", "requeue 77"]
    words = srun_words(asked)
    assert {"--rdzv-endpoint=node1:29400", "--nnodes=3"} <= {*words}
    assert words[-2:] == ["program.py", "extra=1"]


def test_no_node_fails_at_half_an_error_file(slurm):
    process, asked = slurm("true", 0)
    assert process.wait(120) == 0
    program = ["--no-python", "env", "-u", "TORCHELASTIC_ERROR_FILE", "python", "-u", "program.py", "extra=1"]
    assert srun_words(asked)[-len(program) :] == program


def test_a_job_that_fails_is_not_requeued_and_says_so_by_its_exit_code(slurm):
    process, asked = slurm("true", 7)
    assert process.wait(120) == 7
    assert "requeue" not in asked.read_text()


def test_the_ranks_of_a_node_get_all_cores_that_the_job_asked_for(slurm):
    """Since SLURM 22.05 srun does not take ``--cpus-per-task`` from the job."""
    process, asked = slurm("true", 0)
    assert process.wait(120) == 0
    assert f"--cpus-per-task={CPUS_PER_TASK}" in srun_words(asked)


def test_spare_nodes_wait_and_do_not_make_a_job_fail_that_is_done(slurm, tmp_path):
    process, asked = slurm("true", 1, SPARES="1")
    assert process.wait(120) == 1
    assert "requeue 77" in asked.read_text().splitlines(), "SLURM does not requeue with --no-kill"
    words = srun_words(asked)
    assert {"--nnodes=2", "--no-kill"} <= {*words}
    task, done = words[words.index("bash") :], tmp_path / "runs" / "run" / "done.77.0"
    at = task.index("python")
    assert task[:at] == ["bash", "-c", task[2], "runs/run/done.77.0"]
    assert done.parent.is_dir()

    def run_task(command: str) -> int:
        quick = task[2].replace("sleep 10", "sleep 0")
        return subprocess.run(["bash", "-c", quick, str(done), "bash", "-c", command]).returncode

    assert run_task("exit 3") == 3
    assert run_task("exit 0") == 0
    assert run_task("exit 1") == 0, "a spare, when the others are done"


def test_a_container_sees_the_nodes_shared_memory_and_the_directory(slurm, tmp_path):
    process, asked = slurm("true", 0, IMAGE="nemo.sqsh", MOUNTS="/data:/data", NUMA="node")
    assert process.wait(120) == 0
    words = srun_words(asked)
    assert f"--container-mounts=/dev/shm:/dev/shm,{tmp_path}:{tmp_path},/data:/data" in words
    assert "--numa-binding=node" in words[words.index("python") :]


def test_a_dry_run_prints_what_srun_would_be_asked(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {f"SLURM_{key}": value for key, value in WORDS.items()} | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRY_RUN": "1"}
    done = subprocess.run(["bash", str(BATCH), "a b"], env=environment, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout)
    assert (words[0], words[-1]) == ("srun", "a b")


# --- Kubernetes ---

CONTAINER = (
    "name image workingDir command args env[] env[].name env[].value ports[] ports[].containerPort ports[].name "
    "resources resources.requests resources.limits securityContext securityContext.capabilities volumeMounts[] "
    "volumeMounts[].name volumeMounts[].mountPath"
)
AFFINITY = "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[]"
POD = (
    "restartPolicy terminationGracePeriodSeconds tolerations[] tolerations[].key tolerations[].operator "
    f"tolerations[].effect {AFFINITY} {AFFINITY}.labelSelector.matchLabels {AFFINITY}.topologyKey containers[] "
    "volumes[] volumes[].name volumes[].emptyDir.medium volumes[].emptyDir.sizeLimit "
    "volumes[].persistentVolumeClaim.claimName"
)
JOB = "spec.replicatedJobs[].template.spec"
REPLICA = "spec.pytorchReplicaSpecs.Worker"
ABOVE = {
    "jobset": (
        "spec.network.enableDNSHostnames spec.network.publishNotReadyAddresses spec.failurePolicy.maxRestarts "
        f"spec.replicatedJobs[] spec.replicatedJobs[].name spec.replicatedJobs[].replicas {JOB}.parallelism "
        f"{JOB}.completions {JOB}.completionMode {JOB}.backoffLimit"
    ),
    "pytorchjob": (
        "spec.nprocPerNode spec.runPolicy.cleanPodPolicy spec.runPolicy.backoffLimit spec.elasticPolicy.rdzvBackend "
        "spec.elasticPolicy.rdzvId spec.elasticPolicy.rdzvPort spec.elasticPolicy.maxRestarts "
        f"{REPLICA}.replicas {REPLICA}.restartPolicy"
    ),
}
"""Fields of JobSet v1alpha2 (0.9) and PyTorchJob v1 (training-operator 1.9), as their custom resource definitions have
them; every field of the files was checked against those."""
HERE = {"jobset": JOB, "pytorchjob": REPLICA}
FREE = (".resources.requests", ".resources.limits", ".metadata.labels", ".matchLabels", "capabilities")


def fields(value: Any, path: str = "") -> set[str]:
    """The paths that a document has."""
    if isinstance(value, list):
        found = {f"{path}[]"} if value and isinstance(value[0], dict) else {path}
        return found.union(*(fields(item, f"{path}[]") for item in value if isinstance(item, dict)))
    if isinstance(value, dict) and not path.endswith(FREE):
        return set().union(*(fields(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()))
    return {path}


def read(job: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A job, its pods, and their container."""
    document = yaml.safe_load((LAUNCH / f"{job}.yaml").read_text())
    spec = document["spec"]
    if job == "jobset":
        [replicated] = spec["replicatedJobs"]
        template = replicated["template"]["spec"]["template"]
    else:
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    [container] = template["spec"]["containers"]
    return document, template, container


@pytest.mark.parametrize("job", JOBS)
def test_every_field_exists(job):
    document, _, _ = read(job)
    pod = f"{HERE[job]}.template.spec"
    known = {"apiVersion", "kind", "metadata.name", f"{HERE[job]}.template.metadata.labels", *ABOVE[job].split()}
    known |= {f"{pod}.{name}" for name in POD.split()} | {f"{pod}.containers[].{name}" for name in CONTAINER.split()}
    assert fields(document) <= known
    apis = {"jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"), "pytorchjob": ("kubeflow.org/v1", "PyTorchJob")}
    assert (document["apiVersion"], document["kind"]) == apis[job]


@pytest.mark.parametrize("job", JOBS)
def test_pods_keep_their_memory_and_may_lock_it(job):
    _, template, container = read(job)
    pod = template["spec"]
    [shm] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    limit, room = (
        int(text.removesuffix("Gi"))
        for text in (container["resources"]["limits"]["memory"], shm["emptyDir"]["sizeLimit"])
    )
    assert room < limit, "what lies there counts"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert any(name.startswith("rdma/") for name in container["resources"]["limits"])
    assert pod["terminationGracePeriodSeconds"] > 20, "survivor_secs"
    [apart] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


@pytest.mark.parametrize("job", JOBS)
def test_restarts_of_containers_get_a_store_of_their_own(job):
    document, template, container = read(job)
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    words = [*container["command"], *container["args"]]
    assert not any("master" in word for word in words)
    spec = document["spec"]
    if job == "jobset":
        [replicated] = spec["replicatedJobs"]
        inner, name = replicated["template"]["spec"], document["metadata"]["name"]
        assert template["spec"]["restartPolicy"] == "OnFailure"
        assert f"--nnodes={inner['parallelism']}" in words
        assert inner["completions"] == inner["parallelism"]
        assert {"--rdzv-backend=c10d", f"--rdzv-endpoint={name}-{replicated['name']}-0-0.{name}:29400"} <= {*words}
    else:
        assert spec["elasticPolicy"]["rdzvBackend"] == "c10d"
        assert spec["pytorchReplicaSpecs"].keys() == {"Worker"}, "a Master sets a master port"
        assert container["name"] == "pytorch"
    gpus = int(spec.get("nprocPerNode") or next(word for word in words if "nproc" in word).partition("=")[2])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus

"""A PyTorchJob for Kubernetes with Kubeflow's training operator: a master and workers, each a machine's GPUs.

Fields are those of ``kubeflow.org/v1`` (training-operator, ``manifests/base/crds/kubeflow.org_pytorchjobs.yaml``). The
operator tells each pod its rank and the master's address (``pkg/controller.v1/pytorch/envvar.go: setPodEnv``), and
Kubernetes writes a variable's value wherever a command says ``$(NAME)``.
"""

from __future__ import annotations

from typing import Any

from autotrain_mem.exports.document import Tool, document
from autotrain_mem.exports.draft import Draft, draft_of
from autotrain_mem.exports.machines import NOTES_HEAD, machine_words, note_shared_files, rendezvous
from autotrain_mem.types import Job, Plan

IMAGE = "IMAGE"
"""Stands for a registry's name of an image that nobody here knows; no image can be called so."""
CLAIM = "autofit-workspace"
WORKSPACE = "/workspace"
"""Where the project's Dockerfile has its working folder."""


def kubernetes(plan: Plan, job: Job) -> str:
    """The manifest for ``kubectl apply -f FILE``."""
    draft = draft_of(plan, job)
    tool = Tool(name="Kubernetes", command="kubectl apply -f FILE", trains_with_trl=True, notes_head=NOTES_HEAD)
    notes = (
        f"write your image in place of {IMAGE}: the project's Dockerfile makes one",
        f"make a volume claim {CLAIM} that many may write (ReadWriteMany): it is mounted at {WORKSPACE}",
        "Kubeflow's training operator is installed (kubeflow.org/v1 PyTorchJob)",
    )
    draft.keys |= _manifest(draft)
    note_shared_files(draft, notes)
    return document(draft, tool, {})


def _manifest(draft: Draft) -> dict[str, Any]:
    workers = {"Worker": _replicas(draft, draft.nodes - 1)} if draft.nodes > 1 else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": f"autofit-{draft.job.method}"},
        "spec": {
            "nprocPerNode": str(_devices(draft)),
            "pytorchReplicaSpecs": {"Master": _replicas(draft, 1), **workers},
        },
    }


def _replicas(draft: Draft, count: int) -> dict[str, Any]:
    mounts = {"shm": "/dev/shm", "workspace": WORKSPACE}
    place = rendezvous(draft, "$(RANK)", "$(MASTER_ADDR)", "$(MASTER_PORT)")  # RANK is the pod's own, among pods
    container = {
        "name": "pytorch",  # the operator looks for a container of this name
        "image": IMAGE,
        "workingDir": WORKSPACE,
        "command": [*(_escaped(word) for word in machine_words(draft)), *place],
        "env": [{"name": name, "value": _escaped(value)} for name, value in draft.job.environment.items()],
        "resources": {"limits": {"nvidia.com/gpu": _devices(draft)}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's and a dataloader's; a container has 64 MiB
        {"name": "workspace", "persistentVolumeClaim": {"claimName": CLAIM}},
    ]
    shown = {name: value for name, value in container.items() if value != []}
    pod = {"spec": {"containers": [shown], "volumes": volumes}}
    return {"replicas": count, "restartPolicy": "OnFailure", "template": pod}


def _escaped(word: str) -> str:
    """Writes a word in which Kubernetes finds no variable."""
    return word.replace("$(", "$$(")


def _devices(draft: Draft) -> int:
    return draft.knobs.processes // draft.nodes

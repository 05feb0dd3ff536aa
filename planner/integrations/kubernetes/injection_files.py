"""Adds rfork's files to containers whose image lacks them: by init container or image volume. Pure."""

from __future__ import annotations

from typing import Final, Literal

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.env_vars import FILES_DIR
from planner.integrations.kubernetes.manifests import Document
from rfork.errors import SettingsError

FILES_IN_IMAGE: Final = "/opt/rfork/files"
"""Path of rfork's files in the image `KubernetesSettings.injection_image`."""
FILES_VOLUME: Final = "rfork-files"
INIT_CONTAINER: Final = "rfork-files"
INIT_MOUNT_PATH: Final = "/target"
"""Mount path in the init container: at `FILES_DIR` the volume would hide the image's own files."""
NON_ROOT_UID: Final = 65532
"""User of the init container in a Pod that runs as root. Otherwise the Pod's or the image's user applies."""


def volume(injection_mode: Literal["init", "image"], image: str, *, image_volumes: bool) -> Document:
    """Return the volume with the files. Raises SettingsError if it cannot be provided.

    `image_volumes`: the cluster is known to support volumes that are images.
    """
    if not image:
        raise SettingsError(
            "no image with rfork's files is configured",
            hint="set RFORK_K8S_INJECTION_IMAGE for the webhook, or "
            f"{names.INJECTION_MODE}: none if the image contains rfork",
        )
    if injection_mode == "image" and not image_volumes:
        raise SettingsError(
            "this cluster is not known to support image volumes",
            hint=f"set {names.INJECTION_MODE}: init, or RFORK_K8S_IMAGE_VOLUMES=true for the webhook "
            "(Kubernetes 1.35 or newer)",
        )
    if injection_mode == "image":
        return {"name": FILES_VOLUME, "image": {"reference": image}}
    return {"name": FILES_VOLUME, "emptyDir": {}}


def files_dir(injection_mode: Literal["init", "image"]) -> str:
    """Return the directory of the files in the engine's container.

    The complete image is mounted, because some runtimes (containerd 2.0) ignore subPath.
    """
    return f"{FILES_DIR}{FILES_IN_IMAGE}" if injection_mode == "image" else FILES_DIR


def init_container(image: str, *, runs_as_root: bool) -> Document:
    """Return the init container that copies the files. `runs_as_root`: the Pod's containers run as root."""
    security: Document = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if runs_as_root:
        security["runAsUser"] = NON_ROOT_UID
    # Requests equal to the limits keep a Pod in the QoS class Guaranteed.
    resources = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": INIT_CONTAINER,
        "image": image,
        "command": ["cp", "-R", f"{FILES_IN_IMAGE}/.", INIT_MOUNT_PATH],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": security,
        "volumeMounts": [{"name": FILES_VOLUME, "mountPath": INIT_MOUNT_PATH}],
    }

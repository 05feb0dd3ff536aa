"""How rfork's files come into a container whose image lacks them: init container, or image volume. Pure."""

from __future__ import annotations

from typing import Final, Literal

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.env_vars import FOLDER
from planner.integrations.kubernetes.manifests import Document
from rfork.errors import SettingsError

FILES_IN_IMAGE: Final = "/opt/rfork/files"
"""Where `KubernetesSettings.image` holds rfork's files."""
FILES_VOLUME: Final = "rfork-files"
FILES_CONTAINER: Final = "rfork-files"
FILES_TARGET: Final = "/target"
"""Where the init container sees the volume: at `FOLDER` it would hide the image's own."""
NOT_ROOT: Final = 65532
"""Who copies the files in a Pod that runs as root; elsewhere it is whom the Pod, or the image, names."""


def volume(injection_mode: Literal["init", "image"], image: str, image_volumes: bool) -> Document:
    """The volume that holds the files. Raises SettingsError where there is none to be had."""
    if not image:
        raise SettingsError(
            "there is no image of rfork's files to take them from",
            hint=f"set RFORK_K8S_INJECTION_IMAGE for the webhook, or {names.FILES}: none if the image has rfork",
        )
    if injection_mode == "image" and not image_volumes:
        raise SettingsError(
            "rfork's files are to come as an image volume, which this cluster is not said to know",
            hint=f"set {names.FILES}: init, or, from Kubernetes 1.35 on, RFORK_K8S_IMAGE_VOLUMES=true for the webhook",
        )
    volume_spec: Document = {"name": FILES_VOLUME}
    volume_spec |= {"image": {"reference": image}} if injection_mode == "image" else {"emptyDir": {}}
    return volume_spec


def folder(injection_mode: Literal["init", "image"]) -> str:
    """Where the container sees the files.

    The whole image is mounted: a runtime that does not know subPath yet (containerd 2.0) ignores it.
    """
    return f"{FOLDER}{FILES_IN_IMAGE}" if injection_mode == "image" else FOLDER


def init_container(image: str, *, runs_as_root: bool) -> Document:
    """The init container that copies them out of `image`; `runs_as_root`: the Pod's containers run as root."""
    security: Document = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if runs_as_root:
        security["runAsUser"] = NOT_ROOT
    # Requests that are the limits leave a Pod of the class Guaranteed in it.
    resources = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": FILES_CONTAINER,
        "image": image,
        "command": ["cp", "-R", f"{FILES_IN_IMAGE}/.", FILES_TARGET],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": security,
        "volumeMounts": [{"name": FILES_VOLUME, "mountPath": FILES_TARGET}],
    }

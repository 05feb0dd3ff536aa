"""JIT caches as a second kind of image: what engines compiled goes from those that run to new ones."""

from rfork.artifacts.client import fetch
from rfork.artifacts.key import ArtifactKey, local_key
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.server import ArtifactServer, seed
from rfork.artifacts.storage import load, save

__all__ = ["ArtifactKey", "ArtifactReport", "ArtifactServer", "fetch", "load", "local_key", "save", "seed"]

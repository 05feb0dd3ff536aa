"""JIT caches as images: what an engine has compiled is transferred from running instances to new ones."""

from rfork.artifacts.client import ArtifactReport, fetch
from rfork.artifacts.key import ArtifactKey, local_key
from rfork.artifacts.server import ArtifactServer, seed
from rfork.artifacts.storage import load, save

__all__ = ["ArtifactKey", "ArtifactReport", "ArtifactServer", "fetch", "load", "local_key", "save", "seed"]

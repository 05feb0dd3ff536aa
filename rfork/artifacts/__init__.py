"""JIT caches as a second kind of image: what engines compiled goes from those that run to new ones."""

from rfork.artifacts.giving import ArtifactGiver, seed
from rfork.artifacts.key import ArtifactKey, key_of_here
from rfork.artifacts.report import ArtifactReport
from rfork.artifacts.stored import load, save
from rfork.artifacts.taking import fetch

__all__ = ["ArtifactGiver", "ArtifactKey", "ArtifactReport", "fetch", "key_of_here", "load", "save", "seed"]

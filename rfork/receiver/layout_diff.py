"""Explains why a fork's layout matches no source: the first difference in tags, attributes or tensors.

Runs on the target, if no source has its layout but one has another layout of the model.
"""

from __future__ import annotations

import time

from rfork.errors import LayoutMismatch, NoSource, RforkError
from rfork.image.compat_tags import tag_differences
from rfork.image.layout import Layout
from rfork.peer.base import Dial
from rfork.schema import Route


def explain_layout_mismatch(other: Route, own: Layout, dial: Dial, timeout_s: float) -> NoSource:
    """Fetch the other source's layout and compare; returns the error to raise."""
    peer = dial(other.address, lambda: other.lease.token)
    try:
        theirs = peer.full_manifest(time.monotonic() + timeout_s).layout
    except RforkError as error:
        return NoSource(f"{other.address} has the model with another layout (not compared: {error})")
    finally:
        peer.close()
    difference = "; ".join(tag_differences(own, theirs)) or own.first_difference(theirs) or "the layouts are now equal"
    mismatch = LayoutMismatch(f"{other.address} has the model with another layout; first difference: {difference}")
    return NoSource(str(mismatch), hint="build the module exactly as the seed did: same revision, dtype and options")

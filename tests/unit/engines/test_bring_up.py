"""A model brought up from a snapshot alone, and what is required without anything to have it from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rfork.artifacts.snapshot.write import write_snapshot
from rfork.engines.bring_up import Subject, bring_up

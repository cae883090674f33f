"""Runners choose a bucket for each step and copy the batch into static buffers."""

from __future__ import annotations

from devgraph.runners.batch import Batch
from devgraph.runners.buckets import Buckets, default_buckets
from devgraph.runners.decisions import Decision, GraphKey, Reason
from devgraph.runners.decode import DecodeRunner
from devgraph.runners.encoder import EncoderRunner
from devgraph.runners.loop import Loop, LoopResult
from devgraph.runners.prefill import PrefillRunner
from devgraph.runners.ranks import RankGroup
from devgraph.runners.report import BucketStats, RunnerStats
from devgraph.runners.slots import HostSlot, InputSlot, OutputSlot, Pad, Size
from devgraph.runners.state import StateSlot

__all__ = [
    "Batch",
    "BucketStats",
    "Buckets",
    "Decision",
    "DecodeRunner",
    "EncoderRunner",
    "GraphKey",
    "HostSlot",
    "InputSlot",
    "Loop",
    "LoopResult",
    "OutputSlot",
    "Pad",
    "PrefillRunner",
    "RankGroup",
    "Reason",
    "RunnerStats",
    "Size",
    "StateSlot",
    "default_buckets",
]

"""Runners: what data flows through fixed buffers, and which bucket to use."""

from __future__ import annotations

from devgraph.runners.batch import Batch
from devgraph.runners.buckets import Buckets, default_buckets
from devgraph.runners.decision import Decision, GraphKey, Reason
from devgraph.runners.decode import DecodeRunner
from devgraph.runners.prefill import PrefillRunner
from devgraph.runners.prove import RunnerReport
from devgraph.runners.ranks import RankGroup
from devgraph.runners.report import BucketPlan, RunnerPlan
from devgraph.runners.slots import HostSlot, InputSlot, OutputSlot, Pad, Size
from devgraph.runners.stats import BucketStats, RunnerStats

__all__ = [
    "Batch",
    "BucketPlan",
    "BucketStats",
    "Buckets",
    "Decision",
    "DecodeRunner",
    "GraphKey",
    "HostSlot",
    "InputSlot",
    "OutputSlot",
    "Pad",
    "PrefillRunner",
    "RankGroup",
    "Reason",
    "RunnerPlan",
    "RunnerReport",
    "RunnerStats",
    "Size",
    "default_buckets",
]

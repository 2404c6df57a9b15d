"""Replace the parts of a command's output that differ from run to run."""

from __future__ import annotations

CHANGING = (
    (r"job-local-[0-9a-f]{12}", "JOB"),
    (r"grp-local-[0-9a-f]{12}", "BATCH"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(Z|\+00:00)", "MOMENT"),
    (r'("(?:hours|expected_hours|elapsed|rate|eta|seconds)": )[0-9.e+-]+', r"\1NUMBER"),
    (r'("bytes": |bytes {2,})\d+', r"\1NUMBER"),
    (r'("pid": |pid {2,})\d+', r"\1NUMBER"),
    (r"\b\d+ s\b", "AGE"),
    (r"[\d.]+ (bytes|[kM]B) in [\d,]+ files?", "SIZE"),
    (r"\b[0-9a-f]{64}\b", "DIGEST"),
    (r"((?:cpu|gpu|tpu)-)[0-9a-f]{12}\b", r"\1HASH"),
    (r"kinetic_aio-\S+\.whl", "WHEEL"),
    (r"python:3\.\d+-slim|dev\.kinetic\.python=3\.\d+", "PYTHON"),
    (r'("files": |files {2,})\d+', r"\1NUMBER"),
    (r" {2,}", "  "),  # the width of a column depends on the replaced text
)
"""Patterns of text that differs from run to run, and their replacements."""

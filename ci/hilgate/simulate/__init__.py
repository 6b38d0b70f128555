# SPDX-License-Identifier: Apache-2.0
"""Whole builds without Buildkite and GPUs: the real plan, pipeline, records and judge over agents that go wrong."""

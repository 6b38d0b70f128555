# SPDX-License-Identifier: Apache-2.0
"""Generate and lint Buildkite pipelines, and call Buildkite's REST API."""

"""Generate and lint Buildkite pipelines, and call Buildkite's REST API."""

"""A plan as Buildkite steps, and Buildkite's REST API."""

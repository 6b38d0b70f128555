# The pipeline's settings and its schedules as data (Terraform). Set the variables, here and in the other files.
# tests/ci/buildkite/test_static_pipelines.py holds the steps equal to those in docs/how-to/set-up-buildkite.md.
variable "repository" { type = string }
variable "cluster_id" { type = string }

terraform {
  required_providers {
    buildkite = { source = "buildkite/buildkite", version = "~> 1.0" }
    github    = { source = "integrations/github", version = ">= 6.11" } # allowed_merge_methods
  }
}

resource "buildkite_pipeline" "rocm" {
  name           = "rocm"
  repository     = var.repository
  cluster_id     = var.cluster_id
  default_branch = "main"

  # A newer push ends the build of the older one; main, the merge queue and the night run to their end.
  cancel_intermediate_builds               = true
  cancel_intermediate_builds_branch_filter = "!main !gh-readonly-queue/*"

  steps = <<-YAML
    steps:
      - label: upload
        agents: {queue: amd-gate}
        timeout_in_minutes: 5
        command: |
          hilgate flow > upload.yml
          buildkite-agent pipeline upload --reject-parse-warnings upload.yml
  YAML

  provider_settings = {
    trigger_mode                                  = "code"
    build_branches                                = true
    build_pull_requests                           = true
    build_pull_request_forks                      = false # forks have a pipeline of their own, after a member has looked
    build_merge_group_checks_requested            = true
    build_tags                                    = false
    skip_pull_request_builds_for_existing_commits = false # a branch's build posts nothing
    publish_commit_status                         = false # `verdict` alone posts
    filter_enabled                                = true
    filter_condition                              = "build.branch == pipeline.default_branch || build.pull_request.id != null || build.merge_queue.base_branch != null"
  }
}

# What they take, as declared (`hilgate plan --profile nightly`). Each needs an owner who reads it.
resource "buildkite_pipeline_schedule" "nightly" {
  pipeline_id = buildkite_pipeline.rocm.id
  label       = "nightly: 129 GPU-hours as declared"
  cronline    = "0 1 * * 1-6 UTC"
  branch      = "main"
  env         = { HILGATE_PROFILE = "nightly" }
}

resource "buildkite_pipeline_schedule" "weekly" {
  pipeline_id = buildkite_pipeline.rocm.id
  label       = "weekly: 112 GPU-hours as declared; everything on every arch, with its evidence"
  cronline    = "0 1 * * 0 UTC"
  branch      = "main"
  env         = { HILGATE_FLOW = "release" }
}

# Ten minutes are the shortest interval that Buildkite keeps. Red: it has ended a job, so a queue has too few agents.
resource "buildkite_pipeline_schedule" "waiting" {
  pipeline_id = buildkite_pipeline.rocm.id
  label       = "end jobs that no agent takes"
  cronline    = "*/10 * * * * UTC"
  branch      = "main"
  env         = { HILGATE_FLOW = "waiting" }
}

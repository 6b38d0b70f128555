# The pipeline's settings and its schedules as data (Terraform, provider buildkite/buildkite 1.x). Set the two variables.
# tests/ci/buildkite/test_static_pipelines.py holds the steps equal to those in docs/how-to/set-up-buildkite.md.
variable "repository" { type = string }
variable "cluster_id" { type = string }
variable "alert_address" { type = string } # address that hears of a paused node, a red main or night, a long queue

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
  label       = "nightly: 109 GPU-hours as declared"
  cronline    = "0 1 * * 1-6 UTC"
  branch      = "main"
  env         = { HILGATE_PROFILE = "nightly" }
}

resource "buildkite_pipeline_schedule" "weekly" {
  pipeline_id = buildkite_pipeline.rocm.id
  label       = "weekly: 109 GPU-hours as declared; everything on every arch, with its evidence"
  cronline    = "0 1 * * 0 UTC"
  branch      = "main"
  env         = { HILGATE_FLOW = "release" }
}

resource "buildkite_pipeline_schedule" "watch" {
  pipeline_id = buildkite_pipeline.rocm.id
  label       = "nodes, main, the night, queues: red when somebody must look"
  cronline    = "30 * * * * UTC"
  branch      = "main"
  env         = { HILGATE_FLOW = "watch", HILGATE_TELL = var.alert_address }
}

# Ten minutes are the shortest interval that Buildkite keeps. A webhook that starts the same build only makes it sooner.
resource "buildkite_pipeline_schedule" "answer" {
  pipeline_id = buildkite_pipeline.rocm.id
  label       = "comments on pull requests: /hilgate run, retry, cancel, explain"
  cronline    = "*/10 * * * * UTC"
  branch      = "main"
  env         = { HILGATE_FLOW = "answer" }
}

# The pipeline of forks as data, beside pipeline.tf: a cluster of its own, whose agents have no secret and share no host with
# the other's. A member starts each build, after a look at the change.
variable "forks_cluster_id" { type = string }

resource "buildkite_pipeline" "forks" {
  name           = "rocm-forks"
  repository     = var.repository
  cluster_id     = var.forks_cluster_id
  default_branch = "main"

  cancel_intermediate_builds = true

  steps = buildkite_pipeline.rocm.steps

  provider_settings = {
    trigger_mode                                  = "code"
    build_branches                                = false
    build_pull_requests                           = true
    build_pull_request_forks                      = true
    prefix_pull_request_fork_branch_names         = true # a fork's `main` is not ours
    skip_pull_request_builds_for_existing_commits = false
    publish_commit_status                         = false # `verdict` alone posts
    build_tags                                    = false
    filter_enabled                                = true
    filter_condition                              = "build.pull_request.repository.fork == true"
  }
}

# The queues of that cluster have the same names, because a plan names them; the agents are others.
resource "buildkite_cluster_queue" "forks" {
  for_each   = toset(["amd-gate", "amd-cpu", "amd_mi300_1"])
  cluster_id = var.forks_cluster_id
  key        = each.key
}

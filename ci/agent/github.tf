# What GitHub holds the repository to: nothing reaches the default branch without a review by its code owners and the
# verdict, posted by Buildkite's app. `terraform plan` shows where the repository differs.
variable "github_repository" { type = string }  # without its owner
variable "buildkite_app_id" { type = number }   # gh api /apps/buildkite --jq .id
variable "merge_queue_app_id" { type = number } # docs/how-to/set-up-buildkite.md says how to find it

resource "github_repository_ruleset" "main" {
  name        = "hilgate: the default branch"
  repository  = var.github_repository
  target      = "branch"
  enforcement = "active"

  conditions {
    ref_name {
      include = ["~DEFAULT_BRANCH"]
      exclude = []
    }
  }

  rules {
    deletion         = true
    non_fast_forward = true

    # Other methods would put commits on the branch that no build has seen as its head.
    pull_request {
      required_approving_review_count   = 1
      dismiss_stale_reviews_on_push     = true
      require_code_owner_review         = true
      require_last_push_approval        = true
      required_review_thread_resolution = false
      allowed_merge_methods             = ["squash"]
    }

    # The app's id, because anybody who may write to the repository may post a status of this name.
    required_status_checks {
      strict_required_status_checks_policy = false
      do_not_enforce_on_create             = false
      required_check {
        context        = "rocm/required"
        integration_id = var.buildkite_app_id
      }
    }

    merge_queue {
      merge_method                      = "SQUASH"
      grouping_strategy                 = "ALLGREEN"
      max_entries_to_build              = 5
      min_entries_to_merge              = 1
      max_entries_to_merge              = 5
      min_entries_to_merge_wait_minutes = 5
      check_response_timeout_minutes    = 360
    }
  }
}

# A build of a branch of the queue posts the verdict, so nobody but the queue makes, moves or removes one.
resource "github_repository_ruleset" "queue" {
  name        = "hilgate: branches of the merge queue"
  repository  = var.github_repository
  target      = "branch"
  enforcement = "active"

  bypass_actors {
    actor_type  = "Integration"
    actor_id    = var.merge_queue_app_id
    bypass_mode = "always"
  }

  conditions {
    ref_name {
      include = ["refs/heads/gh-readonly-queue/**/*"]
      exclude = []
    }
  }

  rules {
    creation         = true
    update           = true
    deletion         = true
    non_fast_forward = true
  }
}

"""From declarations and a change to plan.json: each step with its reason, each omission with its reason."""

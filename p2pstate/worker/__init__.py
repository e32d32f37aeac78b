"""The worker's side: its link to the agent, and how a user's script is run."""

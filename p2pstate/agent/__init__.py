"""The agent's side: one process per node that owns membership, vault and worker processes."""

"""The durable tier: versions on disk, behind the memory."""

"""Where the time of a run went: measured in every rank, kept in the run directory, shown."""

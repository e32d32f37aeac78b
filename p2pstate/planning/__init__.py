"""Planning a run before it is bought: failures, checkpoints, copies and money. Needs nothing but NumPy."""

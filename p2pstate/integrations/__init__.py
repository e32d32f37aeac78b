"""Trainers of other projects, protected by a Replicator. Each module needs the trainer's own package."""

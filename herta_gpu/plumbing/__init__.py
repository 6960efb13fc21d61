"""What every program needs and no paper speaks of: checks, files, checkpoints, stages, manners."""

"""Realistic shift in the manner of WILDS: unseen cameras, other products, other queries, gaps in the inputs."""

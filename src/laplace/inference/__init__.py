"""What is done with a posterior: fit, predict, read, add, compare."""

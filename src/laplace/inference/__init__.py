"""Fit, predict, inspect, and combine posteriors."""

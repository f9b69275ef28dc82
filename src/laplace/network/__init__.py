"""Handle the user's network: batches, calls, and replicas that may be hooked without touching the original."""

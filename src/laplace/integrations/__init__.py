"""Interfaces to other libraries. A module here imports its library, and names the extra if that is missing."""

"""Files that hold numbers and words alone: fitted posteriors, and fits that were interrupted."""

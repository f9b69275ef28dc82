"""Files that hold only numbers and words: fitted posteriors, and fits that were interrupted."""

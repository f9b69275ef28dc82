"""Save and load fitted posteriors and interrupted fits. Files hold only numbers and words."""

"""Linear algebra and random numbers: tensors in, tensors out. Nothing here knows networks or posteriors."""

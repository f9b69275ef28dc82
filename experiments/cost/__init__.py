"""What each method costs beside the network alone: training, prediction, memory."""

"""Does the evidence choose the network that predicts best?"""

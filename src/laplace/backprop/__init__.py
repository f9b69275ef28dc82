"""Run the network on a batch and send vectors of output space back to the outputs of its layers (the engine)."""

from laplace.backprop.gradients import Forward, Jacobian, JacobianOf, Moments, MomentsOf
from laplace.backprop.head import Head
from laplace.backprop.network import Network
from laplace.backprop.plan import Plan

__all__ = ["Forward", "Head", "Jacobian", "JacobianOf", "Moments", "MomentsOf", "Network", "Plan"]

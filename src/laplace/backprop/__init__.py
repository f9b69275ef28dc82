"""The engine: runs the network on a batch and sends vectors of output space back to the layers' outputs."""

from laplace.backprop.gradients import Forward, Jacobian, JacobianOf, Moments, MomentsOf
from laplace.backprop.head import Head
from laplace.backprop.network import Network
from laplace.backprop.plan import Plan

__all__ = ["Forward", "Head", "Jacobian", "JacobianOf", "Moments", "MomentsOf", "Network", "Plan"]

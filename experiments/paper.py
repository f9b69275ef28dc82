"""Numbers of the paper (Daxberger et al. 2021), under the names that the methods have here."""

from __future__ import annotations

CIFAR_C_NLL = {  # at severities 0 to 5, or at 0 alone, of a WideResNet-16-4
    "MAP": (0.178, 0.556, 0.964, 1.512, 1.890, 2.177),
    "LA paper": (0.155, 0.444, 0.772, 1.188, 1.474, 1.687),
    "LA* paper": (0.194, 0.443, 0.698, 1.014, 1.214, 1.360),
    "ensemble": (0.133,),
    "SWAG": (0.171,),
}
CIFAR_ACCURACY = {  # of clean images
    "MAP": (0.948,),
    "LA paper": (0.948,),
    "LA* paper": (0.948,),
    "ensemble": (0.956,),
    "SWAG": (0.947,),
}
CIFAR_AUROC = {  # SVHN, CIFAR-100
    "MAP": (0.918, 0.901),
    "ensemble": (0.954, 0.914),
    "SWAG": (0.916, 0.882),
    "LA paper": (0.920, 0.901),
    "LA* paper": (0.919, 0.902),
}
CIFAR_CONFIDENCE = {
    "MAP": (0.775, 0.793),
    "ensemble": (0.628, 0.708),
    "SWAG": (0.693, 0.730),
    "LA paper": (0.706, 0.726),
    "LA* paper": (0.580, 0.590),
}
MNIST_NLL = {"MAP": (0.0252,), "LA paper": (0.0299,), "LA* paper": (0.0748,)}  # of upright digits
MNIST_ACCURACY = {"MAP": (0.992,), "LA paper": (0.992,), "LA* paper": (0.992,)}
MNIST_AUROC = {  # EMNIST, FMNIST, KMNIST
    "MAP": (0.935, 0.989, 0.970),
    "DE-5": (0.951, 0.992, 0.983),
    "VB": (0.923, 0.982, 0.970),
    "CSGHMC": (0.934, 0.977, 0.971),
    "LA paper": (0.934, 0.985, 0.966),
    "LA* paper": (0.943, 0.983, 0.966),
}
MNIST_CONFIDENCE = {
    "MAP": (0.836, 0.642, 0.773),
    "DE-5": (0.758, 0.554, 0.659),
    "VB": (0.791, 0.675, 0.731),
    "CSGHMC": (0.762, 0.636, 0.679),
    "LA paper": (0.748, 0.588, 0.690),
    "LA* paper": (0.620, 0.496, 0.567),
}
COST = {  # training, prediction over those of the network; megabytes of a WideResNet-16-4
    "MAP": (1.0, 1.0, 11),
    "LA paper": (1.015, 1.0, 12),
    "SWAG": (1.73, 12.9, 440),
    "DE-5": (4.2, 2.5, 55),
    "VB": (2.1, 4.4, 22),
    "CSGHMC": (4.3, 5.2, 132),
}

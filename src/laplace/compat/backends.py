"""Provide laplace-torch's backends. There they choose a package; here all of them are one engine.

A class stands for a curvature (`backend=AsdlEF` is curvature='ef'). An object computes Jacobians, gradients and the
curvature of one batch: `CurvlinopsGGN(model, "classification").full(x, y)`. Jacobians of all weights are formed, as
asked for: (N, C, P).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from laplace import curvature
from laplace.compat.feature_extractor import FeatureExtractor
from laplace.compat.kept_factors import factors_of
from laplace.compat.matrix import Kron
from laplace.errors import UnsupportedError
from laplace.laplace import Laplace

__all__ = [
    "AsdfghjklEF",
    "AsdfghjklGGN",
    "AsdfghjklHessian",
    "AsdfghjklInterface",
    "AsdlEF",
    "AsdlGGN",
    "AsdlHessian",
    "AsdlInterface",
    "BackPackEF",
    "BackPackGGN",
    "BackPackInterface",
    "CurvatureInterface",
    "CurvlinopsEF",
    "CurvlinopsGGN",
    "CurvlinopsHessian",
    "CurvlinopsInterface",
    "EFInterface",
    "GGNInterface",
    "backend_of",
]


class CurvatureInterface:
    """Computes Jacobians, gradients and curvatures of a network.

    Args:
        model: the network, or a `FeatureExtractor`.
        likelihood: 'regression', 'classification' or 'reward_modeling'.
        last_layer: whether only the last layer's weights are meant; `model` is a `FeatureExtractor` then.
        subnetwork_indices: which weights are meant, if not all.
        dict_key_x: of inputs that are mappings, the key of the main input.
        dict_key_y: of inputs that are mappings, the key of the labels.
        stochastic: of GGN, whether to draw labels from the model.
        num_samples: how many, for each example.

    Attributes:
        asked_for: of `la.backend`, the name of the backend that was asked for there, or None.
    """

    _kind: ClassVar[str | None] = None
    _asked_for: str | None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        stochastic: bool = False,
        num_samples: int = 1,
    ) -> None:
        self.likelihood = likelihood
        self.model, self.last_layer, self.subnetwork_indices = model, last_layer, subnetwork_indices
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        self.stochastic, self.num_samples = stochastic, num_samples
        regression = str(getattr(likelihood, "name", likelihood)) == "regression"
        self.lossfunc = nn.MSELoss(reduction="sum") if regression else nn.CrossEntropyLoss(reduction="sum")
        self.factor = 0.5 if regression else 1.0

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the weights that are meant: those with requires_grad, of the last layer if only that is meant."""
        return list(self._trainable().values())

    @property
    def params_dict(self) -> dict[str, Tensor]:
        """Return the weights that are meant, by name."""
        return {name: p.detach() for name, p in self._trainable().items()}

    @property
    def buffers_dict(self) -> dict[str, Tensor]:
        """Return the buffers of the network, by name."""
        return dict(self._network().named_buffers())

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return the Jacobians (N, C, P) of the outputs in the weights, and the outputs (N, C).

        Args:
            x: the inputs.
            enable_backprop: whether both keep a graph.
        """
        network, buffers = self._network(), self.buffers_dict
        fixed = {name: p.detach() for name, p in network.named_parameters() if name not in self.params_dict}

        def outputs(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            f = functional_call(network, {**weights, **fixed, **buffers}, (x,))
            return f, f

        by_name, f = jacrev(outputs, has_aux=True)(self.params_dict)
        Js = torch.cat([J.flatten(f.dim()) for J in by_name.values()], -1)
        if self.subnetwork_indices is not None:
            Js = Js[..., self.subnetwork_indices]
        return (Js, f) if enable_backprop else (Js.detach(), f.detach())

    functorch_jacobians = jacobians

    def last_layer_jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Return the Jacobians (N, C, P) in the last layer's weights, and the outputs (N, C).

        Args:
            x: the inputs.
            enable_backprop: whether both keep a graph.
        """
        extractor = self._extractor()
        f, phi = extractor.forward_with_features(x)
        eye = torch.eye(f.shape[-1], dtype=phi.dtype, device=phi.device).expand(len(phi), -1, -1)
        Js = torch.einsum("nk,ncd->ncdk", phi, eye).flatten(2)
        assert extractor.last_layer is not None
        if extractor.last_layer.bias is not None:
            Js = torch.cat([Js, eye], -1)
        return (Js, f) if enable_backprop else (Js.detach(), f.detach())

    def selected_output_jacobians(
        self, x: Any, outputs: Tensor, enable_backprop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the Jacobians (N, K, P) of some outputs of each example, and all outputs (N, C).

        Args:
            x: the inputs.
            outputs: which outputs, (N,) or (N, K).
            enable_backprop: whether both keep a graph.
        """
        Js, f = self.jacobians(x, enable_backprop)
        index = outputs.reshape(len(outputs), -1, 1).to(Js.device).expand(-1, -1, Js.shape[-1])
        return Js.gather(1, index), f

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the loss of each example (N, P), and the loss of all.

        Args:
            x: the inputs.
            y: the labels.
        """
        network, buffers = self._network(), self.buffers_dict
        fixed = {name: p.detach() for name, p in network.named_parameters() if name not in self.params_dict}

        def loss(weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            f = functional_call(network, {**weights, **fixed, **buffers}, (x.unsqueeze(0),))
            value = self.lossfunc(f, y.unsqueeze(0))
            return value, value

        by_name, losses = vmap(grad(loss, has_aux=True), (None, 0, 0))(self.params_dict, x, y)
        Gs = torch.cat([G.flatten(1) for G in by_name.values()], -1)
        if self.subnetwork_indices is not None:
            Gs = Gs[:, self.subnetwork_indices]
        return Gs, losses.sum(0)

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the loss, and the curvature (P, P) of a batch at unit noise.

        Args:
            x: the inputs.
            y: the labels.
            **kwargs: `mc_samples` of a stochastic GGN.
        """
        la, order = self._fitted(x, y, "full", kwargs), self._order()
        return self._loss(la), (la.H if order is None else la.H[order][:, order]).to(self._dtype)

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the loss, and the diagonal of the curvature (P,) of a batch at unit noise.

        Args:
            x: the inputs.
            y: the labels.
            **kwargs: `mc_samples` of a stochastic GGN.
        """
        la, order = self._fitted(x, y, "diag", kwargs), self._order()
        return self._loss(la), (la.H if order is None else la.H[order]).to(self._dtype)

    def kron(self, x: Any, y: Tensor, N: int, **kwargs: Any) -> tuple[Tensor, Kron]:
        """Return the loss, and the Kronecker factors of a batch at unit noise.

        Each factor is weighted by the root of the batch's share in the data, so that sums over batches are factors of
        the data's curvature.

        Args:
            x: the inputs.
            y: the labels.
            N: number of examples of all data.
            **kwargs: `mc_samples` of a stochastic GGN; `kfac_approx`, 'expand' or 'reduce'.
        """
        la = self._fitted(x, y, "kron", kwargs)
        factors = factors_of(la.posterior.fit)
        share = len(y) / N
        shared = [[f[0], f[1] * share] if len(f) == 2 else f for f in factors.kfacs]
        return self._loss(la), Kron([[f.to(self._dtype) for f in block] for block in shared])

    def eig_lowrank(self, data_loader: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return eigenvectors (P, K), eigenvalues (K,) above rounding, and the loss, of all data.

        Args:
            data_loader: batches.
        """
        la = Laplace(self._network(), self.likelihood, "all", "full", **self._options({})).fit(data_loader)
        values, vectors = torch.linalg.eigh(la.H)
        kept = values > torch.finfo(values.dtype).eps * values.max()
        return vectors[:, kept].to(self._dtype), values[kept].to(self._dtype), self._loss(la)

    def gp_quantities(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return loss, Jacobians (N, C, P), outputs (N, C) and the curvature of the loss in the outputs (N, C, C).

        Args:
            x: the inputs.
            y: the labels.
        """
        Js, f = self.last_layer_jacobians(x) if self.last_layer else self.jacobians(x)
        if self.factor != 1.0:
            Lambda = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(len(f), -1, -1)
        else:
            p = f.softmax(-1)
            Lambda = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        return self.factor * self.lossfunc(f, y), Js, f, Lambda

    def _fitted(self, x: Any, y: Tensor, structure: str, options: dict[str, Any]) -> Any:
        batch = {**x, self.dict_key_y: y} if isinstance(x, Mapping) else (x, y)
        keys = {"dict_key_x": self.dict_key_x, "dict_key_y": self.dict_key_y}
        which: dict[str, Any] = {"subset_of_weights": "all"}
        if self.last_layer:
            which = {"subset_of_weights": "last_layer", "last_layer_name": self._extractor().last_layer_name}
        elif self.subnetwork_indices is not None:
            which = {"subset_of_weights": "subnetwork", "subnetwork_indices": self.subnetwork_indices.sort().values}
        la = Laplace(
            self._network(inner=True),
            self.likelihood,
            hessian_structure=structure,
            **which,
            **keys,
            **self._options(options),
        )
        return la.fit([batch])

    def _order(self) -> Tensor | None:
        """Return where each weight of the subnetwork is, in the order of the indices that were given."""
        return None if self.subnetwork_indices is None else self.subnetwork_indices.argsort().argsort()

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        if self._kind is None:
            raise UnsupportedError(f"{type(self).__name__} names no curvature. Take CurvlinopsGGN, or CurvlinopsEF.")
        if self._kind == "ggn" and self.stochastic:
            samples = options.get("mc_samples", self.num_samples)
            return {"curvature": "mc", "curvature_samples": samples} | _sharing(options)
        return {"curvature": self._kind} | _sharing(options)

    def _loss(self, la: Any) -> Tensor:
        return torch.tensor(la.loss, dtype=self._dtype, device=la.mean.device)

    @property
    def _dtype(self) -> torch.dtype:
        return self.params[0].dtype

    @property
    def _model(self) -> nn.Module:
        """Return the network, or its last layer if only that is meant."""
        if not self.last_layer:
            return self.model
        layer = self._extractor().last_layer
        assert layer is not None
        return layer

    def _extractor(self) -> FeatureExtractor:
        if not isinstance(self.model, FeatureExtractor):
            object.__setattr__(self, "model", FeatureExtractor(self.model))
        return self.model  # pyright: ignore[reportReturnType]

    def _network(self, inner: bool = False) -> nn.Module:
        return self.model.model if inner and isinstance(self.model, FeatureExtractor) else self.model

    def _trainable(self) -> dict[str, nn.Parameter]:
        layer = self._extractor().last_layer if self.last_layer else None
        named = {name: p for name, p in self._network().named_parameters() if p.requires_grad}
        own = None if layer is None else {id(p) for p in layer.parameters()}
        return {name: p for name, p in named.items() if own is None or id(p) in own}


class GGNInterface(CurvatureInterface):
    """Stands for the generalised Gauss-Newton matrix."""

    _kind = "ggn"


class EFInterface(CurvatureInterface):
    """Stands for the empirical Fisher."""

    _kind = "ef"


class CurvlinopsInterface(CurvatureInterface):
    """Stands for what curvlinops computed in laplace-torch."""


class CurvlinopsGGN(CurvlinopsInterface, GGNInterface):
    """Stands for curvature 'ggn', with stochastic=True for 'mc'."""


class CurvlinopsEF(CurvlinopsInterface, EFInterface):
    """Stands for curvature 'ef'."""


class CurvlinopsHessian(CurvlinopsInterface):
    """Stands for curvature 'hessian'."""

    _kind = "hessian"


class AsdlInterface(CurvatureInterface):
    """Stands for what ASDL computed in laplace-torch."""


class AsdlGGN(AsdlInterface, GGNInterface):
    """Stands for curvature 'ggn', with stochastic=True for 'mc'."""


class AsdlEF(AsdlInterface, EFInterface):
    """Stands for curvature 'ef'."""


class AsdlHessian(AsdlInterface):
    """Stands for curvature 'hessian'."""

    _kind = "hessian"


class AsdfghjklInterface(CurvatureInterface):
    """Stands for what asdfghjkl computed in laplace-torch."""


class AsdfghjklGGN(AsdfghjklInterface, GGNInterface):
    """Stands for curvature 'ggn', with stochastic=True for 'mc'."""


class AsdfghjklEF(AsdfghjklInterface, EFInterface):
    """Stands for curvature 'ef'."""


class AsdfghjklHessian(AsdfghjklInterface):
    """Stands for curvature 'hessian'."""

    _kind = "hessian"


class BackPackInterface(CurvatureInterface):
    """Stands for what BackPACK computed in laplace-torch."""


class BackPackGGN(BackPackInterface, GGNInterface):
    """Stands for curvature 'ggn', with stochastic=True for 'mc'."""


class BackPackEF(BackPackInterface, EFInterface):
    """Stands for curvature 'ef'."""


def _sharing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option for weights that are used at many positions, under its name here."""
    return {"weight_sharing": options["kfac_approx"]} if "kfac_approx" in options else {}


_OF_CURVATURE = {"ggn": CurvlinopsGGN, "mc": CurvlinopsGGN, "ef": CurvlinopsEF, "hessian": CurvlinopsHessian}


def backend_of(la: Any) -> CurvatureInterface:
    """Return the backend object of a posterior: of the class that was asked for, or of its curvature.

    Args:
        la: the posterior.
    """
    made = globals().get(la.backend_name or "") or _OF_CURVATURE.get(str(la.curvature), CurvlinopsGGN)
    last_layer = la.runner.spec.weights.label == "last_layer"
    model = la.model
    if last_layer and not isinstance(model, FeatureExtractor):
        name = getattr(la.runner.spec.weights, "name", None)
        model = FeatureExtractor(model, name, la.enable_backprop, la.feature_reduction)
    stochastic = la.curvature == "mc"
    backend = made(
        model,
        la.likelihood,
        last_layer=last_layer,
        subnetwork_indices=la.subnetwork_indices,
        dict_key_x=la.dict_key_x,
        dict_key_y=la.dict_key_y,
        stochastic=stochastic,
    )
    backend._asked_for = la.backend_name  # so that `Laplace(..., backend=la.backend)` asks for the same
    return backend


def register() -> None:
    """Let `from laplace.curvature import CurvlinopsGGN` find the backends."""
    for name in __all__[:-1]:
        setattr(curvature, name, globals()[name])

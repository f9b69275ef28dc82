"""scikit-learn estimators that train a network, make it Bayesian, and predict with uncertainty.

    LaplaceRegressor().fit(X, y).predict(X_new, return_std=True)
    LaplaceClassifier(module=MyNetwork).fit(X, y).predict_proba(X_new)

They go into Pipeline, GridSearchCV, CalibratedClassifierCV and other tools that take estimators.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from laplace.checks import flag, one_positive, shown, whole_number
from laplace.errors import OptionError
from laplace.integrations.training import network_of, train
from laplace.keywords import checked_before
from laplace.laplace import Laplace
from laplace.network.arrays import dtype_of, tensor_of

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError(
        "laplace.integrations.sklearn needs scikit-learn 1.6 or later: pip install 'laplace-redux[sklearn]'"
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]


class _LaplaceEstimator(BaseEstimator):
    """Holds what both estimators share: training, the posterior, its tuning."""

    _task: str

    def __init__(
        self,
        module: Any = None,
        *,
        train: bool = True,
        hidden_sizes: Sequence[int] = (50,),
        max_epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 1e-2,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        subset_of_weights: Any = "last_layer",
        hessian_structure: Any = "kron",
        prior_precision: float = 1.0,
        tune: str | None = "auto",
        validation_fraction: float = 0.0,
        laplace_options: Mapping[str, Any] | None = None,
        device: str | None = None,
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.train = train
        self.hidden_sizes = hidden_sizes
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.optimizer = optimizer
        self.subset_of_weights = subset_of_weights
        self.hessian_structure = hessian_structure
        self.prior_precision = prior_precision
        self.tune = tune
        self.validation_fraction = validation_fraction
        self.laplace_options = laplace_options
        self.device = device
        self.random_state = random_state

    @abstractmethod
    def _loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the training loss."""

    def _fit(self, x: np.ndarray, y: np.ndarray, n_outputs: int, classes: bool) -> Self:
        """Train the network on arrays and fit its posterior. `y` is what the network's outputs are compared with."""
        rng: Any = check_random_state(self.random_state)
        share = self.validation_fraction
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share < 1:
            raise OptionError(
                f"validation_fraction={shown(share)} must be a number from 0 to below 1; 0 holds nothing out."
            )
        held_out = None
        if share:
            counts = np.unique(y, return_counts=True)[1] if classes else np.array([2])
            stratify = y if classes and counts.min() > 1 and share * len(y) >= len(counts) else None
            parts: Any = train_test_split(x, y, test_size=share, random_state=rng, stratify=stratify)
            x, y, held_out = parts[0], parts[2], (parts[1], parts[3])
        seed = int(rng.randint(2**31 - 1))
        self.module_ = self._network(x, y, n_outputs, seed)
        options = {"prior_precision": self.prior_precision, **(self.laplace_options or {})}
        la = Laplace(self.module_, self._task, self.subset_of_weights, self.hessian_structure, **options)
        la.fit(x, y=y, batch_size=self.batch_size, generator=torch.Generator().manual_seed(seed))
        if la.n_outputs != n_outputs:
            raise OptionError(
                f"the network has {la.n_outputs} outputs; y needs {n_outputs}. Give the network {n_outputs} outputs."
            )
        if self.tune is not None:
            la.tune(method=self.tune)
        if held_out is not None:
            la.calibrate(held_out)
        self.laplace_ = la
        return self

    def _network(self, x: np.ndarray, y: np.ndarray, n_outputs: int, seed: int) -> nn.Module:
        """Return the trained network, in eval mode."""
        if not flag(self.train, "train"):
            trained = getattr(self.module, "module_", None) if _is_skorch(self.module) else self.module
            if not isinstance(trained, nn.Module):
                raise OptionError(
                    "train=False needs module= a trained torch.nn.Module, or a skorch net after its fit; got "
                    f"{shown(self.module)}."
                )
            return trained
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if _is_skorch(self.module):
                _require_logits(self.module)
                net: Any = clone(self.module)
                dtype = np.float32  # skorch's default; a network in float64 is given to us, not to skorch
                net.fit(x.astype(dtype), y if y.dtype.kind in "iu" else y.astype(dtype))
                self.net_ = net
                return net.module_.eval()
            model = network_of(self.module, int(x.shape[1]), n_outputs, self.hidden_sizes)
            model = model if self.device is None else model.to(self.device)
            weight, dtype = next(model.parameters(), None), dtype_of(model)
            where = torch.device("cpu") if weight is None else weight.device
            labels, inputs = tensor_of(y).to(where), tensor_of(x).to(where, dtype)
            _require_outputs(model, inputs[:2], n_outputs)
            train(
                model,
                inputs,
                labels if y.dtype.kind in "iu" else labels.to(dtype),
                self._loss(),
                self.optimizer(
                    model.parameters(),
                    lr=one_positive(self.learning_rate, "learning_rate"),
                    weight_decay=float(self.weight_decay),
                ),
                whole_number(self.max_epochs, "max_epochs"),
                whole_number(self.batch_size, "batch_size"),
                torch.Generator().manual_seed(seed),
            )
        return model.eval()

    def _checked(self, x: Any) -> np.ndarray:
        """Return new inputs as an array, after checks of their width and names."""
        check_is_fitted(self, "laplace_")
        return _validated(self, x, reset=False)


class LaplaceClassifier(ClassifierMixin, _LaplaceEstimator):
    """Makes a scikit-learn classifier of a network with a Laplace approximation.

    `fit` trains the network (cross-entropy), fits the posterior and tunes its prior. Labels may be of any kind.

    Args:
        module: The network, which returns logits (N, K) for K classes: a `torch.nn.Module` (a copy of it is trained); a
            class or function that makes one, called with (n_features, n_outputs); a skorch net, which is trained by its
            own `fit`, with `criterion=nn.CrossEntropyLoss`; None for a multilayer perceptron.
        train: Whether to train the network. False uses a trained `torch.nn.Module`, or a fitted skorch net, unchanged.
        hidden_sizes: The number of units in each hidden layer of the multilayer perceptron.
        max_epochs: How many times the training data is read.
        batch_size: The number of examples in a batch.
        learning_rate: The learning rate of the optimizer.
        weight_decay: The weight decay of the optimizer.
        optimizer: A class of `torch.optim`.
        subset_of_weights: As `Laplace` takes it.
        hessian_structure: As `Laplace` takes it.
        prior_precision: The prior precision of the weights, from which `tune` starts.
        tune: A method of `la.tune`, 'auto', 'evidence' or 'loo'; None leaves the prior precision as it is.
        validation_fraction: The share of the data that is held out from training and given to `la.calibrate`.
        laplace_options: Further options of `Laplace`, by name.
        device: Where the network is trained; its own device by default.
        random_state: A seed, for initial weights, order of the data and validation data.

    Attributes:
        classes_: The labels, sorted.
        laplace_: The fitted `Laplace`. Its classes are indices into `classes_`.
        module_: The trained network.
        n_features_in_: Width of the inputs.
    """

    _task = "classification"
    if not TYPE_CHECKING:
        __new__ = checked_before(_LaplaceEstimator.__init__, "LaplaceClassifier")

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, fit its posterior and tune it.

        Args:
            X: The inputs, (N, n_features) or with further dimensions.
            y: The labels, (N,).

        Returns:
            The estimator.
        """
        x, y = _validated(self, X, y, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, index = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(self.classes_) < 2:
            raise OptionError(f"y has one class, {shown(self.classes_[0])}; a classifier needs at least two.")
        return self._fit(x, index.astype(np.int64), len(self.classes_), classes=True)

    def predict_proba(self, X: Any) -> np.ndarray:  # (N, K)
        """Return the probability of each class, averaged over the posterior.

        Args:
            X: The inputs.

        Returns:
            (N, K), in the order of `classes_`.
        """
        x = self._checked(X)
        p = np.asarray(self.laplace_.predict(x, n_samples=2), dtype=np.float64)
        return p / p.sum(1, keepdims=True)

    def predict_log_proba(self, X: Any) -> np.ndarray:  # (N, K)
        """Return the logarithm of `predict_proba`.

        Args:
            X: The inputs.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:  # (N,)
        """Return the most probable label.

        Args:
            X: The inputs.
        """
        p = self.predict_proba(X)
        return self.classes_[p.argmax(1)]

    def _loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.cross_entropy


class LaplaceRegressor(RegressorMixin, _LaplaceEstimator):
    """Makes a scikit-learn regressor of a network with a Laplace approximation.

    `fit` trains the network (mean squared error), fits the posterior and tunes prior and noise.

    Args:
        module: The network, which returns (N, C) for C targets: a `torch.nn.Module` (a copy of it is trained); a class
            or function that makes one, called with (n_features, n_outputs); a skorch net, which is trained by its own
            `fit`; None for a multilayer perceptron.
        train: Whether to train the network. False uses a trained `torch.nn.Module`, or a fitted skorch net, unchanged.
        hidden_sizes: The number of units in each hidden layer of the multilayer perceptron.
        max_epochs: How many times the training data is read.
        batch_size: The number of examples in a batch.
        learning_rate: The learning rate of the optimizer.
        weight_decay: The weight decay of the optimizer.
        optimizer: A class of `torch.optim`.
        normalize_y: Whether the network learns targets scaled to mean 0 and variance 1; predictions are scaled back.
            Not used with `train=False`, because that network was trained on its own targets.
        subset_of_weights: As `Laplace` takes it.
        hessian_structure: As `Laplace` takes it.
        prior_precision: The prior precision of the weights, from which `tune` starts.
        tune: A method of `la.tune`, 'auto', 'evidence' or 'loo'; None leaves prior and noise as they are.
        validation_fraction: The share of the data that is held out from training and given to `la.calibrate`.
        laplace_options: Further options of `Laplace`, by name.
        device: Where the network is trained; its own device by default.
        random_state: A seed, for initial weights, order of the data and validation data.

    Attributes:
        laplace_: The fitted `Laplace`. It predicts (y - y_mean_) / y_scale_.
        y_mean_: The mean of the targets; 0 if they are not normalised.
        y_scale_: The standard deviation of the targets; 1 if they are not normalised.
        module_: The trained network.
        n_features_in_: Width of the inputs.
    """

    _task = "regression"

    def __init__(
        self,
        module: Any = None,
        *,
        train: bool = True,
        hidden_sizes: Sequence[int] = (50,),
        max_epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 1e-2,
        weight_decay: float = 0.0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        normalize_y: bool = True,
        subset_of_weights: Any = "last_layer",
        hessian_structure: Any = "kron",
        prior_precision: float = 1.0,
        tune: str | None = "auto",
        validation_fraction: float = 0.0,
        laplace_options: Mapping[str, Any] | None = None,
        device: str | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            module,
            train=train,
            hidden_sizes=hidden_sizes,
            max_epochs=max_epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            optimizer=optimizer,
            subset_of_weights=subset_of_weights,
            hessian_structure=hessian_structure,
            prior_precision=prior_precision,
            tune=tune,
            validation_fraction=validation_fraction,
            laplace_options=laplace_options,
            device=device,
            random_state=random_state,
        )
        self.normalize_y = normalize_y

    if not TYPE_CHECKING:
        __new__ = checked_before(__init__)

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, fit its posterior and tune it.

        Args:
            X: The inputs, (N, n_features) or with further dimensions.
            y: The targets, (N,) or (N, C).

        Returns:
            The estimator.
        """
        x, y = _validated(self, X, y, ensure_min_samples=2, multi_output=True, y_numeric=True)
        targets = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self._n_targets = None if y.ndim == 1 else targets.shape[1]
        normalize = flag(self.normalize_y, "normalize_y") and flag(self.train, "train")
        self.y_mean_ = targets.mean(0) if normalize else np.zeros(targets.shape[1])
        scale = targets.std(0) if normalize else np.ones(targets.shape[1])
        self.y_scale_ = np.where(scale > 0, scale, 1.0)
        return self._fit(x, (targets - self.y_mean_) / self.y_scale_, targets.shape[1], classes=False)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of y, and its standard deviation if asked for.

        Args:
            X: The inputs.
            return_std: Whether to return the standard deviation of y, too: of the posterior and of the noise together.

        Returns:
            The mean, (N,) or (N, C) as `fit` had its targets; with `return_std`, (mean, std).
        """
        x = self._checked(X)
        found = self.laplace_.predict(x, diagonal_output=True)
        mean = self._shaped(np.asarray(found, np.float64) * self.y_scale_ + self.y_mean_)
        if not flag(return_std, "return_std"):
            return mean
        return mean, self._shaped(found.numpy()["std"].astype(np.float64) * self.y_scale_)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw targets at all inputs together: each draw is one function from the posterior, plus noise.

        Args:
            X: The inputs.
            n_samples: How many draws, S.
            random_state: A seed.

        Returns:
            (N, S), or (N, C, S) if `fit` had targets (N, C).
        """
        x = self._checked(X)
        rng: Any = check_random_state(random_state)
        generator = torch.Generator().manual_seed(int(rng.randint(2**31 - 1)))
        f = self.laplace_.functional_samples(x, n_samples=n_samples, generator=generator)
        drawn = f.double().cpu().numpy()  # (S, N, C)
        drawn = drawn + rng.standard_normal(drawn.shape) * self.laplace_.sigma_noise.detach().cpu().numpy()
        drawn = np.moveaxis(drawn * self.y_scale_ + self.y_mean_, 0, -1)
        return drawn[:, 0] if self._n_targets is None else drawn

    def _loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.mse_loss

    def _shaped(self, values: np.ndarray) -> np.ndarray:  # (N, C) -> (N,) if targets were so
        return values[:, 0] if self._n_targets is None else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _validated(estimator: Any, *data: Any, **options: Any) -> Any:
    """Return X, or X and y, as arrays after scikit-learn's checks. Images and sequences may have more dimensions."""
    return validate_data(estimator, *data, dtype=np.float64, allow_nd=True, **options)


def _require_outputs(model: nn.Module, few: Tensor, n_outputs: int) -> None:
    """Refuse a network whose outputs have another shape than (N, n_outputs), before it is trained."""
    training = model.training
    with torch.no_grad():
        found = model.eval()(few)
    model.train(training)
    if not isinstance(found, Tensor) or found.shape != (len(few), n_outputs):
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise OptionError(
            f"the network gives {came} for {len(few)} examples; ({len(few)}, {n_outputs}) is needed: a logit for each "
            "class, or a number for each target."
        )


def _require_logits(net: Any) -> None:
    """Refuse a skorch net whose loss takes probabilities: a network that returns logits learns nothing from it."""
    loss = net.criterion
    if loss is nn.NLLLoss or isinstance(loss, nn.NLLLoss):
        raise OptionError(
            "this skorch net has criterion=NLLLoss, for networks that end with a softmax; a posterior needs logits. "
            "Write NeuralNetClassifier(..., criterion=nn.CrossEntropyLoss), and leave the softmax out."
        )


def _is_skorch(module: Any) -> bool:
    """Return whether a module is a skorch net: an estimator that makes and trains a torch module itself."""
    return not isinstance(module, type) and all(hasattr(module, name) for name in ("fit", "initialize", "criterion"))

"""The calls that predict: `la(x)`, `la.predict(x)` and the samples. Inputs run in chunks, parts are put together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from laplace.backprop.gradients import Forward, Jacobian
from laplace.batches import Inputs, Keys, prediction_batches
from laplace.budget import Budget
from laplace.checks import generator_or_none, shown, whole_number
from laplace.draws import Draws, normals
from laplace.errors import InputError, OptionError, UnsupportedError
from laplace.likelihoods import Likelihood
from laplace.options import pred_type_named
from laplace.positions import Positions
from laplace.posterior import Posterior
from laplace.precision import plainly
from laplace.predictive import predict as predicting
from laplace.predictive.in_shape import InShape, PredictionAtPositions
from laplace.predictive.outputs import OutputGaussian, OutputSamples, joined, require_finite
from laplace.predictive.predict import Answer
from laplace.predictive.prediction import Prediction
from laplace.structures import Structure

_MAX_COVARIANCE = 32  # outputs up to which `predict` computes covariances unasked
_FEWER = "Ask for fewer draws, or for fewer inputs at a time."


class Predictable(ABC):
    """The predicting side of `Laplace`."""

    likelihood: Likelihood
    enable_backprop: bool
    class_dim: int | None
    _keys: Keys
    _budget: Budget

    @property
    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior at the current prior, noise and temperature."""

    structure: Structure

    @abstractmethod
    def _runs(self, inputs: Inputs, whole: bool = False) -> Iterator[Forward]:
        """Runs of the network on consecutive parts of the inputs, as many as memory asks for; or on the `whole`."""

    @abstractmethod
    def _warn_once(self, key: str, message: str) -> None:
        """Warn of something the first time that it happens."""

    @plainly
    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str | None = None,
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        outputs: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The predictive at `x`, in laplace-torch's form.

        Outputs at positions come in the network's own shape, covariances as (N, *positions, C, C).

        Args:
            x: a tensor, a mapping, or a tuple of inputs.
            pred_type: 'glm' linearises the network at its weights; 'nn' averages the network itself over `n_samples`
                draws of the weights.
            joint: of a regression, one covariance over all inputs.
            link_approx: one of `la.likelihood.links`, the first of them if left out (for classes 'probit', 'mc',
                'bridge', 'bridge_norm', 'delta').
            n_samples: draws, where there are any.
            diagonal_output: variances instead of covariances between outputs.
            generator: what is drawn from; torch's own if left out.
            outputs: of a regression, the indices of those outputs that are wanted.
            **model_kwargs: passed on to the network.

        Returns:
            Of classes, labels and counts: probabilities or rates (N, C). Of regression and rewards: mean (N, C) and
                covariance of f (N, C, C), without observation noise; variances (N, C) with `diagonal_output`, or with
                'nn'; mean (N C,) and covariance (N C, N C) with `joint`.

        Raises:
            NotFittedError: before `fit`.
            OptionError: a link, a `pred_type` or `outputs` that there are not.
            UnsupportedError: `joint` where it has no meaning, 'nn' of a posterior over functions.
            InputError: inputs that the network gives other, or not finite, outputs for.
            ModelError: inputs that the network fails on.
            MemoryBudgetError: an answer that would not fit into memory.
        """
        pred_type = pred_type_named(pred_type, self.structure.functional)
        response = self.likelihood.response
        link, sampled = response.link_named(link_approx), pred_type == "nn"
        draws = Draws(
            whole_number(n_samples, "n_samples", 2 if sampled and not link else 1), generator_or_none(generator)
        )
        if joint and (link or sampled):
            raise UnsupportedError("joint=True is for regression with pred_type='glm'. Else: functional_samples(x).")
        chosen = self._chosen(outputs, bool(link) or sampled)
        inputs, shape = Inputs(x, model_kwargs, self._keys), InShape()
        with torch.set_grad_enabled(self.enable_backprop):
            if sampled:
                drawn = response.inverse_link(self._weight_draws(inputs, draws, True, shape))
                samples = require_finite(drawn, "the mean of the draws", 1)
                return shape(samples.mean(0)) if link else (shape(samples.mean(0)), shape(samples.var(0)))
            if joint:
                instead = "Take fewer inputs, or outputs=[...], or leave out joint=True."
                return self._joint(inputs, chosen, instead, shape)
            runs = shape.watch(self._runs(inputs))
            if link:
                return shape(torch.cat([self._through(run, link, draws, diagonal_output) for run in runs]))
            c = self.posterior.fit.n_outputs if chosen is None else len(chosen)
            runs = self._answer("Take fewer inputs at a time, or diagonal_output=True.").on(
                runs, c if diagonal_output else c**2
            )
            parts = [self._linearised(run, not diagonal_output, chosen) for run in runs]
            out = joined([*parts])
            assert isinstance(out, OutputGaussian)
            spread = shape(out.variance) if out.covariance is None else shape.covariance(out.covariance)
            return shape(out.mean), spread

    @plainly
    def predict(
        self,
        x: Any,
        pred_type: str = "glm",
        link_approx: str | None = None,
        n_samples: int = 100,
        diagonal_output: bool | None = None,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
        **model_kwargs: Any,
    ) -> Prediction | PredictionAtPositions:
        """p(y given x, data) with observation noise, its summaries, and epistemic and aleatoric uncertainty apart.

        Args:
            x: a tensor, a mapping, a tuple of inputs, or a DataLoader (labels in it are not looked at).
            pred_type: 'glm' linearises the network, 'nn' runs it with `n_samples` draws of the weights.
            link_approx: one of `la.likelihood.links`, the first of them if left out.
            n_samples: draws of the outputs, from which the epistemic part for classes comes whatever the link.
            diagonal_output: whether covariances between outputs are left out; they are beyond 32 outputs, unless said,
                and unless link 'mc' needs them.
            generator: what is drawn from; torch's own if left out.
            progress_bar: whether a DataLoader shows one.
            **model_kwargs: passed on to the network.

        Returns:
            A `Prediction`; of a network with outputs at positions, or with one number per example, a
                `PredictionAtPositions`.

        Raises:
            NotFittedError: before `fit`.
            OptionError: a link or a `pred_type` that there is not.
            InputError: inputs that the network gives other, or not finite, outputs for; a loader without a batch.
            ModelError: inputs that the network fails on.
            MemoryBudgetError: an answer that would not fit into memory.
        """
        pred_type = pred_type_named(pred_type, self.structure.functional)
        response = self.likelihood.response
        link = response.link_named(link_approx)
        draws = Draws(whole_number(n_samples, "n_samples", 2), generator_or_none(generator))
        if pred_type == "nn" and draws.generator is None:
            draws = Draws(draws.n, torch.Generator().manual_seed(int(torch.randint(2**31, ()))))
        state = None if draws.generator is None else draws.generator.get_state()
        parts: list[tuple[OutputGaussian | OutputSamples, Tensor | None]] = []
        shape, c = InShape(), self.posterior.fit.n_outputs
        independent = c > _MAX_COVARIANCE and link != "mc" if diagonal_output is None else diagonal_output
        answer = self._answer("Predict fewer inputs at a time, or with diagonal_output=True, or fewer n_samples.")
        with torch.set_grad_enabled(self.enable_backprop):
            for inputs in prediction_batches(x, self._keys, model_kwargs, progress_bar):
                if pred_type == "nn":
                    if draws.generator is not None and state is not None:
                        draws.generator.set_state(state)  # the same draws of the weights for every batch
                    here = InShape()
                    samples = OutputSamples(self._weight_draws(inputs, draws, True, here, answer))
                    shape.add(here)
                    parts.append((samples, response.inverse_link(samples.samples).mean(0) if link else None))
                else:
                    runs = shape.watch(self._runs(inputs), further=True)
                    runs = answer.on(runs, c if independent else c**2)
                    parts += [self._predict(run, link, draws, independent) for run in runs]
            if not parts:
                raise InputError("the loader to predict on gave no batch.")
            outputs = joined([outputs for outputs, _ in parts])
            if not len(outputs.mean):
                raise InputError("the inputs to predict on hold no example.")
            p = torch.cat([p for _, p in parts if p is not None]) if link else None
            return shape.prediction(response.prediction(outputs, p, self.posterior.sigma, link, draws))

    @plainly
    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:  # (S, N, C)
        """Draws of the outputs before the link.

        One draw of the weights serves all inputs, so that each draw is a smooth function of x.

        Args:
            x: a tensor, a mapping, or a tuple of inputs.
            pred_type: 'glm' linearises the network, 'nn' runs it with the drawn weights.
            n_samples: how many draws.
            diagonal_output: with 'glm', draw every output on its own instead.
            generator: what is drawn from; torch's own if left out.
            **model_kwargs: passed on to the network.

        Returns:
            (n_samples, N, C), or the network's own shape behind the samples.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: 'nn' of a posterior over functions.
            MemoryBudgetError: more draws than fit into memory.
        """
        pred_type = pred_type_named(pred_type, self.structure.functional)
        draws = Draws(whole_number(n_samples, "n_samples"), generator_or_none(generator))
        inputs, shape = Inputs(x, model_kwargs, self._keys), InShape()
        with torch.set_grad_enabled(self.enable_backprop):
            if diagonal_output and pred_type == "glm":
                runs = self._answer(_FEWER).on(shape.watch(self._runs(inputs)), draws.n * self.posterior.fit.n_outputs)
                parts = [self._linearised(run, with_covariance=False) for run in runs]
                drawn = torch.cat(list(joined([*parts]).draws(draws)), 1)
            elif self.structure.functional:
                drawn = self._function_draws(inputs, draws, shape)
            else:
                drawn = self._weight_draws(inputs, draws, pred_type == "nn", shape)
            return shape(drawn, lead=1)

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        **model_kwargs: Any,
    ) -> Tensor:  # (S, N, C)
        """Draws of the predictive's parameters: outputs f for regression, probabilities of classes, rates of counts.

        Args:
            x: a tensor, a mapping, or a tuple of inputs.
            pred_type: 'glm' linearises the network, 'nn' runs it with the drawn weights.
            n_samples: how many draws.
            diagonal_output: with 'glm', draw every output on its own.
            generator: what is drawn from; torch's own if left out.
            **model_kwargs: passed on to the network.

        Returns:
            (n_samples, N, C), or the network's own shape behind the samples.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: 'nn' of a posterior over functions.
            MemoryBudgetError: more draws than fit into memory.
        """
        f = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator, **model_kwargs)
        at = Positions.of(f[0], self.class_dim)
        return at.shaped(self.likelihood.response.inverse_link(at.rows(f, lead=1)), lead=1)

    @plainly
    def preference(
        self, a: Any, b: Any, link_approx: str | None = None, n_samples: int = 100, **model_kwargs: Any
    ) -> Tensor:  # (N, *positions)
        """The probability that each input of `a` beats its counterpart in `b`, after 'reward_modeling'.

        What the two rewards have in common, such as the uncertain offset of all rewards, cancels.

        Args:
            a: N inputs, as the network takes them.
            b: as many.
            link_approx: 'probit', 'mc' or 'quadrature'.
            n_samples: of 'mc', draws; they are the same each time.
            **model_kwargs: passed on to the network.

        Returns:
            (N,), or the shape of the network's positions.

        Raises:
            UnsupportedError: a posterior of another likelihood.
            NotFittedError: before `fit`.
        """
        if not self.likelihood.pairs:
            raise UnsupportedError(
                f"preference(a, b) compares rewards; this posterior is for {self.likelihood.name!r}. Write "
                "Laplace(model, 'reward_modeling')."
            )
        draws = Draws(whole_number(n_samples, "n_samples"), torch.Generator().manual_seed(0))
        inputs, shape = Inputs.paired(b, a, model_kwargs, self._keys), InShape()
        link = self.likelihood.link_named(link_approx)
        with torch.set_grad_enabled(self.enable_backprop):
            runs = shape.watch(self._runs(inputs))
            return shape.each(torch.cat([self._through(run, link, draws, False) for run in runs]).squeeze(1))

    @plainly
    @torch.no_grad()
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:  # (S, P)
        """Draws of the uncertain weights.

        Args:
            n_samples: how many, S.
            generator: what is drawn from; torch's own if left out.

        Returns:
            (S, P), in the order of `la.mean`.

        Raises:
            NotFittedError: before `fit`.
            UnsupportedError: of a posterior over functions, which has no weights.
            MemoryBudgetError: more draws than fit into memory.
        """
        whole_number(n_samples, "n_samples")
        mean = self.posterior.fit.mean
        self._budget.require(
            2 * n_samples * mean.nbytes,
            mean.device,
            f"{n_samples:,} draws of {len(mean):,} weights",
            "Ask for fewer at a time.",
        )
        eps = normals(n_samples, len(mean), mean, generator_or_none(generator))
        return mean + self.posterior.gaussian.color(eps)

    def _joint(self, inputs: Inputs, chosen: Tensor | None, instead: str, shape: InShape) -> tuple[Tensor, Tensor]:
        """Mean (N C,) and covariance (N C, N C) of all inputs' outputs together, position after position."""
        (forward,) = shape.watch(self._runs(inputs, whole=True))
        mean = forward.outputs if chosen is None else forward.outputs[:, chosen]
        self._budget.require(
            2 * mean.element_size() * mean.numel() ** 2,
            mean.device,
            f"the joint covariance of {mean.numel():,} outputs",
            instead,
        )
        covariance = self.posterior.gaussian.joint(forward.jacobian(chosen)).flatten(2).flatten(0, 1)
        return mean.flatten(), (covariance + covariance.mT) / 2

    def _function_draws(self, inputs: Inputs, draws: Draws, shape: InShape) -> Tensor:  # (S, N, C)
        """Draws of the outputs at all inputs together."""
        mean, covariance = self._joint(inputs, None, "Take fewer inputs, or diagonal_output=True.", shape)
        whole = OutputGaussian(mean.unsqueeze(0), covariance.diagonal().unsqueeze(0), covariance.unsqueeze(0))
        drawn = torch.cat(list(whole.draws(draws)), 1).squeeze(1)
        return drawn.unflatten(1, (-1, self.posterior.fit.n_outputs))

    def _weight_draws(
        self, inputs: Inputs, draws: Draws, exact: bool, shape: InShape, answer: Answer | None = None
    ) -> Tensor:  # (S, N, C)
        """Outputs under draws of the weights; where one run is all, it is kept for all draws."""
        answer, each = answer or self._answer(_FEWER), draws.n * self.posterior.fit.n_outputs
        if self.posterior.fit.linear:
            kept = list(answer.on(shape.watch(self._runs(inputs, whole=True)), each))
            return predicting.sampled(self.posterior, lambda: kept, draws, exact)
        before = answer.numbers

        def runs() -> Iterator[Forward]:
            answer.numbers = before  # the same inputs again, for the next draws
            return answer.on(shape.watch(self._runs(inputs)), each)

        return predicting.sampled(self.posterior, runs, draws, exact)

    def _answer(self, instead: str) -> Answer:
        return Answer(self._budget, instead)

    def _linearised(self, forward: Forward, with_covariance: bool, chosen: Tensor | None = None) -> OutputGaussian:
        """The outputs' distribution for one run, of the `chosen` ones or of all."""
        f = forward.outputs if chosen is None else forward.outputs[:, chosen]
        return predicting.linearised(self.posterior, f, forward.jacobian(chosen), with_covariance)

    def _through(self, forward: Forward, link: str, draws: Draws, independent: bool) -> Tensor:  # (N, K)
        """The mean of the inverse link for one run."""
        jacobian = forward.jacobian()
        outputs = predicting.gaussian_for(self.posterior, link, forward.outputs, jacobian, independent)
        return self._linked(outputs, jacobian, link, draws, independent)

    def _linked(
        self, outputs: OutputGaussian, jacobian: Jacobian, link: str, draws: Draws, independent: bool
    ) -> Tensor:  # (N, K)
        """The mean of the inverse link, given the outputs' distribution."""
        p, outside = predicting.through_link(self.posterior, link, outputs, jacobian, draws, independent)
        if outside:
            self._warn_once(
                "simplex",
                f"the {link} approximation left the simplex for {outside} of {len(p)} inputs (its variances are "
                "too large); clipped and renormalised. link_approx='probit' and 'mc' have no such limit.",
            )
        return require_finite(p, f"the mean of {link}")

    def _predict(
        self, forward: Forward, link: str, draws: Draws, independent: bool
    ) -> tuple[OutputGaussian, Tensor | None]:
        """The outputs' distribution for one run, and the mean of the inverse link."""
        jacobian = forward.jacobian()
        outputs = predicting.linearised(self.posterior, forward.outputs, jacobian, with_covariance=not independent)
        return outputs, self._linked(outputs, jacobian, link, draws, independent) if link else None

    def _chosen(self, outputs: Any, refused: bool) -> Tensor | None:
        """The indices of the asked outputs; None for all."""
        n_outputs = self.posterior.fit.n_outputs
        located = range(n_outputs)[self.likelihood.response.located(n_outputs)]
        n = len(located)
        if outputs is None:
            return None if n == n_outputs else torch.tensor(located)
        try:
            index = torch.as_tensor(outputs).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            index = torch.empty(0)
        if (
            refused
            or index.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
            or not len(index)
            or int(index.min()) < 0
            or int(index.max()) >= n
        ):
            raise OptionError(
                f"outputs={shown(outputs)} must be indices from 0 to {n - 1}, for regression with pred_type='glm'."
            )
        return index.long()

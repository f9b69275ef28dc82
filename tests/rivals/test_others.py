"""Temperature scaling, MC dropout and SWAG do what their definitions say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.decisions import acquire
from laplace.errors import InputError, ModelError, NotFittedError, NumericalError, OptionError, UnsupportedError
from laplace.rivals import SWAG, Ensemble, MCDropout, Mixture

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(40) % 3
BATCHES = [(X[:15], Y[:15]), (X[15:], Y[15:])]


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


# ---- temperature scaling


def test_the_temperature_minimises_the_held_out_loss():
    ensemble = Ensemble([network()], "classification")
    with torch.no_grad():
        f = ensemble.model(X)
    y = torch.where(torch.arange(40) % 4 == 0, Y, f.argmax(1))  # three quarters are right
    found = ensemble.calibrate([(X[:15], y[:15]), (X[15:], y[15:])])
    t = torch.tensor(ensemble.softmax_temperature).double().requires_grad_()
    loss = nn.functional.cross_entropy(f / t, y)
    loss.backward()
    assert found.softmax_temperature == ensemble.softmax_temperature
    assert abs(float(t.grad * t.detach())) < 1e-6
    assert found.nll == pytest.approx(float(loss))
    assert found.nll_before == pytest.approx(float(nn.functional.cross_entropy(f, y)))
    assert ensemble.calibrate((X, y)).nll_before == pytest.approx(found.nll)
    assert str(found).startswith(f"Rescaled: softmax temperature {found.softmax_temperature:.3g}; the negative")


def test_the_temperature_of_an_ensemble_is_applied_before_the_mean():
    torch.manual_seed(2)
    models = [nn.Linear(3, 3).double() for _ in range(3)]
    with torch.no_grad():
        f = torch.stack([model(X) for model in models])
    y = torch.where(torch.arange(40) % 4 == 0, Y, f.mean(0).argmax(1))
    found = Ensemble(models, "classification").calibrate((X, y))
    scales = {t: t * found.softmax_temperature for t in (0.97, 1.0, 1.03)}
    at = {t: float(nn.functional.nll_loss((f / s).softmax(-1).mean(0).log(), y)) for t, s in scales.items()}
    assert at[1.0] == pytest.approx(found.nll)
    assert at[1.0] <= min(at.values())


def test_the_noise_of_one_network_is_that_of_its_residuals():
    model, y = network(2), X[:, :2].sin()
    ensemble = Ensemble([model], "regression")
    found = ensemble.calibrate((X, y))
    with torch.no_grad():
        rmse = (model(X) - y).square().mean().sqrt()
    close(torch.as_tensor(found.sigma_noise), rmse, 1e-6)
    close(ensemble.sigma_noise, rmse, 1e-6)
    close(ensemble.predict(X).aleatoric[0, 0], rmse.square(), 1e-6)


def test_a_mixture_is_rescaled_too():
    members = [Laplace(net, "classification").fit(BATCHES) for net in (network(), nn.Linear(3, 3).double())]
    mixture = Mixture(members)
    found = mixture.calibrate(BATCHES)
    assert found.nll <= found.nll_before
    p = mixture.predict(X).mean
    assert found.nll == pytest.approx(float(nn.functional.nll_loss(p.log(), Y)), rel=1e-6)
    regression = Mixture([Laplace(network(2), "regression").fit([(X, X[:, :2])])])
    assert regression.calibrate((X, X[:, :2])).sigma_noise == pytest.approx(float(regression.sigma_noise))


def test_counts_have_nothing_to_rescale():
    with pytest.raises(UnsupportedError, match="has neither"):
        Ensemble([network()], "poisson").calibrate(BATCHES)
    with pytest.raises(InputError, match="no example"):
        Ensemble([network()], "classification").calibrate([])


# ---- dropout


def dropped(p: float = 0.4) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(p), nn.Linear(4, 3)).double()


def test_dropout_averages_over_masks():
    model, p = dropped(), 0.4
    with torch.no_grad():
        h = model[1](model[0](X))
        exact = torch.zeros(40, 3).double()
        for bits in range(16):  # every mask
            mask = torch.tensor([bits >> i & 1 for i in range(4)]).double()
            share = (1 - p) ** mask.sum() * p ** (4 - mask.sum())
            exact += share * model[3](h * mask / (1 - p)).softmax(-1)
    found = MCDropout(model, "classification", 400).predict(X)
    assert (found.mean - exact).abs().max() < 0.06
    assert abs(float((found.mean - exact).mean(0).abs().max())) < 0.03


def test_draws_of_dropout_are_functions():
    source = MCDropout(dropped(), "classification", 20, seed=3)
    whole = source.predict(X)
    close(source.predict(X[5:9]).mean, whole.mean[5:9])
    close(source.predict(X).mean, whole.mean)
    assert not torch.equal(MCDropout(dropped(), "classification", 20, seed=4).predict(X).mean, whole.mean)
    assert source.model.training
    drawn = source.functional_samples(X, n_samples=20)
    close(drawn.softmax(-1).mean(0), whole.mean)
    assert len(acquire(source, X, 3).indices) == 3


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_dropout_keeps_the_first_moments_of_its_input(kind):
    model = nn.Sequential(kind(0.3), nn.Identity())
    source = MCDropout(model, "regression", 200)
    torch.manual_seed(0)
    x = torch.randn(3, 400)
    drawn = source.functional_samples(x, n_samples=200)
    assert abs(float((drawn - x).mean())) < 0.02
    if kind is nn.AlphaDropout:
        assert float(drawn.var()) == pytest.approx(1.0, abs=0.05)


def test_dropout_of_channels_drops_whole_channels():
    source = MCDropout(nn.Sequential(nn.Dropout2d(0.5), nn.Flatten()), "regression", 10)
    drawn = source.functional_samples(torch.ones(2, 6, 3, 3), n_samples=10).unflatten(2, (6, 9))
    assert torch.equal(drawn, drawn[..., :1].expand_as(drawn))
    assert set(drawn.unique().tolist()) == {0.0, 2.0}


def test_a_network_without_dropout_is_refused():
    with pytest.raises(ModelError, match="no dropout layer"):
        MCDropout(network(), "classification")
    with pytest.raises(ModelError, match="no dropout layer"):
        MCDropout(dropped(0.0), "classification")


class Encoded(nn.Module):
    """A transformer of torch, whose eval mode has a fused kernel without the dropout layers."""

    def __init__(self, kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> None:
        super().__init__()
        layer = kind(8, 2, 16, dropout=0.3, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def test_dropout_stays_on_in_a_transformer():
    torch.manual_seed(0)
    source, x = MCDropout(Encoded(), "classification", 20), torch.randn(6, 4, 8)
    whole = source.predict(x)
    assert float(whole.epistemic.min()) > 1e-3
    torch.testing.assert_close(source.predict(x[2:4]).mean, whole.mean[2:4])  # attention's own dropout stays off
    assert all(module.training for module in source.model.modules())


def test_a_transformer_layer_of_ones_own_stays_in_eval_mode():
    class Noisy(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return nn.functional.dropout(super().forward(*args, **kwargs), 0.5, self.training)

    torch.manual_seed(0)
    source, x = MCDropout(Encoded(Noisy), "classification", 5), torch.randn(6, 4, 8)
    before = torch.get_rng_state()
    torch.testing.assert_close(source.predict(x).mean, source.predict(x).mean)
    assert torch.equal(torch.get_rng_state(), before)
    assert float(source.predict(x).epistemic.min()) > 1e-4


def test_dropout_layers_that_are_never_called_are_refused():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.head = nn.Dropout(0.5), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    with pytest.raises(ModelError, match="no dropout layer of the network was called"):
        MCDropout(Unused(), "classification").predict(X.float())


@pytest.mark.parametrize("rival", [MCDropout, SWAG])
def test_what_is_no_network_is_refused(rival):
    la = Laplace(dropped(), "classification").fit(BATCHES)
    with pytest.raises(OptionError, match=r"model is a Laplace; .* Write model=la.model."):
        rival(la, "classification")
    with pytest.raises(OptionError, match=r"model is a str; a torch.nn.Module is needed.$"):
        rival("net", "classification")


# ---- SWAG


def walk(model: nn.Module, swag: SWAG, steps: int) -> Tensor:  # (steps, P)
    """Move the weights at random, and collect them."""
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.1)
        swag.collect()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return torch.stack(seen)


def test_moments_are_those_of_the_collected_weights():
    model = network()
    swag = SWAG(model, "classification", rank=4)
    theta = walk(model, swag, 7)
    close(swag.mean, theta.mean(0))
    close(swag.variance, theta.var(0, correction=0))
    running = torch.stack([theta[i] - theta[: i + 1].mean(0) for i in range(7)])
    close(swag.deviations, running[-4:])
    assert swag.n_collected == 7


@pytest.mark.parametrize("rank", [0, 4])
def test_draws_have_the_mean_and_covariance_of_the_definition(rank):
    model = nn.Linear(2, 1).double()
    swag = SWAG(model, "regression", rank=rank, n_samples=2, scale=1.5)
    walk(model, swag, 6)
    drawn = torch.stack([torch.cat([t.flatten() for t in swag.weights_drawn(k).values()]) for k in range(6000)])
    covariance = swag.variance.diag()
    if rank:
        covariance = (covariance + swag.deviations.T @ swag.deviations / (rank - 1)) / 2
    expected = 1.5**2 * covariance
    scale = expected.diagonal().sqrt()
    assert ((drawn.mean(0) - swag.mean).abs() < 5 * scale / 6000**0.5).all()
    assert ((drawn.T.cov() - expected).abs() < 0.08 * torch.outer(scale, scale)).all()


def test_predictions_are_the_mean_over_drawn_networks():
    model = network()
    swag = SWAG(model, "classification", n_samples=3)
    walk(model, swag, 5)
    with torch.no_grad():
        expected = torch.stack(
            [torch.func.functional_call(model, swag.weights_drawn(k), X).softmax(-1) for k in range(3)]
        )
    close(swag.draw().predict(X).mean, expected.mean(0))
    assert len(acquire(swag, X, 2).indices) == 2


def test_statistics_of_batchnorm_are_those_of_the_drawn_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    swag = SWAG(model, "classification", n_samples=2).run(BATCHES, 4, lr=0.05).draw(BATCHES)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    expected = []
    for k in range(2):
        drawn = swag.weights_drawn(k)
        h = [x @ drawn["0.weight"].T + drawn["0.bias"] for x, _ in BATCHES]
        mean = torch.stack([part.mean(0) for part in h]).mean(0)
        variance = torch.stack([part.var(0) for part in h]).mean(0)
        tensors = drawn | {"1.running_mean": mean, "1.running_var": variance}
        with torch.no_grad():
            expected.append(torch.func.functional_call(model, tensors, X).softmax(-1))
    close(swag.predict(X).mean, torch.stack(expected).mean(0))
    with pytest.raises(InputError, match=r"draw\(train_loader\)"):
        swag.draw()


def test_run_is_sgd_with_momentum():
    model = network()
    swag = SWAG(model, "classification", rank=0).run(BATCHES, 3, epochs=2, lr=0.1)
    other = network()
    sgd, seen = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(3):
        for _ in range(2):
            for x, y in BATCHES:
                sgd.zero_grad()
                nn.functional.cross_entropy(other(x), y).backward()
                sgd.step()
        seen.append(torch.cat([p.detach().flatten() for p in other.parameters()]).clone())
    close(swag.mean, torch.stack(seen).mean(0))
    close(swag.variance, torch.stack(seen).var(0, correction=0), 1e-7)


def test_wrong_use_of_swag_is_refused():
    swag = SWAG(network(), "classification")
    with pytest.raises(NotFittedError, match="0 iterates"):
        swag.draw()
    swag.collect()
    swag.collect()
    with pytest.raises(NotFittedError, match="no networks were drawn"):
        swag.predict(X)
    with pytest.raises(OptionError, match="rank=1"):
        SWAG(network(), "classification", rank=1)
    with pytest.raises(InputError, match="many times"):
        swag.run(iter(BATCHES))
    with pytest.raises(NumericalError, match="diverged"):
        SWAG(network(2), "regression").run([(X, X[:, :2])], 30, lr=1e9)
    with torch.no_grad():
        swag.model[0].weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="diverged"):
        swag.collect()

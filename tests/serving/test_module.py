"""`la.module()` predicts what `la.predict` predicts for each input alone, and depends on nothing outside of itself."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, Ordinal, from_log_prob
from laplace.errors import ModelError, NotFittedError, OptionError, StaleWarning, UnsupportedError
from laplace.predictive import Link
from laplace.serving import PredictiveModule
from laplace.serving.outputs import _root
from networks import cut, make

ALL = ("mean", "variance", "epistemic", "aleatoric")
STRUCTURES = ("kron", "diag", "full", "ekfac", "inf", "block", "lowrank")
pytestmark = pytest.mark.filterwarnings("ignore::laplace.errors.LaplaceWarning")


def alone(la: Laplace, x: Tensor, link: str | None, draws: bool = False) -> dict[str, Tensor]:
    """What `la.predict` says about each input by itself."""
    found: dict[str, list[Tensor]] = {name: [] for name in ALL}
    for one in x.split(1):
        seeded = {"generator": torch.Generator().manual_seed(0)} if draws else {}
        prediction = la.predict(one, link_approx=link, **seeded)
        found["mean"].append(prediction.mean)
        found["variance"].append(prediction.outputs.variance)
        found["epistemic"].append(prediction.epistemic)
        found["aleatoric"].append(prediction.aleatoric)
    return {name: torch.cat(parts) for name, parts in found.items()}


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert value.dtype == expected[name].dtype, name
        assert (value - expected[name]).abs().max() < tolerance, name


def fitted(likelihood, outputs: int, y: Tensor, structure: str = "kron", **options) -> tuple[Laplace, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs)).double().eval()
    x = torch.randn(len(y), 4, dtype=torch.float64)
    return Laplace(model, likelihood, "last_layer", structure, **options).fit(cut(x, y, 6)), x[:3]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", ["mlp", "wrapped", "residual", "conv"])
def test_regression_of_every_structure(network, structure):
    model, x, y = make(network, "regression")
    la = Laplace(model, "regression", "last_layer", structure, sigma_noise=[0.3, 0.7], prior_precision=2.0)
    la.fit(cut(x, y, 5))
    assert_alike(la.module(outputs=ALL)(x[:3]), alone(la, x[:3], None))


@pytest.mark.parametrize("link", ["probit", "one_vs_rest", "bridge", "bridge_norm", "delta", "mc"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_classification_of_every_structure_and_link(structure, link):
    model, x, y = make("residual" if structure == "full" else "mlp", "classification")
    la = Laplace(model, "classification", "last_layer", structure, softmax_temperature=1.3).fit(cut(x, y, 5))
    draws = link == "mc"
    names = ("mean", "variance") if draws else ALL  # la.predict draws anew for its epistemic part
    assert_alike(la.module(link, names)(x[:3]), alone(la, x[:3], link, draws))
    assert torch.equal(la.module(link, "mean")(x[:3]), la.module(link, ("mean",))(x[:3])["mean"])


def test_variances_are_those_of_the_dense_covariance():
    la, x = fitted("regression", 2, torch.randn(20, 2, dtype=torch.float64), "full")
    phi = la.model[:2](x)
    rows = torch.zeros(len(x), 2, la.n_params, dtype=torch.float64)
    for c in range(2):
        rows[:, c, 7 * c : 7 * (c + 1)] = phi
        rows[:, c, 14 + c] = 1
    expected = torch.einsum("ncp,pq,ncq->nc", rows, la.posterior_covariance, rows)
    assert (la.module(outputs="variance")(x) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("structure", ["kron", "full", "inf"])
@pytest.mark.parametrize(
    ("likelihood", "outputs", "labels"),
    [
        ("binary", 1, lambda: torch.randint(2, (24,))),
        ("multilabel", 3, lambda: torch.randint(2, (24, 3))),
        ("poisson", 2, lambda: torch.randint(5, (24, 2))),
        ("heteroscedastic", 4, lambda: torch.randn(24, 2, dtype=torch.float64)),
        (Ordinal(4), 1, lambda: torch.randint(4, (24,))),
    ],
    ids=["binary", "multilabel", "poisson", "heteroscedastic", "ordinal"],
)
def test_every_likelihood(likelihood, outputs, labels, structure):
    la, x = fitted(likelihood, outputs, labels(), structure)
    for link in list(la.likelihood.links) or [None]:
        draws = link == "mc"
        names = ("mean", "variance") if draws else ALL
        assert_alike(la.module(link, names)(x), alone(la, x, link, draws))


def test_rewards_and_outputs_with_a_known_noise():
    x = torch.randn(12, 2, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    la = Laplace(model, "reward_modeling").fit([(x, torch.randint(2, (12,)))])
    assert_alike(la.module(outputs=ALL)(x[:3, 0]), alone(la, x[:3, 0], None))
    y, noise = torch.randn(12, 1, dtype=torch.float64), torch.rand(12, 1, dtype=torch.float64) + 0.1
    la = Laplace(model, "given_noise").fit([(x[:, 0], y, noise)])
    assert_alike(la.module(outputs=ALL)(x[:3, 0]), alone(la, x[:3, 0], None))


def test_a_likelihood_and_a_link_of_ones_own():
    own = from_log_prob(lambda f, y: -(f - y).square().sum(-1), inverse_link=torch.tanh)
    la, x = fitted(own, 2, torch.randn(20, 2, dtype=torch.float64))
    assert_alike(la.module(outputs=("mean", "variance"))(x), alone(la, x, "mc", draws=True))
    with pytest.raises(UnsupportedError, match="draws of its own"):
        la.module(outputs=ALL)
    la, x = fitted("classification", 3, torch.randint(3, (20,)))
    link = Link.of_variances(lambda f, v: (f - v).softmax(-1))
    assert torch.allclose(la.module(link, "mean")(x), la(x, link_approx=link), atol=1e-12)


def test_many_classes_are_drawn_as_la_predict_draws_them():
    la, x = fitted("classification", 40, torch.randint(40, (60,)))
    assert_alike(la.module("probit", ALL)(x), alone(la, x, "probit"))


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).squeeze(-1)


def test_outputs_keep_the_networks_shape():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double().eval()
    x, y = torch.randn(6, 1, 5, 4, dtype=torch.float64), torch.randint(3, (6, 5, 4))
    la = Laplace(conv, "classification", class_dim=1).fit([(x, y)])
    found, expected = la.module("probit", ("mean", "epistemic"), example=x)(x[:1]), la.predict(x[:1])
    assert found["mean"].shape == (1, 3, 5, 4)
    assert (found["mean"] - la(x[:1], link_approx="probit")).abs().max() < 1e-10
    assert found["epistemic"].shape == expected.epistemic.shape

    model, x = Squeezed().double().eval(), torch.randn(9, 4, dtype=torch.float64)
    la = Laplace(model, "regression").fit([(x, torch.randn(9, dtype=torch.float64))])
    loaded = Laplace(model, "regression")
    loaded.load_state_dict(la.state_dict())
    for one in (la, loaded):
        for name, value in one.module(outputs=ALL, example=x)(x).items():
            assert value.shape == (9,), name
        assert one.module(outputs="mean")(x).shape == one.predict(x).mean.shape == model(x).shape == (9,)
    la = Laplace(model, "regression", class_dim=None).fit([(x, torch.randn(9, dtype=torch.float64))])
    assert torch.equal(la.module(outputs="mean")(x), model(x))

    sequence, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval(), torch.randn(3, 7, 4)
    la = Laplace(sequence, "classification").fit([(x.double(), torch.randint(3, (3, 7)))])
    assert (la.module("probit", "mean")(x.double()) - la(x.double())).abs().max() < 1e-10


class LastPosition(nn.Module):
    """Its last layer runs at all positions, in the midst of forward, and the outputs come in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score, self.scale = nn.Embedding(11, 6), nn.Linear(6, 3, bias=False), nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        at_positions = self.score(self.scale(self.embed(input_ids)).tanh())
        last = attention_mask.sum(1) - 1
        return {"logits": at_positions[torch.arange(len(last)), last], "others": at_positions[:, 0]}


@pytest.mark.parametrize("reduction", ["pick_last", None])
def test_a_layer_in_the_midst_of_forward_and_inputs_by_name(reduction):
    torch.manual_seed(0)
    model = LastPosition().double().eval()
    batch = {"input_ids": torch.randint(11, (8, 5)), "attention_mask": torch.ones(8, 5, dtype=torch.long)}
    labels = torch.randint(3, (8,))
    la = Laplace(model, "classification", last_layer_name="score", feature_reduction=reduction)
    la.fit([{**batch, "labels": labels}])
    module, expected = la.module("probit", "mean", example=batch), la(batch, link_approx="probit")
    for found in (module(batch), module(**batch), module({**batch, "labels": labels})):
        assert (found - expected).abs().max() < 1e-12


def test_hooks_before_the_last_layer_make_its_features():
    model, x, y = make("mlp", "classification")
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
    la = Laplace(model, "classification", "last_layer").fit(cut(x, y, 5))
    assert_alike(la.module("probit", ("mean", "variance"))(x[:3]), alone(la, x[:3], "probit"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("c", "rank"), [(2, 1), (3, 0), (10, 1), (10, 5), (40, 20)])
def test_singular_covariances_have_roots_in_each_way_of_running(c, rank, dtype):
    torch.manual_seed(0)
    half = torch.randn(50, c, rank, dtype=dtype)
    covariance = half @ half.mT
    traced, atol = torch.jit.trace(_root, covariance, check_trace=False), 100 * c * (rank + 1) * torch.finfo(dtype).eps
    for root in (_root(covariance), traced(covariance)):
        torch.testing.assert_close(root @ root.mT, covariance, rtol=0, atol=atol)
    assert _root(torch.full((1, c, c), torch.nan, dtype=dtype)).isnan().any()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.body(a) * b).tanh())


def test_several_inputs():
    a, b, y = torch.randn(9, 4), torch.randn(9, 5), torch.randn(9, 2)
    la = Laplace(Two().eval(), "regression").fit([((a, b), y)])
    module, expected = la.module(outputs="mean"), la.model(a, b)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        assert list(inspect.signature(one.forward).parameters) == ["a", "b"]
        for found in (one(a, b), one(b=b, a=a), one(a, b=b), one((a, b)), one({"a": a, "b": b})):
            assert torch.allclose(found, expected)
    replica = module._replicate_for_data_parallel()  # as nn.DataParallel makes them
    assert replica.forward.__self__ is replica


def test_it_depends_on_nothing_outside_and_the_network_stays_as_it_was():
    model, x, y = make("mlp", "classification")
    model.train()
    la = Laplace(model, "classification").fit(cut(x, y, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module = la.module("probit", ALL)
    expected = module(x)
    module.load_state_dict({name: 0 * value for name, value in module.state_dict().items()})
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert type(model[2]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    module = la.module("probit", ALL)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    la.prior_precision = 1e3
    assert_alike(module(x), expected, 1e-15)
    assert not module.train().training
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("structure", ["kron", "full", "lowrank"])
def test_copies_pickles_and_states_predict_the_same(structure):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 5))
    module = la.module("mc", ALL)
    expected = module(x)
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]  # noqa: S301
    empty = la.module("mc", ALL)
    for value in empty.state_dict().values():
        value.zero_()
    empty.load_state_dict(module.state_dict())
    for other in (*others, empty):
        assert isinstance(other, PredictiveModule)
        assert_alike(other(x), expected, 1e-15)


def test_half_precision_rounds_the_network_and_not_the_posterior():
    model, x, y = make("mlp", "classification")
    la = Laplace(model.float(), "classification").fit(cut(x.float(), y, 5))
    module = la.module("probit")
    expected = module(x.float())
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert [b.dtype for b in half.predictive.buffers()] == [b.dtype for b in module.predictive.buffers()]
    assert {p.dtype for p in half.network.parameters()} == {torch.bfloat16}
    found = half(x.bfloat16())
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert (value - expected[name]).abs().max() < 0.05
    assert_alike(module.double()(x), {name: v.double() for name, v in expected.items()}, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        cast = la.module("probit")(x.float())
    assert (cast["variance"] - expected["variance"]).abs().max() < 0.02 * expected["variance"].max()


def test_predictions_do_not_depend_on_the_batch():
    la, x = fitted("classification", 3, torch.randint(3, (20,)))
    module = la.module("mc", ALL)
    assert_alike(module(x), {name: torch.cat([module(one)[name] for one in x.split(1)]) for name in ALL}, 1e-12)
    assert la.module("mc", "mean", seed=1)(x).sub(module(x)["mean"]).abs().max() > 1e-6
    assert la.module("mc", "mean", n_samples=3).predictive.noise.shape == (3, 3)


def test_a_bias_or_a_weight_alone_may_be_uncertain():
    for frozen in (0, 1):
        model, x, y = make("mlp", "classification")
        list(model[2].parameters())[frozen].requires_grad_(False)
        for structure in ("kron", "full", "lowrank"):
            la = Laplace(model, "classification", hessian_structure=structure).fit(cut(x, y, 5))
            assert_alike(la.module("probit", ALL)(x[:2]), alone(la, x[:2], "probit"))


def test_gradients_flow_to_the_inputs():
    la, x = fitted("regression", 2, torch.randn(20, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(la.module(outputs="variance"), x.requires_grad_())


def test_refusals():
    model, x, y = make("mlp", "classification")
    with pytest.raises(NotFittedError):
        Laplace(model, "classification").module()
    la = Laplace(model, "classification").fit(cut(x, y, 5))
    with pytest.raises(OptionError, match="Valid: 'mean', 'variance'"):
        la.module(outputs="means")
    with pytest.raises(OptionError, match="one or more"):
        la.module(outputs=())
    with pytest.raises(OptionError, match=r"^link='logit'"):
        la.module("logit")
    with pytest.raises(OptionError, match=r"^link=.* is a function"):
        la.module(lambda f, variance: f)
    with pytest.raises(OptionError, match="seed"):
        la.module(seed=-1)
    with pytest.raises(UnsupportedError, match="last_layer"):
        Laplace(model, "classification", "all", "diag").fit(cut(x, y, 5)).module()
    with pytest.raises(UnsupportedError, match="over functions"):
        Laplace(model, "classification", "last_layer", "gp").fit(cut(x, y, 5)).module()
    traced = nn.Sequential(torch.jit.trace(model[:2], (x,)), model[2])
    la = Laplace(traced.eval(), "classification").fit(cut(x, y, 5))
    with pytest.raises(UnsupportedError, match="scripted"):
        la.module()


def test_what_features_do_not_survive_is_refused():
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)[:, 0]

    x = torch.randn(9, 4)
    la = Laplace(First().eval(), "regression", class_dim=None).fit([(x, torch.randn(9))])
    with pytest.raises(ModelError, match="squeeze"):
        la.module()(x)

    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(100 * self.body(x)).clamp(-1e4, 1e4) if len(x) else x

    with torch.no_grad():
        clipped = Clipped().eval()
        clipped.body.weight.mul_(1e3)
        clipped.head.weight.mul_(1e-4)
    la = Laplace(clipped, "regression").fit([(x, torch.randn(9, 3))])
    with pytest.raises(ModelError, match="is not that of"):
        la.module(example=x)


def test_a_network_that_has_changed_is_noticed():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 5))
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.warns(StaleWarning):
        la.module()

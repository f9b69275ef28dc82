"""Scores of a pool against brute force: all combinations of labels, dense covariances, all batches."""

from __future__ import annotations

import math
from itertools import combinations, product

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace, Ordinal
from laplace.decisions import METHODS, acquire, information, score
from laplace.errors import InputError, NotFittedError, OptionError, UnsupportedError

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2)
POOL = torch.tensor([[0.1, -0.2], [1.0, 2.5], [-1.5, 0.3], [3.0, -3.0], [1.1, 2.4]], dtype=torch.float64)


def network(outputs: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def classifier(k: int = 3, structure: str = "full") -> Laplace:
    return Laplace(network(k), "classification", "all", structure).fit([(X, torch.arange(12) % k)])


def regression(c: int = 1, weights: str = "all") -> Laplace:
    y = torch.stack([X.sum(1).sin(), X[:, 0].cos()], 1)[:, :c]
    return Laplace(network(c), "regression", weights, "full", sigma_noise=0.3).fit([(X, y)])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def drawn(la: Laplace, x: Tensor, n_samples: int) -> Tensor:
    """The probabilities that `score` and `acquire` see: a seed from the generator, then draws by that seed."""
    seed = int(torch.randint(2**31, (), generator=seeded()))
    return la.predictive_samples(x, n_samples=n_samples, generator=torch.Generator().manual_seed(seed))


def joint(p: Tensor, batch: tuple[int, ...]) -> Tensor:
    """p(y_1, ..., y_n) for all combinations of labels, flat: the mean over functions of products."""
    return torch.stack(
        [math.prod([p[:, i, y] for i, y in zip(batch, ys, strict=True)]).mean()
         for ys in product(range(p.shape[2]), repeat=len(batch))]
    )  # fmt: skip


def entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


def information_of(p: Tensor, batch: tuple[int, ...]) -> Tensor:
    """I(labels of the batch; function), with the functions that were drawn as all there are."""
    return entropy(joint(p, batch)) - sum(entropy(p[:, i]).mean() for i in batch)


def close(a: Tensor, b: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-8)


def test_scores_of_single_inputs_are_those_of_the_drawn_functions():
    la, p = classifier(), drawn(classifier(), POOL, 50)
    mean = p.mean(0)
    ordered = mean.sort(-1, descending=True).values
    how = {"n_samples": 50}
    close(score(la, POOL, "entropy", generator=seeded(), **how), entropy(mean))
    close(score(la, POOL, "margin", generator=seeded(), **how), ordered[:, 1] - ordered[:, 0])
    expected = torch.stack([information_of(p, (i,)) for i in range(5)])
    close(score(la, POOL, "bald", generator=seeded(), **how), expected)
    close(score(la, POOL, "batch_bald", generator=seeded(), **how), expected)


def test_bald_approaches_the_exact_information_with_many_draws():
    la = Laplace(network(1), "binary", "last_layer", "full").fit([(X, (torch.arange(12) % 2).double()[:, None])])
    variance, mean = (la.predict(POOL[:1]).outputs.variance, la.predict(POOL[:1]).outputs.mean)
    nodes = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = (-nodes.square() / 2).exp() / (-nodes.square() / 2).exp().sum()
    p = (mean + variance.sqrt() * nodes).sigmoid().flatten()  # the integral over f on a grid
    both = torch.stack([p, 1 - p], -1)
    exact = entropy((weight[:, None] * both).sum(0)) - (weight * entropy(both)).sum()
    found = score(la, POOL[:1], "bald", n_samples=20_000, generator=seeded())
    assert abs(float(found - exact)) < 0.03 * float(exact)
    assert float(exact) > 0.01


def test_batch_bald_is_greedy_over_exact_joint_information():
    la, p = classifier(), drawn(classifier(), POOL, 40)
    chosen = acquire(la, POOL, 3, "batch_bald", n_samples=40, generator=seeded())
    batch: tuple[int, ...] = ()
    for n in range(3):
        gains = {i: float(information_of(p, (*batch, i))) for i in range(5) if i not in batch}
        batch = (*batch, max(gains, key=lambda i: gains[i]))
        assert abs(gains[batch[-1]] - float(chosen.scores[n])) < 1e-10
    assert tuple(chosen.indices.tolist()) == batch
    best = max(float(information_of(p, several)) for several in combinations(range(5), 3))
    assert float(chosen.scores[-1]) >= (1 - 1 / math.e) * best  # the bound for greedy choices
    pair = acquire(la, POOL, 2, "batch_bald", n_samples=40, generator=seeded())
    pairs = {several: float(information_of(p, several)) for several in combinations(range(5), 2)}
    assert float(pair.scores[-1]) == pytest.approx(max(pairs.values()), rel=1e-9)  # here greedy is the best pair


def test_batch_bald_of_one_input_is_bald():
    one = acquire(classifier(), POOL, 1, "batch_bald", generator=seeded())
    other = acquire(classifier(), POOL, 1, "bald", generator=seeded())
    assert one.indices.tolist() == other.indices.tolist()
    close(one.scores, other.scores)


def test_drawn_combinations_estimate_the_joint_entropy():
    p = torch.distributions.Dirichlet(torch.ones(4, dtype=torch.float64)).sample((30, 6))
    exact, drawn_ones = (information.JointEntropy(p, most, seeded()) for most in (4**6, 300))
    for index in (0, 3, 5, 1):
        exact.add(index)
        drawn_ones.add(index)
    expected = torch.stack([information_of(p, (0, 3, 5, 1, i)) for i in (2, 4)])
    rest = torch.tensor([2, 4])
    close(exact.gains(rest), expected)
    assert (drawn_ones.gains(rest) - expected).abs().max() < 0.1
    close(exact.information(), information_of(p, (0, 3, 5, 1)))


@pytest.mark.parametrize("most", [2**6, 20])
def test_bounds_save_looks_and_change_no_choice(most):
    """A pool of several looks: the batch is the one that looking at every input each time gives."""
    p = torch.rand(50, 300, 1, dtype=torch.float64, generator=seeded()).pow(4)
    p = torch.cat([p, 1 - p], -1)
    looking, everything = (information.JointEntropy(p, most, seeded()) for _ in range(2))
    bounds, rest, looks = torch.full((300,), torch.inf, dtype=torch.float64), torch.arange(300), []
    for _ in range(6):
        before = bounds.clone()
        best, gain = looking.best(bounds)
        looks.append(int((bounds != before).sum()))
        gains = everything.gains(rest)
        if most == 2**6:  # all combinations of labels: the bounds are exact
            assert best == int(rest[gains.argmax()])
        assert float(gain) > float(gains.max()) - (0.02 if most == 20 else 1e-12)
        bounds[best] = -torch.inf
        rest = rest[rest != best]
        looking.add(best)
        everything.add(best)
    assert looks[0] == 300
    assert max(looks[2:]) < 300


def test_a_copy_of_an_input_tells_less_than_the_input_itself():
    twice = torch.cat([POOL[3:4], POOL[3:4]])
    single = score(classifier(), twice, "bald", generator=seeded())
    close(single[0], single[1])
    both = acquire(classifier(), twice, 2, "batch_bald", generator=seeded()).scores
    assert both[0] < both[1] < 1.9 * both[0]
    again = torch.cat([POOL[3:4]] * 30)
    most = acquire(regression(), again, 30, "batch_bald").scores
    assert (most.diff().diff() < 0).all()  # each further copy tells less


def test_epig_is_the_mean_information_about_targets():
    la, targets = classifier(), torch.tensor([[0.5, 0.5], [-1.0, 2.0], [2.0, 2.0]], dtype=torch.float64)
    found = score(la, POOL, "epig", targets=targets, n_samples=60, generator=seeded())
    first = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=seeded())))
    seed = int(torch.randint(2**31, (), generator=first))
    p = la.predictive_samples(torch.cat([POOL, targets]), n_samples=60, generator=torch.Generator().manual_seed(seed))
    expected = [
        torch.stack([entropy(joint(p, (i,))) + entropy(joint(p, (t,))) - entropy(joint(p, (i, t))) for t in (5, 6, 7)])
        for i in range(5)
    ]
    close(found, torch.stack(expected).mean(1))
    own = score(la, POOL, "epig", n_samples=60, generator=seeded())
    assert (own > 0).all()


def test_binary_and_ordered_classes_are_classes():
    binary = Laplace(network(1), "binary", "all", "full").fit([(X, (torch.arange(12) % 2).double()[:, None])])
    p = drawn(binary, POOL, 30)
    both = torch.cat([1 - p, p], -1)
    expected = torch.stack([information_of(both, (i,)) for i in range(5)])
    close(score(binary, POOL, n_samples=30, generator=seeded()), expected)
    ordered = Laplace(network(1), Ordinal(4), "all", "full").fit([(X, torch.arange(12) % 4)])
    assert acquire(ordered, POOL, 2, "batch_bald", generator=seeded()).indices.unique().numel() == 2


def test_a_loader_gives_the_scores_of_one_tensor():
    la = classifier()
    loader = DataLoader(TensorDataset(POOL, torch.zeros(5)), batch_size=2)
    for method in METHODS:
        close(score(la, loader, method, generator=seeded()), score(la, POOL, method, generator=seeded()))


def dense(la: Laplace, x: Tensor) -> Tensor:
    return la(x, joint=True)[1]


@pytest.mark.parametrize("form", ["array", "DataFrame", "list"])
def test_a_pool_may_be_an_array(form):
    make = {"array": Tensor.numpy, "DataFrame": lambda x: pd.DataFrame(x.numpy()), "list": Tensor.tolist}[form]
    for la in (
        classifier(),
        regression(),
        Laplace(network(1).float(), "regression").fit([(X.float(), X[:, :1].float())]),
    ):
        pool = POOL.to(next(la.model.parameters()).dtype)
        for method in ("bald", "batch_bald", "epig"):
            found = acquire(la, make(pool), 3, method, generator=seeded())
            assert torch.equal(found.indices, acquire(la, pool, 3, method, generator=seeded()).indices)


@pytest.mark.parametrize("c", [1, 2])
def test_a_regression_is_scored_in_closed_form(c):
    la, noise = regression(c), 0.09
    k, eye = dense(la, POOL), torch.eye(c).double()
    blocks = [k[c * i : c * i + c, c * i : c * i + c] for i in range(5)]
    close(score(la, POOL, "bald"), torch.stack([(eye + b / noise).logdet() / 2 for b in blocks]))
    gaussian = [torch.distributions.MultivariateNormal(torch.zeros(c).double(), b + noise * eye) for b in blocks]
    close(score(la, POOL, "entropy"), torch.stack([g.entropy() for g in gaussian]))
    targets = POOL[:2] + 0.3
    whole = dense(la, torch.cat([POOL, targets])) + noise * torch.eye(7 * c).double()

    def logdet(*inputs: int) -> Tensor:
        rows = torch.tensor([c * i + j for i in inputs for j in range(c)])
        return whole[rows][:, rows].logdet()

    expected = [sum((logdet(i) + logdet(t) - logdet(i, t)) / 2 for t in (5, 6)) / 2 for i in range(5)]
    close(score(la, POOL, "epig", targets=targets), torch.stack(expected))


@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_a_batch_of_a_regression_is_greedy_over_log_determinants(weights, c):
    la = regression(c, weights)
    k = dense(la, POOL) / 0.09 + torch.eye(5 * c).double()
    batch: tuple[int, ...] = ()
    chosen = acquire(la, POOL, 4, "batch_bald")
    for n in range(4):
        gains = {}
        for i in set(range(5)) - set(batch):
            rows = torch.tensor([c * b + j for b in (*batch, i) for j in range(c)])
            gains[i] = float(k[rows][:, rows].logdet() / 2)
        batch = (*batch, max(gains, key=lambda i: gains[i]))
        assert float(chosen.scores[n]) == pytest.approx(gains[batch[-1]], rel=1e-8)
    assert tuple(chosen.indices.tolist()) == batch


def test_wrong_input_is_refused():
    la = classifier()
    with pytest.raises(OptionError, match="method"):
        acquire(la, POOL, method="bold")
    with pytest.raises(OptionError, match="n=6 inputs cannot be chosen from a pool of 5"):
        acquire(la, POOL, 6)
    with pytest.raises(OptionError, match="n=6 inputs cannot be chosen"):
        acquire(regression(), POOL, 6, "batch_bald")
    with pytest.raises(OptionError, match="targets= is for method='epig'"):
        acquire(la, POOL, 2, "batch_bald", targets=POOL)
    with pytest.raises(OptionError, match="targets= is for method='epig'"):
        score(la, POOL, "bald", targets=POOL)
    with pytest.raises(OptionError, match="n_samples"):
        score(la, POOL, n_samples=1)
    with pytest.raises(InputError, match="pool= holds no example"):
        score(la, [])
    last = Laplace(network(3), "classification").fit([(X, torch.arange(12) % 3)])
    for asked in (last, regression()):
        with pytest.raises(InputError, match="targets= holds no example"):
            score(asked, POOL, "epig", targets=POOL[:0])
    for choose in (score, acquire):
        with pytest.raises(OptionError, match=r"la is a Sequential; .* Write Laplace\(model, likelihood\)\.fit"):
            choose(network(3), POOL)
    with pytest.raises(InputError, match=r"a DataLoader that shuffles.*shuffle=False"):
        acquire(la, DataLoader(TensorDataset(POOL), 2, shuffle=True), 2)
    with pytest.raises(InputError, match="a tensor of N inputs is needed"):
        score(regression(), [(POOL,)])
    with pytest.raises(UnsupportedError, match="'margin' is the distance of two classes"):
        score(regression(), POOL, "margin")
    counts = Laplace(network(1), "poisson").fit([(X, torch.ones(12, 1))])
    with pytest.raises(UnsupportedError, match="has no scores for a pool"):
        score(counts, POOL)
    labels = Laplace(network(2), "multilabel").fit([(X, torch.ones(12, 2).double())])
    with pytest.raises(UnsupportedError, match="'multilabel' has no scores"):
        score(labels, POOL)
    functions = Laplace(network(3), "classification", "all", "gp").fit([(X, torch.arange(12) % 3)])
    assert score(functions, POOL).shape == (5,)
    assert score(functions, POOL, "epig").shape == (5,)
    for choose in (score, acquire):
        with pytest.raises(UnsupportedError, match=r"'gp' at the pool cannot be continued at targets=. Leave targets="):
            choose(functions, POOL, method="epig", targets=POOL[:2])
    with pytest.raises(UnsupportedError, match="Give the pool as one tensor"):
        score(functions, [POOL, POOL])
    with pytest.raises(NotFittedError):
        score(Laplace(network(3), "classification"), POOL)


def accuracy(method: str, seed: int) -> float:
    """The mean accuracy on scikit-learn's digits over rounds of 20 more labels each."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, pool, known, accuracies = order[:700], order[700:1700], order[1700:1720], []
    for _ in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[known]), y[known]).backward()
            optimizer.step()
        accuracies.append(float((model(x[test]).argmax(1) == y[test]).double().mean()))
        found = torch.arange(20)
        if method != "random":
            la = Laplace(model, "classification").fit([(x[known], y[known])])
            if method != "margin":
                la.tune("prior_precision")
            found = acquire(la, x[pool], 20, method, n_samples=100, generator=seeded()).indices
        known, pool = torch.cat([known, pool[found]]), pool[~torch.isin(torch.arange(len(pool)), found)]
    return sum(accuracies[1:]) / 4


def test_small_margins_need_fewer_labels_than_random_ones():
    assert sum(accuracy("margin", seed) - accuracy("random", seed) for seed in range(2)) / 2 > 0.02


@pytest.mark.slow
def test_information_of_the_whole_batch_needs_fewer_labels_than_random_ones():
    assert sum(accuracy("batch_bald", seed) - accuracy("random", seed) for seed in range(3)) / 3 > 0

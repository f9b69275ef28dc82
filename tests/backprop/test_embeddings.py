"""Embeddings: exact in every structure, Kronecker factors by their formula, and large tables that stay small."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close, assert_exact, assert_predicts_exactly, labels
from laplace import Laplace
from laplace.backprop.layers import RULES
from networks import cut

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")
TASKS = ["classification", "regression"]


class Bag(nn.Module):
    """Token ids (N, T), the first of them the padding where there is one."""

    def __init__(self, how: str, **options: object) -> None:
        super().__init__()
        bags = how in ("sum", "mean", "max", "offsets", "weighted", "frames")
        mode = how if how in ("sum", "mean", "max") else "mean" if how == "offsets" else "sum"
        self.how = how
        self.embed = nn.EmbeddingBag(7, 3, mode=mode, **options) if bags else nn.Embedding(7, 3, **options)
        self.mix, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.long()
        n, t = ids.shape
        if self.how == "offsets":
            h = self.embed(ids.flatten(), torch.arange(0, n * t, t))
        elif self.how == "weighted":
            h = self.embed(ids, per_sample_weights=(1 + ids).double())
        elif self.how == "frames":
            h = torch.tanh(self.embed(ids.reshape(-1, 2))).unflatten(0, (n, -1)).mean(1)
        elif self.how == "time first":
            h = torch.tanh(self.embed(ids.T)).mean(0)
        elif self.how == "flat":
            h = torch.tanh(self.embed(ids.flatten())).unflatten(0, (n, t)).mean(1)
        elif self.how == "twice":
            h = torch.tanh(self.embed(ids)).mean(1) + self.embed(ids[:, :1]).squeeze(1)
        else:
            h = self.embed(ids) if isinstance(self.embed, nn.EmbeddingBag) else torch.tanh(self.embed(ids)).mean(1)
        return self.head(torch.tanh(self.mix(h)))


CASES = {
    "plain": ("plain", {}),
    "padding": ("plain", {"padding_idx": 0}),
    "sparse": ("plain", {"sparse": True}),
    "time first": ("time first", {}),
    "flat": ("flat", {"padding_idx": 2}),
    "twice": ("twice", {"padding_idx": 1}),
    "bags summed": ("sum", {}),
    "bags averaged, with padding": ("mean", {"padding_idx": 0}),
    "bags with offsets": ("offsets", {}),
    "bags with weights": ("weighted", {"padding_idx": 0}),
    "frames of bags": ("frames", {}),
}


def network(case):
    torch.manual_seed(0)
    how, options = CASES[case]
    return Bag(how, **options).double(), torch.randint(0, 7, (11, 4)).double()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", CASES)
def test_curvature_and_predictions_are_exact(case, task):
    model, x = network(case)
    rule = "embedding bag" if isinstance(model.embed, nn.EmbeddingBag) else "embedding"
    assert_exact(model, x, task, rules={"embed": rule})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", [c for c in CASES if c not in ("bags with offsets", "bags with weights")])
def test_kronecker_factors_are_their_formula(case, sharing):
    model, x = network(case)
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(x, y, [5, 1, 9]))
    expected = oracle.kron_all(model, names, x, torch.eye(2, dtype=torch.float64).expand(11, 2, 2), sharing)
    size = model.embed.weight.numel()
    assert_close(la.H.to_matrix()[:size, :size], expected["embed.weight"])
    assert la.coverage().rows[0].kept == "kron 7 x 3"


class Counted(nn.Module):
    """A bag as the linear map of how often, and how much, each token is in it."""

    def __init__(self, bag: Bag, shares: Tensor) -> None:  # (7,): what one token of each kind adds
        super().__init__()
        self.embed, self.mix, self.head, self.shares = nn.Linear(7, 3, bias=False), bag.mix, bag.head, shares
        self.embed.weight.data = bag.embed.weight.data.T.contiguous()

    def forward(self, ids: Tensor) -> Tensor:
        counts = nn.functional.one_hot(ids.long(), 7).double().sum(1) * self.shares
        return self.head(torch.tanh(self.mix(self.embed(counts))))


@pytest.mark.parametrize(
    ("case", "shares"),
    [("bags with offsets", [0.25] * 7), ("bags with weights", [0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])],
)
def test_kronecker_factors_of_bags_are_those_of_what_is_in_them(case, shares):
    model, x = network(case)
    same, y = Counted(model, torch.tensor(shares, dtype=torch.float64)), labels("regression", len(x), 2)
    assert_close(same(x), model(x))
    names = [k for k, _ in same.named_parameters()]
    b_and_a = oracle.kron_all(same, names, x, torch.eye(2, dtype=torch.float64).expand(11, 2, 2))["embed.weight"]
    mask = torch.eye(7, dtype=torch.float64).reshape(1, 7, 1, 7)
    expected = (b_and_a.reshape(3, 7, 3, 7) * mask).permute(1, 0, 3, 2).reshape(21, 21)  # A's diagonal, and in front
    la = Laplace(model, "regression", "all", "kron").fit(cut(x, y, [5, 1, 9]))
    assert_close(la.H.to_matrix()[:21, :21], expected)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "inf", "diag", "block"])
def test_every_structures_gaussian_gives_its_own_variances(structure):
    model, x = network("padding")
    y = labels("regression", len(x), 2)
    la = Laplace(model, "regression", "all", structure).fit(cut(x, y, [5, 1, 9]))
    assert_predicts_exactly(la, copy.deepcopy(model).eval(), x)
    precision = torch.linalg.inv(la.posterior_covariance)
    assert_close(torch.as_tensor(la.posterior.gaussian.logdet()), torch.logdet(precision), 1e-9)
    joint = la(x[:4], joint=True)[1]
    jac = oracle.jacobian_loop(model, list(la.posterior.fit.layout.names), x[:4]).flatten(0, 1)
    assert_close(joint, jac @ la.posterior_covariance @ jac.T)
    draws = la.sample(20_000, generator=torch.Generator().manual_seed(0))
    assert float((draws.var(0) / la.posterior_covariance.diagonal() - 1).abs().max()) < 0.06


def test_ekfac_of_an_embedding_has_the_exact_variances_along_its_basis():
    model, x = network("plain")
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "ekfac").fit(cut(x, y, 5))
    _, h = oracle.curvature_all(model, names, x, y, "regression")
    size = model.embed.weight.numel()
    right = la.posterior.fit.sums["embed.weight/right"][0]
    basis = torch.kron(torch.eye(7, dtype=torch.float64), right)
    assert_close(la.H.to_matrix()[:size, :size], oracle.in_basis(h[:size, :size], basis))


def test_kronecker_factors_do_not_depend_on_how_far_a_batch_is_padded():
    model, x = network("padding")
    y = labels("regression", len(x), 2)

    class Summed(Bag):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mix(self.embed(ids.long()).sum(1))))

    torch.manual_seed(0)
    model = Summed("plain", padding_idx=0).double()
    with torch.no_grad():
        model.embed.weight[0] = 0
    padded = torch.nn.functional.pad(x, (0, 5))
    for sharing in ("expand", "reduce"):
        one, other = (
            Laplace(model, "regression", "all", "kron", weight_sharing=sharing).fit(cut(batch, y, 4)).H.to_matrix()
            for batch in (x, padded)
        )
        assert_close(one, other)


@pytest.mark.parametrize("structure", ["gp", "lowrank"])
def test_products_of_gradients_match_rows_of_the_table(structure, monkeypatch):
    model, x = network("padding")
    y = labels("regression", len(x), 2)
    rows = Laplace(model, "regression", "all", structure).fit(cut(x, y, [5, 1, 9]))
    monkeypatch.delitem(RULES, nn.Embedding)
    generic = Laplace(model, "regression", "all", structure).fit(cut(x, y, [5, 1, 9]))
    assert generic.coverage().rows[0].rule != rows.coverage().rows[0].rule
    assert_close(rows(x[:5])[1], generic(x[:5])[1], 1e-6)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_an_embedding_tied_to_the_head_is_exact(structure, task):
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mix(self.embed(ids.long()).mean(1))))

    torch.manual_seed(0)
    model, x = Language().double(), torch.randint(0, 5, (9, 3)).double()
    y, names = labels(task, 9, 5), ["embed.weight", "mix.weight", "mix.bias"]
    la = Laplace(model, task, "all", structure).fit(cut(x, y, [4, 1, 4]))
    _, h = oracle.curvature_all(model, names, x, y, task)
    if structure == "kron":
        assert_close(la.H.to_matrix()[:15, :15], h[:15, :15])
    else:
        assert_close(la.H, h if structure == "full" else h.diagonal())
    assert la.coverage().rows[0].rule == "embedding + linear"


def test_some_rows_of_a_table_alone():
    model, x = network("padding")
    y, names = labels("regression", len(x), 2), [k for k, _ in model.named_parameters()]
    index = torch.tensor([3, 4, 10, 20, 21, 25])
    la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=index).fit(cut(x, y, 5))
    _, h = oracle.curvature_all(model, names, x, y, "regression")
    assert_close(la.H, h[index][:, index])


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_large_vocabulary_allocates_no_more_than_a_few_tables(structure):
    """50,000 x 64 is 12.8 MB in float32: the largest tensor is a few of these, whatever the number of examples."""
    model = nn.Sequential(nn.EmbeddingBag(50_000, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.randint(0, 50_000, (64, 12)), torch.arange(64) % 3
    with Largest() as largest:
        la = Laplace(model, "classification", "all", structure).fit([(x, y)])
        probabilities = la(x)
        la.log_marginal_likelihood()
    assert probabilities.isfinite().all()
    assert largest.numbers <= 2 * 50_000 * 64
    assert la.coverage().rows[0].kept == ("kron 50000 x 64" if structure == "kron" else "diag")


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns in memory of its own."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
def test_sums_of_a_table_are_saved_loaded_and_added_to(structure):
    model, x = network("padding")
    y = labels("regression", len(x), 2)
    la = Laplace(model, "regression", "all", structure).fit(cut(x, y, 5))
    again = Laplace(model, "regression", "all", structure)
    again.load_state_dict(la.state_dict())
    assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert_close(again(x)[1], la(x)[1])
    if structure != "ekfac":
        parts = Laplace(model, "regression", "all", structure).fit(cut(x[:6], y[:6], 4))
        parts.fit(cut(x[6:], y[6:], 4), override=False)
        assert_close(parts(x)[1], la(x)[1])

"""Networks whose outputs are not (N, C): scalars, sequences with masks, images with the classes in dimension 1."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import oracle
from laplace import Laplace, marglik_training
from laplace.errors import InputError, LaplaceWarning, ModelError, OptionError, UnsupportedError
from laplace.likelihoods import Categorical
from laplace.network.inputs import Inputs
from networks import Tagger

pytestmark = pytest.mark.filterwarnings("ignore:the best prior precision", "ignore:of head.weight")


class Segmenter(nn.Module):
    """Labels each pixel: (N, 1, H, W) -> (N, C, H, W)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Scalar(nn.Module):
    """One number for each example, (N,)."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).squeeze(-1)


class Flat(nn.Module):
    """A network with all its outputs side by side."""

    def __init__(self, net: nn.Module, class_dim: int) -> None:
        super().__init__()
        self.net, self.class_dim = net, class_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(self.class_dim, -1).flatten(1)


@dataclass
class Output:
    """What Hugging Face networks return."""

    logits: Tensor
    loss: Tensor | None = None


CASES = {
    ("tags", "classification"): (Tagger, (5, 3), 3, -1),
    ("tags", "regression"): (Tagger, (5, 3), 2, -1),
    ("pixels", "classification"): (Segmenter, (1, 3, 2), 3, 1),
    ("pixels", "regression"): (Segmenter, (1, 3, 2), 2, 1),
    ("scalar", "regression"): (Scalar, (3,), 1, -1),
}
every_case = pytest.mark.parametrize(("kind", "task"), list(CASES))


def exact(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.detach(), want.detach().to(got), rtol=tolerance, atol=tolerance)


def made(kind: str, task: str, n: int = 6) -> tuple[nn.Module, Tensor, Tensor, int]:
    """A network, inputs, labels and class_dim."""
    make, shape, outputs, class_dim = CASES[kind, task]
    torch.manual_seed(0)
    model = make(outputs).double().eval()
    x = torch.randn(n, *shape, dtype=torch.float64)
    f = model(x).detach()
    if task == "regression":
        return model, x, f + torch.randn_like(f), class_dim
    return model, x, torch.randint(outputs, f.movedim(class_dim, -1).shape[:-1]), class_dim


def names_of(model: nn.Module, subset: str) -> list[str]:
    return [k for k, _ in model.named_parameters() if subset == "all" or k.startswith("head")]


def fitted(model: nn.Module, task: str, data: list, subset: str, structure: str, class_dim: int, **kw) -> Laplace:
    kw = {"curvature": "ggn", "prior_precision": 0.7, **kw}
    return Laplace(model, task, subset, structure, class_dim=class_dim, **kw).fit(data)


def dense(la: Laplace) -> Tensor:
    h = la.H
    return h if isinstance(h, Tensor) and h.dim() == 2 else h.diag() if isinstance(h, Tensor) else h.to_matrix()


def rows_of(f: Tensor, class_dim: int) -> Tensor:
    return f.movedim(class_dim, -1) if f.dim() > 1 else f.unsqueeze(-1)


@every_case
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_curvature_evidence_and_predictions_are_the_oracles(kind, task, subset, structure):
    model, x, y, class_dim = made(kind, task)
    names = names_of(model, subset)
    of = None if kind == "scalar" else class_dim
    h, loglik, _ = oracle.at_positions(model, names, list(zip(x, y, strict=True)), task, of)
    h = h if structure == "full" else h.diag().diag()
    la = fitted(model, task, [(x[:4], y[:4]), (x[4:], y[4:])], subset, structure, class_dim)
    exact(dense(la), h, 1e-9)
    precision = h + 0.7 * torch.eye(len(h), dtype=h.dtype)
    mean = torch.cat([p.detach().flatten() for k, p in model.named_parameters() if k in names])
    ratio = torch.logdet(precision) - len(h) * math.log(0.7)
    exact(la.log_marginal_likelihood(), loglik - 0.5 * (0.7 * mean @ mean + ratio), 1e-9)
    jac = oracle.rows_jacobian(model, names, x, of)
    covariance = jac @ precision.inverse() @ jac.mT  # (N, *positions, C, C)
    f = model(x).detach()
    if task == "classification":
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        p = (rows_of(f, class_dim) / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
        assert la(x).shape == f.shape
        exact(la(x), p.movedim(-1, class_dim), 1e-9)
        return
    got, spread = la(x)
    exact(got, f, 1e-12)
    exact(spread, covariance.squeeze(-1).squeeze(-1) if kind == "scalar" else covariance, 1e-9)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    own = variance.squeeze(-1) if kind == "scalar" else variance.movedim(-1, class_dim)
    exact(la(x, diagonal_output=True)[1], own, 1e-9)
    flat = jac.flatten(0, -2)
    joint_mean, joint = la(x, joint=True)
    exact(joint_mean, rows_of(f, class_dim).flatten(), 1e-12)
    exact(joint, flat @ precision.inverse() @ flat.T, 1e-9)


@pytest.mark.parametrize(("kind", "task"), [case for case in CASES if case[0] != "scalar"])
def test_kron_of_all_weights_is_the_oracles(kind, task):
    model, x, y, class_dim = made(kind, task)
    flat = Flat(model, class_dim)
    rows = rows_of(model(x).detach(), class_dim)
    labels = rows_of(y, class_dim) if task == "regression" else y
    lam = [
        oracle.hessian_of_loss(task, f.flatten(0, -2), t.reshape(-1) if task == "classification" else t.flatten(0, -2))
        for f, t in zip(rows, labels, strict=True)
    ]
    lam = torch.stack([torch.block_diag(*blocks) for blocks in lam])
    blocks = oracle.kron_all(flat, [f"net.{k}" for k in names_of(model, "all")], x, lam)
    la = fitted(model, task, [(x, y)], "all", "kron", class_dim)
    exact(dense(la), torch.block_diag(*blocks.values()), 1e-9)


@every_case
def test_kron_of_a_head_is_the_oracles(kind, task):
    model, x, y, class_dim = made(kind, task)
    names = names_of(model, "last_layer")
    of = None if kind == "scalar" else class_dim
    _, _, b = oracle.at_positions(model, names, list(zip(x, y, strict=True)), task, of)
    seen: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    model(x)
    handle.remove()
    phi = (seen[0].movedim(1, -1) if kind == "pixels" else seen[0]).flatten(0, -2)
    la = fitted(model, task, [(x[:1], y[:1]), (x[1:], y[1:])], "last_layer", "kron", class_dim)
    exact(dense(la), torch.block_diag(torch.kron(b, phi.T @ phi / len(phi)), b), 1e-9)
    jac = oracle.rows_jacobian(model, names, x, of)
    covariance = jac @ la.posterior_covariance @ jac.mT
    if task == "regression":
        exact(la(x)[1], covariance.squeeze(-1).squeeze(-1) if kind == "scalar" else covariance, 1e-9)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_masked_positions_and_padding_count_for_nothing(task, structure, subset):
    model, x, y, _ = made("tags", task)
    lengths = [5, 3, 4, 1, 2, 3]
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    mask[0, 1] = False  # inside a sequence, too
    none = -100 if task == "classification" else torch.nan
    known = torch.where(mask if task == "classification" else mask.unsqueeze(-1), y, torch.as_tensor(none).to(y))
    examples = [(a[:n], b[:n]) for a, b, n in zip(x, known, lengths, strict=True)]
    h, loglik, _ = oracle.at_positions(model, names_of(model, subset), examples, task)
    h = h if structure == "full" else h.diag().diag()
    ragged = [(x[:2], y[:2], mask[:2]), (x[2:4, :4], y[2:4, :4], mask[2:4, :4]), (x[4:, :3], y[4:, :3], mask[4:, :3])]
    keyed = [{"x": a, "labels": b, "mask": m.long()} for a, b, m in ragged]
    ways = [[(x, y, mask)], ragged, keyed]
    if task == "classification":
        ways += [[(x, known)]]
    for data in ways:
        la = fitted(model, task, data, subset, structure, -1, dict_key_x="x")
        exact(dense(la), h, 1e-9)
        exact(la.log_likelihood, loglik, 1e-9)
        assert la.n_data == 6


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_kron_of_all_weights_does_not_see_padding(task, sharing):
    model, x, y, class_dim = made("tags", task)
    lengths = [5, 3, 4, 1, 2, 3]
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    f = model(x).detach()
    lam = [torch.block_diag(*oracle.hessian_of_loss(task, f[i, :n], y[i, :n])) for i, n in enumerate(lengths)]
    short = [x[i, :n] for i, n in enumerate(lengths)]
    names = [f"net.{k}" for k in names_of(model, "all")]
    blocks = oracle.kron_all(Flat(model, class_dim), names, short, lam, sharing)
    ragged = [(x[:2], y[:2], mask[:2]), (x[2:4, :4], y[2:4, :4], mask[2:4, :4]), (x[4:, :3], y[4:, :3], mask[4:, :3])]
    for data in ([(x, y, mask)], ragged):
        la = fitted(model, task, data, "all", "kron", -1, weight_sharing=sharing)
        exact(dense(la), torch.block_diag(*blocks.values()), 1e-9)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_examples_whose_label_is_ignored_count_for_nothing(structure, subset):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3).double(), torch.tensor([0, -100, 1, 2, -100, 1])
    la = fitted(model, Categorical(ignore_index=-100), [(x, y)], subset, structure, -1)
    seen = y >= 0
    exact(dense(la), dense(fitted(model, "classification", [(x[seen], y[seen])], subset, structure, -1)), 1e-10)


def test_small_batches_with_masks_run_together(gathering):
    model, x, y, _ = made("tags", "classification", n=24)
    mask = torch.rand(24, 5) > 0.4
    together = fitted(model, "classification", [(x, y, mask)], "all", "full", -1)
    apart = [(x[i : i + 2], y[i : i + 2], mask[i : i + 2]) for i in range(0, 24, 2)]
    exact(dense(fitted(model, "classification", apart, "all", "full", -1)), dense(together), 1e-9)


def test_a_batch_without_labels_that_count_changes_nothing():
    model, x, y, _ = made("tags", "classification")
    none = torch.full_like(y, -100)
    for subset in ("all", "last_layer"):
        la = fitted(model, "classification", [(x, none), (x, y)], subset, "kron", -1)
        exact(dense(la), dense(fitted(model, "classification", [(x, y)], subset, "kron", -1)), 1e-12)
        with pytest.raises(InputError, match="none of the 6 examples counts: all are ignored, masked"):
            fitted(model, "classification", [(x, none)], subset, "kron", -1)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_empirical_fisher_squares_an_examples_whole_score(subset):
    for kind, task in CASES:
        model, x, y, class_dim = made(kind, task)
        of = None if kind == "scalar" else class_dim
        h, *_ = oracle.at_positions(
            model, names_of(model, subset), list(zip(x, y, strict=True)), task, of, curvature="ef"
        )
        exact(dense(fitted(model, task, [(x, y)], subset, "full", class_dim, curvature="ef")), h, 1e-9)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("curvature", ["sketch", "mc"])
def test_estimates_are_unbiased_and_do_not_depend_on_padding(subset, curvature):
    model, x, y, _ = made("tags", "classification")
    mask = torch.arange(5) < torch.tensor([3, 2, 3, 1, 3, 2]).unsqueeze(1)
    exactly = dense(fitted(model, "classification", [(x, y, mask)], subset, "full", -1))

    def estimate(data: list, samples: int) -> Tensor:
        la = Laplace(model, "classification", subset, "full", curvature=curvature, curvature_samples=samples)
        return dense(la.fit(data, generator=torch.Generator().manual_seed(1)))

    many = estimate([(x, y, mask)], 4000)
    assert float((many - exactly).norm() / exactly.norm()) < 0.1
    cut = [(x[:4, :3], y[:4, :3], mask[:4, :3]), (x[4:], y[4:], mask[4:])]
    exact(estimate(cut, 2), estimate([(x, y, mask)], 2), 1e-9)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("kind", ["tags", "pixels"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_predictions_do_not_depend_on_memory(kind, structure, subset, monkeypatch):
    monkeypatch.setattr("laplace.backprop.head._LEAST", 4)
    model, x, y, class_dim = made(kind, "classification")
    roomy = fitted(model, "classification", [(x, y)], subset, structure, class_dim)
    tight = fitted(model, "classification", [(x, y)], subset, structure, class_dim)
    object.__setattr__(tight.runner.spec.budget, "bytes", 3000)
    runs = tight.runner.runs(tight.posterior.fit, Inputs(x, {}, tight.runner.spec.keys))
    assert sum(1 for _ in runs) > (len(x) if subset == "all" else 2)  # positions are cut, too
    for link in ("probit", "mc", "delta"):
        draws = {"generator": torch.Generator().manual_seed(0)} if link == "mc" else {}
        again = {"generator": torch.Generator().manual_seed(0)} if link == "mc" else {}
        exact(tight(x, link_approx=link, **draws), roomy(x, link_approx=link, **again), 1e-9)


@every_case
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_everything_that_is_predicted_has_the_networks_shape(kind, task, subset):
    model, x, y, class_dim = made(kind, task)
    la = fitted(model, task, [(x, y)], subset, "kron", class_dim)
    f = model(x)
    p = la.predict([(x[:4], y[:4]), (x[4:], y[4:])], progress_bar=False)
    assert p.mean.shape == f.shape
    assert len(p) == len(x)
    assert p.quantile(0.3).shape == f.shape
    assert p.quantile(torch.tensor([0.3, 0.6])).shape == (2, *f.shape)
    assert all(end.shape == f.shape for end in p.interval())
    each = f.shape if task == "regression" else y.shape
    assert p.epistemic.shape == p.aleatoric.shape == p.total.shape == each
    assert p.numpy()["mean"].shape == f.shape
    assert p.distribution.batch_shape + p.distribution.event_shape == (
        rows_of(f, class_dim).shape if kind == "tags" and task == "regression" else p.distribution.sample().shape
    )
    exact(p.mean, la(x)[0] if task == "regression" else la(x, link_approx="one_vs_rest"), 1e-9)
    draws = la.functional_samples(x, n_samples=7)
    assert draws.shape == la.predictive_samples(x, "nn", n_samples=7).shape == (7, *f.shape)
    assert la.functional_samples(x, n_samples=3, diagonal_output=True).shape == (3, *f.shape)
    sampled = la(x, pred_type="nn", n_samples=5)
    assert (sampled[1] if task == "regression" else sampled).shape == f.shape
    if task == "classification":
        over = class_dim if class_dim < 0 else class_dim + 1
        exact(la.predictive_samples(x, n_samples=4).sum(over), torch.ones(4, *y.shape), 1e-9)
    assert la.predict(x, "nn", n_samples=5).mean.shape == f.shape


def test_draws_of_all_positions_come_from_one_draw_of_the_weights():
    model, x, y, class_dim = made("tags", "regression", n=2)
    la = fitted(model, "regression", [(x, y)], "last_layer", "full", class_dim)
    mean, covariance = la(x, joint=True)
    draws = la.functional_samples(x, n_samples=20_000, generator=torch.Generator().manual_seed(0)).flatten(1)
    assert float((draws.T.cov() - covariance).norm() / covariance.norm()) < 0.05
    assert float((draws.mean(0) - mean).abs().max()) < 0.1


def test_the_exact_ggn_gives_way_to_a_sketch_where_positions_are_many(monkeypatch):
    monkeypatch.setattr("laplace.inference.runner.MOST_VECTORS", 14)
    model, x, y, _ = made("tags", "classification")  # 5 positions x 3 classes
    la = Laplace(model, "classification", "all", "diag")
    with pytest.warns(LaplaceWarning, match=r"15|3 outputs at 5 positions.*curvature='ggn'"):
        la.fit([(x, y)])
    assert la.curvature == "sketch"
    assert "curvature sketch" in repr(la)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.fit([(x, y)])  # said once
        assert Laplace(model, "classification", "all", "diag", curvature="ggn").fit([(x, y)]).curvature == "ggn"
        assert Laplace(model, "classification", "last_layer", "diag").fit([(x, y)]).curvature == "ggn"
        assert Laplace(model, "classification", "all", "diag").fit([(x[:, :2], y[:, :2])]).curvature == "ggn"
    other = Laplace(model, "classification", "all", "diag")
    other.load_state_dict(la.state_dict())
    assert other.curvature == "sketch"
    exact(other(x), la(x), 1e-12)


def test_scalars_at_positions_need_no_class_dimension():
    torch.manual_seed(0)
    model = Tagger(1).double()

    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).squeeze(-1)

    x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5).double()
    for subset in ("all", "last_layer"):
        plain = fitted(model, "regression", [(x, y.unsqueeze(-1))], subset, "full", -1)
        la = fitted(Squeezed(), "regression", [(x, y)], subset, "full", None)
        exact(dense(la), dense(plain), 1e-10)
        assert la(x)[0].shape == la(x)[1].shape == (4, 5)
        exact(la(x)[1], plain(x)[1][..., 0, 0], 1e-10)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_hugging_face_outputs_and_masks_work(subset):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger(3).double()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
            return Output(self.net(nn.functional.one_hot(input_ids, 3).double()))

    torch.manual_seed(0)
    model, ids = Model(), torch.randint(3, (6, 5))
    y = torch.randint(3, (6, 5))
    y[:, 4] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": y}
    la = fitted(model, "classification", [batch], subset, "kron", -1)
    assert la({"input_ids": ids, "attention_mask": torch.ones_like(ids)}).shape == (6, 5, 3)
    plain = fitted(model.net, "classification", [(nn.functional.one_hot(ids, 3).double(), y)], subset, "kron", -1)
    exact(dense(la), dense(plain), 1e-12)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_tuning_counts_only_what_is_not_masked(subset):
    model, x, y, _ = made("tags", "classification")
    mask = torch.arange(5) < torch.tensor([3, 2, 3, 3, 3, 2]).unsqueeze(1)
    la = fitted(model, "classification", [(x, y, mask)], subset, "kron", -1)
    loaders = {
        "masked": [(x, y, mask)],
        "cut": [(x[:, :3], y[:, :3], mask[:, :3])],
        "ignored": [(x[:4], y[:4].masked_fill(~mask[:4], -100)), (x[4:], y[4:].masked_fill(~mask[4:], -100))],
        "all": [(x, y)],
    }
    scores = {}
    for name, loader in loaders.items():
        tuned = la.tune("prior_precision", method="validation", val_loader=loader)
        scores[name] = torch.tensor([point.score for point in tuned.points])
    exact(scores["cut"], scores["masked"], 1e-9)
    exact(scores["ignored"], scores["masked"], 1e-9)
    grid = slice(21)  # the points after it depend on their scores
    assert float((scores["all"][grid] - scores["masked"][grid]).abs().max()) > 1e-3


def test_the_exact_hessian_of_masked_positions():
    model, x, y, _ = made("tags", "classification")
    mask = torch.arange(5) < torch.tensor([3, 2, 3, 3, 3, 2]).unsqueeze(1)
    la = fitted(model, "classification", [(x, y, mask)], "all", "full", -1, curvature="hessian", prior_precision=100.0)
    names = names_of(model, "all")
    parameters = dict(model.named_parameters())
    shapes = [parameters[k].shape for k in names]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        moved = {k: p.reshape(s) for k, p, s in zip(names, parts, shapes, strict=True)}
        f = torch.func.functional_call(model, moved, (x,))
        return -f.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)[mask].sum()

    mean = torch.cat([parameters[k].detach().flatten() for k in names])
    exact(dense(la), torch.autograd.functional.hessian(loss, mean), 1e-9)


def test_a_mask_that_the_network_reads_is_its_own():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger(3).double()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.net(x * mask)

    model, (_, x, y, _) = Masked(), made("tags", "classification")
    weights = torch.rand(6, 5, 1).double()
    la = fitted(model, "classification", [{"x": x, "mask": weights, "labels": y}], "all", "diag", -1, dict_key_x="x")
    exact(dense(la), dense(fitted(model.net, "classification", [(x * weights, y)], "all", "diag", -1)), 1e-12)
    assert la({"x": x, "mask": weights}).shape == (6, 5, 3)


def test_gradients_reach_the_inputs():
    for kind, task in CASES:
        model, x, y, class_dim = made(kind, task, n=3)
        for subset in ("all", "last_layer"):
            la = fitted(model, task, [(x, y)], subset, "kron", class_dim, enable_backprop=True)

            def spread(x: Tensor, la: Laplace = la, task: str = task) -> Tensor:
                return la(x)[1] if task == "regression" else la(x)

            assert torch.autograd.gradcheck(spread, (x.clone().requires_grad_(),), fast_mode=True)


def test_training_on_the_evidence_counts_what_is_not_masked():
    def trained(mask: Tensor, length: int) -> Tensor:
        model, x, y, _ = made("tags", "classification")
        data = [(x[:, :length], y[:, :length], mask[:, :length])]
        la, *_ = marglik_training(
            model,
            data,
            "classification",
            "diag",
            n_epochs=2,
            n_epochs_burnin=0,
            marglik_frequency=1,
            progress_bar=False,
        )
        return la.mean

    mask = torch.arange(5) < torch.tensor([3, 2, 3, 1, 3, 2]).unsqueeze(1)
    exact(trained(mask, 5), trained(mask, 3), 1e-9)
    assert float((trained(mask, 5) - trained(torch.ones_like(mask), 5)).abs().max()) > 1e-6


def test_a_wide_output_factor_is_kept_as_its_diagonal(monkeypatch):
    monkeypatch.setattr("laplace.structures.kron.WIDE", 2)
    model, x, y, _ = made("tags", "classification")
    for subset in ("last_layer", "all"):
        with pytest.warns(LaplaceWarning, match=r"diagonal of the output factor.*head.weight \(3 outputs\)"):
            la = fitted(model, "classification", [(x, y)], subset, "kron", -1)
        assert "kron diagonal 3 x 4" in repr(la.coverage())
    _, _, b = oracle.at_positions(model, names_of(model, "last_layer"), list(zip(x, y, strict=True)), "classification")
    la = fitted(model, "classification", [(x, y)], "last_layer", "kron", -1)
    phi = []
    handle = model.head.register_forward_pre_hook(lambda m, args: phi.append(args[0].detach().flatten(0, 1)))
    model(x)
    handle.remove()
    a, b = phi[0].T @ phi[0] / len(phi[0]), b.diag().diag()
    h = torch.block_diag(torch.kron(b, a), b)
    exact(dense(la), h, 1e-9)
    sigma = (h + 0.7 * torch.eye(len(h)).double()).inverse()
    exact(la.posterior_covariance, sigma, 1e-9)
    exact(la.posterior_variance, sigma.diagonal(), 1e-9)
    jac = oracle.rows_jacobian(model, names_of(model, "last_layer"), x)
    variance = (jac @ sigma @ jac.mT).diagonal(dim1=-2, dim2=-1)
    exact(la(x), (model(x) / (1 + math.pi / 8 * variance).sqrt()).softmax(-1).detach(), 1e-9)
    other = Laplace(model, "classification", "last_layer", "kron", curvature="ggn")
    other.load_state_dict(la.state_dict())
    exact(other(x), la(x), 1e-12)
    assert la.sample(3).shape == (3, len(h))


def test_bad_shapes_are_said():
    model, x, y, _ = made("tags", "classification")
    la = Laplace(model, "classification", "all", "diag", curvature="ggn")
    for labels, says in [
        (y[:, :4], r"labels have shape \(6, 4\); outputs of shape \(6, 5, 3\) need \(6, 5\)"),
        (y.flatten(), r"labels have shape \(30,\)"),
        (y + 3, r"class labels lie in"),
    ]:
        with pytest.raises(InputError, match=says):
            la.fit([(x, labels)])
    for given, says in [
        ({"mask": torch.ones(6)}, r"mask has shape \(6,\); it must be \(6, 5\)"),
        ({"mask": 2 * torch.ones(6, 5)}, "the mask must hold true and false.*`weights`"),
        ({"mask": {"a": 1}}, "the mask of batch 0 is a dict"),
        ({"weights": torch.ones(6, 4)}, r"weights have shape \(6, 4\).*need \(6,\).*or \(6, 5\)"),
        ({"weights": -torch.ones(6, 5)}, "the weights hold negative"),
    ]:
        with pytest.raises(InputError, match=says):
            Laplace(model, "classification", "all", dict_key_x="x").fit([{"x": x, "labels": y, **given}])
    with pytest.raises(OptionError, match="class_dim=0"):
        Laplace(model, "classification", class_dim=0)
    with pytest.raises(InputError, match=r"\(6, 5, 3\).*no dimension class_dim=3"):
        Laplace(model, "classification", "all", class_dim=3, curvature="ggn").fit([(x, y)])
    with pytest.raises(ModelError, match="class_dim must name the dimension that the last layer makes"):
        Laplace(model, "regression", class_dim=1).fit([(x, model(x).detach())])
    with pytest.raises(UnsupportedError, match="'gp' keeps whole examples"):
        Laplace(model, "classification", "all", "gp", curvature="ggn").fit([(x, y)])
    la.fit([(x, y)])
    with pytest.raises(InputError, match="predict batch by batch"):
        la.predict([(x[:3], y[:3]), (x[3:, :4], y[3:, :4])], progress_bar=False)


def test_what_is_no_tensor_is_said():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger(2).double()

        def forward(self, x: Tensor) -> list[str]:
            return ["no"] * len(x)

    with pytest.raises(ModelError, match="the network returned a list"):
        Laplace(Words(), "classification", "all", "diag").fit(
            [(torch.randn(2, 5, 3).double(), torch.zeros(2, 5).long())]
        )

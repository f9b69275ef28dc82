"""What docs/gotchas.md says was measured: `python experiments/gotchas.py` prints it. It needs scikit-learn."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from laplace import Laplace
from laplace.evaluation import accuracy, confidence, interval_coverage, nll

Batches = list[tuple[Tensor, Tensor]]


def main() -> None:
    """Each in turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    train, test = cut(x[:1200], y[:1200]), (x[1200:], y[1200:])
    model = trained(nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10)), train, 150, lr=3e-3)
    softmax_twice(model, train, test)
    precisions(model, train, test)
    evidence_and_validation(model, train, test)
    draws_of_networks(model, train, test)
    augmented(model, train, test)
    noise()
    weight_decay()
    shifts()


def cut(x: Tensor, y: Tensor) -> Batches:
    return list(zip(x.split(100), y.split(100), strict=True))


def trained(model: nn.Module, train: Batches, epochs: int, **options: float) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), **options)
    for _ in range(epochs):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


def scores(p: Tensor, y: Tensor) -> str:
    return f"accuracy {accuracy(p, y):.3f}, confidence {confidence(p):.3f}, NLL {nll(p, y):.3f}"


def of_network(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).detach().softmax(-1)


def softmax_twice(model: nn.Module, train: Batches, test: tuple[Tensor, Tensor]) -> None:
    print("a softmax too many\n  the network:", scores(of_network(model, test[0]), test[1]))
    la = Laplace(nn.Sequential(model, nn.Softmax(-1)), "classification", "all").fit(train)
    print("  all weights:", scores(la(test[0]), test[1]))


def precisions(model: nn.Module, train: Batches, test: tuple[Tensor, Tensor]) -> None:
    print("prior precisions, last layer")
    la = Laplace(model, "classification").fit(train)
    for la.prior_precision in (1e-4, 1e-2, 1.0, 1e2, 1e6):
        print(f"  {float(la.prior_precision):g}:", scores(la(test[0]), test[1]))
    la = Laplace(model, "classification", "all").fit(train)
    for when in ("with eigenvalues", "again"):
        start = time.process_time()
        la.tune(method="evidence")
        print(f"  tuning all weights, {when}: {1e3 * (time.process_time() - start):.0f} ms")


def evidence_and_validation(model: nn.Module, train: Batches, test: tuple[Tensor, Tensor]) -> None:
    held_out, (x, y) = cut(test[0][:300], test[1][:300]), (test[0][300:], test[1][300:])
    print("evidence and validation, on the other test images\n  the network:", scores(of_network(model, x), y))
    for weights in ("last_layer", "all"):
        la = Laplace(model, "classification", weights).fit(train)
        la.tune(method="evidence")
        print(f"  {weights}, evidence, {float(la.prior_precision):.3g}:", scores(la(x), y))
        la.tune(method="validation", val_loader=held_out)
        print(f"  {weights}, validation, {float(la.prior_precision):.3g}:", scores(la(x), y))


def draws_of_networks(model: nn.Module, train: Batches, test: tuple[Tensor, Tensor]) -> None:
    print("all weights, prior by evidence")
    la = Laplace(model, "classification", "all").fit(train)
    la.tune(method="evidence")
    for kind in ("glm", "nn"):
        p = la(test[0], pred_type=kind, n_samples=50, generator=torch.Generator().manual_seed(0))
        print(f"  {kind}:", scores(p, test[1]))


class Augmented:
    """The data with other noise each time that it is read."""

    def __init__(self, train: Batches, times: int = 1) -> None:
        self.train, self.times = train, times

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.times):
            yield from ((x + 0.1 * torch.randn_like(x), y) for x, y in self.train)


def augmented(model: nn.Module, train: Batches, test: tuple[Tensor, Tensor]) -> None:
    print("augmented data, last layer")
    for name, data in {"none": train, "ten noisy copies": Augmented(train, 10)}.items():
        la = Laplace(model, "classification").fit(data)
        epistemic = la.predict(test[0], generator=torch.Generator().manual_seed(0)).epistemic
        print(f"  {name}: {la.n_data} examples, mean epistemic uncertainty {float(epistemic.mean()):.3f}")
    for structure in ("ekfac", "inf", "lowrank"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Laplace(model, "classification", hessian_structure=structure).fit(Augmented(train))
        print(f"  {structure}, other noise in each run:", *[w.message for w in said] or ["nothing said"])


def noise() -> None:
    print("noise of a regression")

    def drawn(n: int) -> tuple[Tensor, Tensor]:
        x = 6 * torch.rand(n, 1) - 3
        return x, (x.sin() + 0.1 * torch.randn(n, 1)) / 0.7

    torch.manual_seed(0)
    (x, y), (new, there) = drawn(200), drawn(1000)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    la = Laplace(model, "regression").fit([(x, y)])
    tune: dict[str, Callable[[], object]] = {
        "default": tuple,
        "tuned": lambda: la.tune("prior_precision", "sigma_noise", method="evidence"),
    }
    for name, do in tune.items():
        do()
        low, high = la.predict(new).interval(0.95)
        width, share = float((high - low).mean()), interval_coverage(low, high, there)
        print(f"  {name}: sigma {float(la.sigma_noise):.3f}, 95 % intervals cover {share:.3f}, {width:.2f} wide")


def weight_decay() -> None:
    print("gradient of the log joint at N lambda, relative to the likelihood's")
    torch.manual_seed(0)
    x = torch.randn(200, 3, dtype=torch.float64)
    y = (x.sum(1) + torch.randn(200) > 0).long()
    for kind, lr in ((torch.optim.SGD, 0.5), (torch.optim.Adam, 1e-2), (torch.optim.AdamW, 1e-2)):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).double()
        optimizer = kind(model.parameters(), lr=lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4000])
        for _ in range(6000):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
        slopes = torch.autograd.grad(cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
        theta, slope = (torch.cat([t.detach().flatten() for t in ts]) for ts in (model.parameters(), slopes))
        print(f"  {kind.__name__}: {float((slope + 200 * 0.01 * theta).norm() / slope.norm()):.1e}")


def shifts() -> None:
    print("probit and mc, prior by evidence: mean confidences")
    for classes in (2, 10, 100):
        torch.manual_seed(0)
        centres = 1.2 * torch.randn(classes, 20)
        y, there = torch.randint(classes, (3000,)), torch.randint(classes, (1000,))
        x, new = centres[y] + torch.randn(3000, 20), centres[there] + torch.randn(1000, 20)
        network = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, classes))
        model = trained(network, cut(x, y), 40, lr=1e-2, weight_decay=1 / 3000)
        for weights in ("last_layer", "all"):
            la = Laplace(model, "classification", weights).fit(cut(x, y))
            la.tune(method="evidence")
            generator = torch.Generator().manual_seed(0)
            mc = la.predict(new, link_approx="mc", n_samples=1000, generator=generator)
            share = (mc.outputs.covariance.mean((1, 2)) / mc.outputs.variance.mean(1)).mean()
            found = (of_network(model, new), la(new), mc.mean)
            print(
                f"  {classes}, {weights}: network, probit, mc", *(f"{confidence(p):.3f}" for p in found), f"{share:.0%}"
            )


if __name__ == "__main__":
    main()

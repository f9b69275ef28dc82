"""Several threads, several posteriors, several processes: none disturbs another, and nothing is left behind."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from laplace import Laplace
from laplace.inference import values
from networks import cut, make

pytestmark = pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning")


def in_threads(tasks):
    """Run them at the same time; what they raised, if anything."""
    raised, barrier = [], threading.Barrier(len(tasks))

    def run(task):
        try:
            barrier.wait()
            task()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["full", "kron", "lowrank", "gp"])
def test_threads_that_predict_with_one_posterior_get_their_own_answers(structure, subset):
    model, x, y = make("mlp", "classification", n=40)
    fitted, shared = (Laplace(model, "classification", subset, structure).fit(cut(x, y, 9)) for _ in range(2))
    parts = [x[i : i + 3 + i % 4] for i in range(0, 32, 4)]
    expected = [fitted(part) for part in parts]

    def predicting(i):
        def task():
            for _ in range(6):  # the first of them in all threads at once, before anything is factorised
                torch.testing.assert_close(shared(parts[i]), expected[i])

        return task

    assert not in_threads([predicting(i) for i in range(len(parts))])


def test_a_posterior_is_that_of_its_own_values_if_another_is_made_meanwhile(monkeypatch):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", prior_precision=2.0).fit(cut(x, y, 9))
    noticed = values._notice_clipped

    def another_thread(*given):
        monkeypatch.setattr(values, "_notice_clipped", noticed)
        la.prior_precision = 5.0
        assert float(la.posterior.prior.precision) == 5

    monkeypatch.setattr(values, "_notice_clipped", another_thread)
    assert float(la.posterior.prior.precision) == 2
    assert float(la.posterior.prior.precision) == 5


def test_threads_may_tune_and_predict_two_posteriors_of_one_network():
    model, x, y = make("mlp", "classification", n=30)
    kinds = {"kron": "last_layer", "diag": "all", "full": "all"}

    def made(structure, precision):
        la = Laplace(model, "classification", kinds[structure], structure, prior_precision=precision)
        return la.fit(cut(x, y, 7))

    expected = {(s, d): (made(s, d)(x), made(s, d).log_marginal_likelihood()) for s in kinds for d in (0.1, 10.0)}

    def using(structure, precision):
        def task():
            la = made(structure, 1.0)
            for _ in range(4):
                la.prior_precision = precision
                p, evidence = expected[structure, precision]
                torch.testing.assert_close(la(x), p)
                torch.testing.assert_close(la.log_marginal_likelihood(), evidence)
                la.prior_precision = 1.0

        return task

    assert not in_threads([using(*key) for key in expected])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_fitting_one_posterior_leaves_another_of_the_same_network_alone():
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", "all").fit(cut(x, y, 6))
    p, evidence = la(x), la.log_marginal_likelihood()
    Laplace(model, "classification", "all", "diag", prior_precision=9.0).fit(cut(x[:7], y[:7], 3))
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    torch.testing.assert_close(la(x), p)


def test_loaders_with_workers_give_the_same_posterior(tmp_path):
    model, x, y = make("mlp", "classification")
    loader = DataLoader(TensorDataset(x, y), 6, num_workers=2)
    expected = Laplace(model, "classification", hessian_structure="ekfac").fit(cut(x, y, 6))
    la = Laplace(model, "classification", hessian_structure="ekfac").fit(loader, checkpoint=tmp_path / "fit", every=1)
    torch.testing.assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood())
    torch.testing.assert_close(la.predict(loader).mean, expected.predict(x).mean)


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "subset"), [("kron", "last_layer"), ("kron", "all"), ("gp", "all")])
def test_a_thousand_fits_and_predictions_leave_nothing_behind(structure, subset):
    model, x, y = make("mlp", "classification")

    def use(times):
        for _ in range(times):
            Laplace(model, "classification", subset, structure).fit([(x, y)])(x)
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        return len(tensors), sum(t.nbytes for t in tensors), len(gc.get_objects())

    first = use(20)
    last = use(1000)
    assert last[0] <= first[0] + 5
    assert last[1] <= first[1] + 10_000
    assert last[2] <= first[2] + 2_000


@pytest.mark.slow
def test_resident_memory_does_not_grow_with_fits():
    model, x, y = make("mlp", "classification", n=400)
    la = Laplace(model, "classification", "all")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def use(times):
        for _ in range(times):
            la.fit([(x, y)])
            la(x)
        return resident()

    first = use(200)
    assert use(800) < first + 20 * 2**20

"""`laplace.plan` says what each structure would take, without fitting anything."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import laplace
from extending.test_structure import Floored
from laplace import Laplace
from laplace.errors import InputError, LaplaceWarning, OptionError, UnsupportedError
from laplace.priors import CorrelatedGaussian, from_log_density
from laplace.structures import STRUCTURES, Kron
from networks import make


def network(hidden: int = 30) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def batch(n: int = 8):
    torch.manual_seed(1)
    return torch.randn(n, 20), torch.arange(n) % 3


class Stream(IterableDataset):
    """Examples that nobody has counted."""

    def __init__(self, x, y):
        self.pairs = list(zip(x, y, strict=True))

    def __iter__(self):
        return iter(self.pairs)


def test_it_is_a_table_of_all_structures_and_prints_nothing_by_itself(capsys):
    preview = laplace.plan(network(), batch(), "classification", "all")
    assert capsys.readouterr().out == ""
    printed = repr(preview)
    assert str(preview) == printed
    assert "723 uncertain weights in 4 tensors, 3 outputs" in printed
    assert "One epoch: a forward and a backward pass over this data." in printed
    for name in [*STRUCTURES, "gp", "gp, nystrom", "gp, variational"]:
        assert f"\n{name} " in printed
    assert [option.structure for option in preview] == [*STRUCTURES, "gp", "gp, nystrom", "gp, variational"]
    assert "peak memory" in printed
    assert all(option.fits for option in preview)
    assert max(map(len, printed.splitlines())) <= 80


def test_it_takes_the_weights_that_laplace_takes():
    assert "93 uncertain weights in 2 tensors" in str(laplace.plan(network(), batch(), "classification"))


def test_it_counts_the_data_of_a_loader():
    x, y = batch(8)
    dataset = TensorDataset(x, y)
    assert laplace.plan(network(), DataLoader(dataset, batch_size=3), "classification").n_data == 8
    assert laplace.plan(network(), dataset, "classification").n_data == 8
    assert laplace.plan(network(), [(x, y), (x[:3], y[:3])], "classification").n_data == 11
    half = DataLoader(dataset, batch_size=3, sampler=SubsetRandomSampler(range(4)))
    assert laplace.plan(network(), half, "classification").n_data == 4
    assert laplace.plan(network(), half, "classification", n_data=77).n_data == 77
    stream = DataLoader(Stream(x, y), batch_size=3)
    for unknown in (stream, (x, y)):
        preview = laplace.plan(network(), unknown, "classification")
        assert preview.n_data == 10_000
        assert "10,000 examples (assumed; see n_data=)" in str(preview)
    assert "assumed" not in str(laplace.plan(network(), half, "classification"))


def test_it_recommends_what_is_closest_to_the_whole_curvature_and_says_why():
    small = laplace.plan(network(), batch(), "classification")
    assert small.recommended == "full"
    assert "Recommended: full, which leaves nothing out. The fit costs about" in str(small)
    large = laplace.plan(network(1000), batch(), "classification", "all", n_data=10**6, memory_budget=2 * 10**9)
    assert large.recommended == "kron"
    assert large["kron"].epochs <= 100 < large["ekfac"].epochs
    assert "(full, block cannot be used; ekfac would cost more than 100 epochs)" in large.why
    assert "seconds" not in large.why
    brief = laplace.plan(network(), batch(), "classification", "all", n_data=100)  # of short epochs
    assert brief[str(brief.recommended)].epochs > 100
    assert "epochs, which take seconds here, and" in brief.why
    exact = laplace.plan(network(), batch(), "classification", "all", curvature="hessian", n_data=10**9)
    assert exact.recommended == "diag"
    assert "the cheapest" in exact.why
    none = laplace.plan(network(), batch(), "classification", "all", memory_budget=10)
    assert none.recommended is None
    assert "Recommended: nothing; none of full, block, ekfac, kron, diag fits" in str(none)


def test_it_estimates_the_curvature_that_fit_would_choose():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 60))
    tokens = torch.arange(40).reshape(2, 20) % 9
    with pytest.warns(LaplaceWarning, match="curvature='sketch'"):
        assert "curvature 'sketch', 1 vector per" in str(laplace.plan(model, (tokens, tokens), "classification", "all"))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "block"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_memory_is_what_a_fit_keeps_and_its_work_space(structure, subset):
    model = network(60)
    preview = laplace.plan(model, batch(), "classification", subset)
    kept = Laplace(model, "classification", subset, structure).fit([batch()]).coverage().bytes
    assert kept <= preview[structure].bytes <= 6 * kept


def test_what_does_not_fit_is_said():
    preview = laplace.plan(network(3000), batch(), "classification", "all", memory_budget=2 * 10**9)
    assert not preview["full"].fits
    assert preview["kron"].fits
    assert "full" in str(preview)
    assert "no: too large" in str(preview)


def test_costs_grow_with_what_is_kept():
    exact = laplace.plan(network(), batch(), "classification", "all", n_data=10**6)
    sketch = laplace.plan(network(), batch(), "classification", "all", curvature="sketch", n_data=10**6)
    assert exact["diag"].epochs < exact["kron"].epochs < exact["full"].epochs
    assert all(sketch[name].epochs < exact[name].epochs for name in ("diag", "kron", "full"))
    few = laplace.plan(network(), batch(), "classification", "all", n_data=10)
    assert few["full"].epochs > exact["full"].epochs  # the decomposition is shared by fewer examples


def test_a_structure_without_a_form_says_why():
    preview = laplace.plan(network(), batch(), "classification", "all", curvature="hessian")
    assert "'kron' cannot hold an exact Hessian" in str(preview)
    assert not preview["kron"].fits
    assert preview["full"].fits


def test_nothing_is_touched():
    model = network().train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    laplace.plan(model, batch(), "classification", "all")
    assert model.training
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())


def test_bad_input_is_refused():
    with pytest.raises(OptionError, match="n_data=0"):
        laplace.plan(network(), batch(), "classification", "all", n_data=0)
    with pytest.raises(InputError, match="class labels lie in"):
        laplace.plan(network(), (batch()[0], batch()[1] + 7), "classification", "all")
    with pytest.raises(InputError, match="batch 0"):
        laplace.plan(network(), batch()[0], "classification", "all")
    with pytest.raises(OptionError, match=r"structure='none' is not an option. Valid: .*'kron'.*'gp, nystrom'"):
        laplace.plan(network(), batch(), "classification", "all")["none"]
    with pytest.raises(InputError, match="gave no batch"):
        laplace.plan(network(), DataLoader([]), "classification", "all")


def test_a_loader_serves_as_well_as_its_first_batch():
    x, y = batch()
    expected = laplace.plan(network(), (x, y), "classification", "all", n_data=50).options
    for loader in (DataLoader(TensorDataset(x, y), batch_size=4), [(x, y), (x, y)]):
        assert laplace.plan(network(), loader, "classification", "all", n_data=50).options == expected


def test_points_are_no_more_than_the_data_and_alone_send_vectors_back():
    few = laplace.plan(network(), batch(), "classification", "all", n_data=20)
    many = laplace.plan(network(), batch(), "classification", "all", n_data=10**8)
    assert few["gp"].bytes < many["gp"].bytes / 100
    assert few["gp, nystrom"].bytes < many["gp, nystrom"].bytes / 10
    assert many["gp"].epochs == pytest.approx(1 / 3, rel=0.02)  # a forward pass of a training step's three
    assert many["gp"].epochs < many["diag"].epochs < many["gp, nystrom"].epochs


def test_few_weights_take_one_run_of_products():
    tiny = laplace.plan(network(5), batch(), "classification", "all", n_data=10**6)  # 123 weights
    assert tiny["lowrank"].epochs < 8 * tiny["full"].epochs
    larger = laplace.plan(network(30), batch(), "classification", "all", n_data=10**6)  # found by Krylov iteration
    assert tiny["lowrank"].epochs / tiny["diag"].epochs < larger["lowrank"].epochs / larger["diag"].epochs * 5


def test_options_of_laplace_are_those_of_the_plan():
    indices = torch.tensor([0, 5, 600])
    preview = laplace.plan(network(), batch(), "classification", "subnetwork", subnetwork_indices=indices)
    assert "3 uncertain weights" in str(preview)
    assert preview["full"].fits
    assert "needs whole tensors" in str(preview)
    small, large = (laplace.plan(network(), batch(), "classification", "all", rank=rank) for rank in (5, 50))
    assert small["lowrank"].bytes < large["lowrank"].bytes
    assert small["kron"].bytes < large["kron"].bytes  # sketches of that rank in place of wide factors
    assert small["diag"].bytes == large["diag"].bytes


def test_ranks_share_examples_and_decompositions_of_blocks():
    model, x, y = make("mlp", "classification")
    one, four = (laplace.plan(model, (x, y), "classification", "all", n_data=1000, ranks=ranks) for ranks in (1, 4))
    for option in one:
        if option.structure != "matrix_free":  # which several ranks cannot fit
            assert four[option.structure].bytes == option.bytes
    for name in ("kron", "diag", "ekfac"):
        assert four[name].epochs == pytest.approx(one[name].epochs / 4)
    assert one["full"].epochs / 4 < four["full"].epochs < one["full"].epochs  # every rank decomposes the whole matrix
    assert "250 on each of 4 ranks" in repr(four)
    with pytest.raises(OptionError, match="ranks=0"):
        laplace.plan(model, (x, y), "classification", ranks=0)


def test_ranks_that_keep_their_own_factors_need_less_memory():
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)], nn.Linear(16, 3))
    batch = torch.randn(5, 16), torch.arange(5) % 3
    whole, spread = (
        laplace.plan(model, batch, "classification", "all", ranks=4, shard_factors=shard) for shard in (False, True)
    )
    for name in ("kron", "diag", "ekfac"):  # two layers of eight, and another one on its way
        assert 0.3 < spread[name].bytes / whole[name].bytes < 0.45
        assert spread[name].epochs == whole[name].epochs
    assert "shard_factors=True keeps the factors of each layer on one rank" in spread["full"].reason


def test_structures_with_options_and_those_from_outside_get_a_row():
    given = [Floored(0.5), Floored(), Kron(damping=True), Kron()]
    preview = laplace.plan(network(), batch(), "classification", "all", hessian_structure=given)
    assert [option.structure for option in preview][-3:] == ["Floored, floor=0.5", "Floored", "kron, damping=True"]
    one = laplace.plan(network(), batch(), "classification", "all", hessian_structure=Floored())["Floored"]
    assert one == preview["Floored"]
    assert one.fits
    assert one.bytes == preview["diag"].bytes
    refused = laplace.plan(network(), batch(), "classification", hessian_structure=Floored(), prior=_coupled())
    assert not refused["Floored"].fits
    assert "a dense precision of all weights together" in refused["Floored"].reason
    for wrong in ("kron", Floored, None, [Kron(), 3]):
        with pytest.raises(OptionError, match=r"must be a structure, or several, as in hessian_structure=\[Mine"):
            laplace.plan(network(), batch(), "classification", hessian_structure=wrong)


def test_it_says_which_structures_do_not_accept_the_prior_and_why_once():
    prior = CorrelatedGaussian({"2.bias": torch.eye(3)})
    preview = laplace.plan(network(), batch(), "classification", prior=prior)
    usable = [option.structure for option in preview if option.fits]
    for option in preview:  # the same answer as that of a fit
        kind, _, approximation = option.structure.partition(", ")
        options = {"functional_approximation": approximation} if approximation else {}
        la = Laplace(network(), "classification", "last_layer", kind, prior=prior, **options)
        if option.structure in usable:
            assert la.fit([batch()]).is_fitted
        else:
            with pytest.raises(UnsupportedError, match="does not accept"):
                la.fit([batch()])
    assert usable == ["full", "kron", "block"]
    assert str(preview).count("does not accept") == 1
    assert "\nNot diag; ekfac; inf; lowrank; matrix_free; gp; gp, nystrom; gp, variational:" in str(preview)
    assert max(map(len, str(preview).splitlines())) <= 80


def _coupled():
    return from_log_density(lambda w: -(w.sum() ** 2) - w.square().sum())


def test_large_numbers_are_written_out():
    large = laplace.plan(network(400), batch(), "classification", "all", n_data=64, memory_budget=10**12)
    assert "e+" not in str(large)
    assert re.search(r"\nfull .* [\d,]+,\d{3}  yes", str(large))
    assert re.search(r"would cost more than [\d.,]+ epochs, a few seconds\)", large.why)

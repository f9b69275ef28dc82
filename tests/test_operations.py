"""Known layers are run by their operations: the network's own numbers, whatever is changed, hooked or patched."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InputError, ModelError, StaleWarning
from laplace.inference.ready import Ready
from laplace.network.operations import Line, Steps, shorten

N, CLASSES = 12, 3


def sequence() -> nn.Sequential:
    """A sequence of all known layers, in two levels."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(first, nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    nn.init.ones_(model[1].bias)  # so that all units are active
    return model


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(N, 2, 4, 4, dtype=torch.float64)


def fitted(model: nn.Module | None = None) -> tuple[Laplace, Tensor]:
    x = inputs()
    la = Laplace(model or sequence(), "classification").fit([(x, torch.arange(N) % CLASSES)])
    la(x)
    return la, x[:1]


@pytest.fixture
def lines(monkeypatch) -> list[bool]:
    """Whether each prediction was made by the network itself."""
    taken: list[bool] = []
    way = Ready.in_line

    def watched(*args):
        found = way(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Ready, "in_line", watched)
    return taken


def outputs(la: Laplace, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleWarning)
        return la.predict(x).outputs.mean


def test_a_line_has_the_outputs_and_features_of_the_network():
    model, x = sequence(), inputs()
    line = Line.of(model, model[3])
    assert line is not None
    with torch.no_grad():
        f, phi = line(x.clone())
        assert torch.equal(f, model(x))
        assert torch.equal(phi, model[:3](x))


@pytest.mark.parametrize("first", [nn.Flatten(), nn.ReLU(inplace=True), nn.Identity(), nn.Tanh()])
def test_a_prediction_keeps_nothing_of_its_input_and_leaves_it_as_it_was(first):
    torch.manual_seed(0)
    x = torch.randn(N, 5, dtype=torch.float64)
    la = Laplace(nn.Sequential(first, nn.Linear(5, CLASSES).double()), "classification")
    la.fit([(x.clone(), torch.arange(N) % CLASSES)])
    expected, one = la.predict(x.clone()), x[:1].clone()
    for _ in range(2):
        found = la.predict(one)
        assert torch.equal(one, x[:1])
    one.fill_(7)
    torch.testing.assert_close(found.outputs.variance, expected.outputs.variance[:1])
    torch.testing.assert_close(found.epistemic, expected.epistemic[:1])


def test_a_hook_is_seen_in_a_dictionary_that_was_put_there_before_the_last_prediction():
    la, x = fitted()
    module = la.module()
    before = module(x)["mean"]
    module.network[1]._forward_hooks = OrderedDict()
    assert torch.equal(module(x)["mean"], before)
    add_hook(module.network)
    assert not torch.allclose(module(x)["mean"], before)
    torch.testing.assert_close(module(inputs())["mean"][:1], module(x)["mean"])


def test_backward_hooks_of_a_served_sequence_are_called():
    la, x = fitted()
    module, called = la.module(), list[str]()
    module(x)
    module.network.requires_grad_(True)
    module(x)
    module.network[1].register_full_backward_hook(lambda *args: called.append("hook"))
    with torch.no_grad():
        module(x)
    module(x)["mean"][0, 0].backward()
    assert called == ["hook"]


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True), nn.MaxPool2d(2, 1)])
@pytest.mark.parametrize("inplace", [False, True])
def test_pooling_before_a_relu_changes_neither_numbers_nor_gradients(inplace, pool):
    torch.manual_seed(0)
    body = [nn.ReLU(inplace), pool, nn.Conv2d(2, 3, 2), nn.ReLU(inplace), pool, nn.ReLU(inplace), nn.Flatten()]
    model, x = nn.Sequential(*body, nn.Tanh(), nn.ReLU(), nn.LazyLinear(CLASSES)), torch.randn(3, 2, 9, 9)
    model(x.clone())
    steps = Steps.of(model, model[-1])
    assert steps is not None
    slopes = [torch.autograd.grad(run(x.clone()).sum(), model[2].weight)[0] for run in (model[:-1], steps)]
    assert slopes[0].abs().max() > 0
    assert torch.equal(*slopes)
    x[0, 0, 4, 4], x[1] = torch.nan, -1.0
    x[2, :, 2:5] = -torch.inf
    expected, found = model[:-1](x.clone()), steps(x.clone())
    assert expected.isnan().any()
    assert torch.equal(expected.nan_to_num(9.0), found.nan_to_num(9.0))


def test_a_maximum_of_padding_alone_is_what_the_network_makes_of_it():
    torch.manual_seed(0)
    pool = nn.MaxPool2d(2, stride=1, padding=1, dilation=4)  # of 3 x 3 numbers, it sees none
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), pool, nn.Tanh(), nn.Flatten(), nn.Linear(2, 2))
    x = torch.randn(1, 1, 3, 3)
    steps = Steps.of(model, model[-1])
    assert steps is not None
    assert torch.equal(steps(x.clone()), model[:-1](x))


def test_other_networks_have_no_line():
    model = sequence()
    assert Line.of(model, model[1]) is None  # not the last one
    assert Line.of(nn.Sequential(nn.Linear(2, 2), nn.Softplus()), nn.Linear(2, 2)) is None
    assert Line.of(model[3], model[3]) is None


def test_one_input_of_a_sequence_is_predicted_as_in_a_batch(lines):
    la, _ = fitted()
    x = inputs()
    given, together, prediction = x.clone(), la(x), la.predict(x)
    for i in range(N):
        torch.testing.assert_close(la(x[i : i + 1]), together[i : i + 1])
        found = la.predict(x[i : i + 1])
        torch.testing.assert_close(found.mean, prediction.mean[i : i + 1])
        torch.testing.assert_close(found.epistemic, prediction.epistemic[i : i + 1])
    assert lines == 2 * N * [True]
    assert torch.equal(x, given)


def test_training_mode_changes_neither_the_prediction_nor_itself(lines):
    la, x = fitted()
    expected = la(x)
    la.model.train()
    assert torch.equal(la(x), expected)
    assert lines == [True, True]
    assert all(module.training for module in la.model.modules())


def write(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[1].weight.mul_(2)


def write_through_data(model: nn.Sequential) -> None:
    model[1].weight.data = 2 * model[1].weight.data


def write_to_the_last_layer_through_data(model: nn.Sequential) -> None:
    model[3].weight.data[0, 0] += 1


def turn(model: nn.Sequential) -> None:
    weight = model[0][0].weight
    weight.data = weight.data.flip(0)


def swap_parameter(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(2 * model[1].weight.detach())


def swap_layer(model: nn.Sequential) -> None:
    model[1] = nn.Linear(16, 6).double()


def swap_activation(model: nn.Sequential) -> None:
    model[2] = nn.ReLU()


def insert(model: nn.Sequential) -> None:
    model[0].append(nn.ReLU())
    model[0].append(nn.Softplus())


def set_option(model: nn.Sequential) -> None:
    model[0][2].stride = 1
    model[0][2].kernel_size = 3


def set_padding_mode(model: nn.Sequential) -> None:
    model[0][0].padding_mode = "circular"
    model[0][0]._reversed_padding_repeated_twice = [1, 1, 1, 1]


def add_hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, out: 2 * out)


def put_other_hooks(model: nn.Sequential) -> None:
    model[1]._forward_hooks = OrderedDict()
    add_hook(model)


def add_pre_hook_to_the_whole(model: nn.Sequential) -> None:
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def set_forward(model: nn.Sequential) -> None:
    own = model[1].forward
    model[1].forward = lambda x: 2 * own(x)


def set_class(model: nn.Sequential) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model[1].__class__ = Doubled


CHANGES = [
    write, write_through_data, write_to_the_last_layer_through_data, turn, swap_parameter, swap_layer, swap_activation,
    insert, set_option, set_padding_mode, add_hook, put_other_hooks, add_pre_hook_to_the_whole, set_forward, set_class,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changes_in_a_sequence_is_seen_by_the_next_prediction(change, lines):
    la, x = fitted()
    before = outputs(la, x)
    assert lines == [True]
    change(la.model)
    with torch.no_grad():
        expected = copy.deepcopy(la.model).eval()(x)
    assert not torch.allclose(before, expected)
    for _ in range(3):
        torch.testing.assert_close(outputs(la, x), expected)


def test_changed_weights_are_warned_of():
    la, x = fitted()
    la(x)
    write(la.model)
    with pytest.warns(StaleWarning):
        la(x)


def test_hooks_of_all_modules_and_patched_classes_are_respected(monkeypatch, lines):
    la, x = fitted()
    before = outputs(la, x)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if isinstance(module, nn.Conv2d) else None
    )
    try:
        hooked = outputs(la, x)
    finally:
        handle.remove()
    assert not torch.allclose(before, hooked)
    assert torch.equal(outputs(la, x), before)
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x.sigmoid())
    with torch.no_grad():
        torch.testing.assert_close(outputs(la, x), la.model(x))
    assert lines[0]
    assert not any(lines[1:3])


def test_mistakes_are_told_as_ever_and_the_next_input_is_predicted():
    la, x = fitted()
    expected = la(x)
    with pytest.raises(ModelError, match="the network failed"):
        la(x[:, :1])
    with pytest.raises(InputError, match="NaN"):
        la(torch.full_like(x, torch.nan))
    for _ in range(2):
        torch.testing.assert_close(la(x), expected)


def test_threads_share_a_line():
    la, _ = fitted()
    x, wrong = inputs(), list[int]()
    expected = la(x)

    def work(offset: int) -> None:
        for i in range(40):
            at = (i + offset) % N
            if not torch.allclose(la(x[at : at + 1]), expected[at : at + 1]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("link", ["one_vs_rest", "probit", "mc"])
def test_a_served_sequence_predicts_one_input_as_in_a_batch(link, monkeypatch):
    la, _ = fitted()
    x, module = inputs(), la.module(link)
    expected, called = module(x), list[nn.Module]()
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: called.append(self) or call(self, *args))
    found = module(x[:1])
    assert called == [module]  # and none of its layers
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name][:1])
    if link != "mc":
        torch.testing.assert_close(found["mean"], la.predict(x[:1], link_approx=link).mean)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changes_in_a_served_sequence_is_seen(change):
    la, x = fitted()
    module = la.module()
    module(x)
    change(module.network)
    together, one = module(inputs()), module(x)
    for name, value in one.items():
        torch.testing.assert_close(value, together[name][:1])


class Net(nn.Module):
    """Calls known layers from code of its own, which does to them what code may do."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does, self.body, self.head = does, sequence()[:3], nn.Linear(6, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        linear = self.body[1]
        if self.does == "hooks":
            handle = linear.register_forward_hook(lambda module, args, out: 2 * out)
            try:
                return self.head(self.body(x))
            finally:
                handle.remove()
        if self.does == "replaces":
            own = linear._parameters["weight"]
            linear._parameters["weight"] = 2 * own
            try:
                return self.head(self.body(x))
            finally:
                linear._parameters["weight"] = own
        if self.does == "names":
            return self.head(input=self.body[2](self.body[1](input=self.body[0](x))))
        linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
        try:
            return self.head(self.body(x))
        finally:
            del linear.forward


@pytest.mark.parametrize("does", ["hooks", "replaces", "names", "sets forward"])
def test_a_shortened_replica_does_what_the_network_does(does):
    model, x = Net(does), inputs()
    replica = copy.deepcopy(model)
    shorten(replica)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(replica(x), model(x))
    la, one = fitted(model)
    with torch.no_grad():
        torch.testing.assert_close(outputs(la, one), model(one))

"""torch.export, torch.compile, torch.jit.trace and ONNX Runtime compute what the module does, for any batch size."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, Ordinal
from laplace.errors import LaplaceWarning, UnsupportedError
from networks import cut, make

ALL = ("mean", "variance", "epistemic", "aleatoric")
MEAN = ("mean", "variance")
BATCH = ({0: torch.export.Dim("n")},)
Call = Callable[[Tensor], dict[str, Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore")


def compiled(module: nn.Module, x: Tensor) -> Call:
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)


def exported(module: nn.Module, x: Tensor) -> Call:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (x,), dynamic_shapes=BATCH), file)
    file.seek(0)
    return torch.export.load(file).module()


def traced(module: nn.Module, x: Tensor) -> Call:
    return torch.jit.trace(module, (x,), strict=False, check_trace=False)


def in_onnx(module: Any, x: Tensor) -> Call:
    onnxruntime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(module, (x,), dynamic_shapes=BATCH, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    name, outputs = session.get_inputs()[0].name, module.outputs

    def run(x: Tensor) -> dict[str, Tensor]:
        return {
            key: torch.from_numpy(np.asarray(v))
            for key, v in zip(outputs, session.run(None, {name: x.numpy()}), strict=True)
        }

    return run


WAYS = {"compile": compiled, "export": exported, "trace": traced, "onnx": in_onnx}


def case(likelihood: Any, structure: str, link: str | None, outputs: tuple[str, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    kind = likelihood if isinstance(likelihood, str) else likelihood.name
    sizes = {
        "classification": 3,
        "regression": 2,
        "binary": 1,
        "multilabel": 3,
        "poisson": 2,
        "heteroscedastic": 4,
        "ordinal": 1,
    }
    labels = {
        "classification": torch.randint(3, (23,)),
        "regression": torch.randn(23, 2),
        "binary": torch.randint(2, (23,)),
        "multilabel": torch.randint(2, (23, 3)),
        "poisson": torch.randint(5, (23, 2)),
        "heteroscedastic": torch.randn(23, 2),
        "ordinal": torch.randint(4, (23,)),
    }
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, sizes[kind])).to(dtype).eval()
    x, y = torch.randn(23, 4, dtype=dtype), labels[kind]
    y = y.to(dtype) if y.is_floating_point() else y
    la = Laplace(model, likelihood, hessian_structure=structure).fit(cut(x, y, 5))
    return la, la.module(link, outputs), x


def assert_recorded(way: str, module: Any, x: Tensor, tolerance: float) -> None:
    call = WAYS[way](module, x[:4])
    for n in (1, 4, 23):
        expected, found = module(x[:n]), call(x[:n])
        for name in module.outputs:
            assert found[name].shape == expected[name].shape
            assert (found[name] - expected[name]).abs().max() < tolerance, (name, n)


@pytest.mark.parametrize("way", WAYS)
def test_classes_by_probit(way):
    la, module, x = case("classification", "kron", "probit", MEAN, torch.float64)
    assert (module(x)["mean"] - la(x, link_approx="probit")).abs().max() < 1e-10
    assert_recorded(way, module, x, 1e-8 if way == "onnx" else 1e-10)  # ONNX has pi / 8 in float32


@pytest.mark.parametrize("way", ["export", "trace", "onnx"])
def test_regression_with_all_outputs(way):
    _, module, x = case("regression", "full", None, ALL, torch.float64)
    assert_recorded(way, module, x, 1e-10)


@pytest.mark.parametrize("link", ["one_vs_rest", "bridge", "delta", "mc"])
def test_the_other_links(link):
    _, module, x = case("classification", "kron", link, MEAN, torch.float64)
    assert_recorded("trace", module, x, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("link", ["probit", "one_vs_rest", "bridge", "bridge_norm", "delta", "mc"])
def test_every_link_is_recorded_as_the_posterior_predicts(link, dtype, way):
    if way == "onnx" and link == "one_vs_rest" and dtype is torch.float64:
        pytest.skip("ONNX Runtime has no error function in float64")
    la, module, x = case("classification", "kron", link, MEAN, dtype)
    assert_recorded(way, module, x, 1e-6)
    found = WAYS[way](module, x[:4])(x)["mean"]
    if link != "mc":  # whose draws are those of each input by itself
        assert (found - la(x, link_approx=link)).abs().max() < 1e-6
        return
    for i in (0, 7):
        alone = la.predict(x[i : i + 1], link_approx="mc", generator=torch.Generator().manual_seed(0)).mean
        assert (found[i : i + 1] - alone).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_a_regression_is_recorded_as_the_posterior_predicts(dtype, way):
    la, module, x = case("regression", "kron", None, ALL, dtype)
    assert_recorded(way, module, x, 1e-6)
    found, (mean, covariance) = WAYS[way](module, x[:4])(x), la(x)
    assert (found["mean"] - mean).abs().max() < 1e-6
    assert (found["variance"] - covariance.diagonal(dim1=1, dim2=2)).abs().max() < 1e-6
    assert (found["aleatoric"] - la.sigma_noise**2).abs().max() < 1e-6


@pytest.mark.slow
def test_the_default_compiler_computes_the_same():
    """torch.compile as users call it, which needs a C++ compiler."""
    for link in ("one_vs_rest", "probit"):
        la, module, x = case("classification", "kron", link, MEAN, torch.float32)
        torch.compiler.reset()
        try:
            found = torch.compile(module, fullgraph=True)(x)
        except RuntimeError as error:
            if "compiler" not in str(error).lower():
                raise
            pytest.skip("there is no C++ compiler")
        assert (found["mean"] - la(x, link_approx=link)).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("structure", ["diag", "ekfac", "inf", "block", "lowrank", "full"])
def test_every_structure_with_the_parts_of_the_entropy(structure, way):
    _, module, x = case("classification", structure, "probit", ALL, torch.float64)
    assert_recorded(way, module, x, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("likelihood", "link", "outputs"),
    [
        ("binary", "probit", ALL),
        ("binary", "mc", MEAN),
        ("multilabel", "probit", ALL),
        ("binary", "quadrature", MEAN),
        ("poisson", "exact", ALL),
        ("heteroscedastic", None, ALL),
        (Ordinal(4), "probit", ALL),
    ],
    ids=["probit", "mc", "multilabel", "quadrature", "poisson", "heteroscedastic", "ordinal"],
)
def test_other_likelihoods(likelihood, link, outputs, way):
    if way == "onnx" and link == "quadrature":
        pytest.skip("ONNX Runtime has no error function in float64, in which this integral is computed")
    _, module, x = case(likelihood, "kron", link, outputs, torch.float64)
    assert_recorded(way, module, x, 1e-8)


def test_a_convolution_at_positions_and_a_network_that_returns_a_mapping():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 3, 1))
    x, y = torch.randn(23, 1, 4, 5), torch.randint(3, (23, 4, 5))
    la = Laplace(model.eval(), "classification", class_dim=1).fit([(x, y)])
    assert_recorded("export", la.module("probit", ALL), x, 1e-6)
    model, x, y = make("wrapped", "classification")
    la = Laplace(model, "classification").fit(cut(x, y, 5))
    assert_recorded("export", la.module("probit", ALL), x, 1e-10)


@pytest.mark.slow
def test_a_model_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(vocab_size=50, dim=16, hidden_dim=32, n_layers=2, n_heads=2, num_labels=3)
    model = transformers.DistilBertForSequenceClassification(config).eval()
    batch = {"input_ids": torch.randint(50, (6, 8)), "attention_mask": torch.ones(6, 8, dtype=torch.long)}
    la = Laplace(model, "classification").fit([{**batch, "labels": torch.randint(3, (6,))}])
    module = la.module("probit", "mean", example=batch)
    expected = la(batch, link_approx="probit")
    assert (module(**batch) - expected).abs().max() < 1e-6
    assert torch.equal(module(**batch, labels=torch.zeros(6, dtype=torch.long)), module(**batch))  # as la(**batch)
    shapes = ({key: {0: torch.export.Dim("n", min=1, max=64)} for key in batch},)
    program = torch.export.export(module, (batch,), dynamic_shapes=shapes).module()
    assert (program({key: value[:3] for key, value in batch.items()}) - expected[:3]).abs().max() < 1e-6
    assert (torch.compile(module, fullgraph=True, backend="aot_eager")(**batch) - expected).abs().max() < 1e-6


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head((self.a(left) + self.b(right)).tanh())


def two_inputs(link: str, outputs: Any) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(1)
    left, right = torch.randn(9, 4), torch.randn(9, 2)
    la = Laplace(Two().eval(), "classification").fit([((left, right), torch.arange(9) % 3)])
    return la.module(link, outputs), left, right


def written(module: Any, path: Any, *inputs: Any, **named: Any) -> Any:
    """Write an ONNX file and load it, as a function of named inputs."""
    onnxruntime = pytest.importorskip("onnxruntime")
    module.to_onnx(path / "served.onnx", *inputs, **named)
    session = onnxruntime.InferenceSession(path / "served.onnx")
    names = [one.name for one in session.get_outputs()]
    assert names == list(module.outputs)

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        assert {one.name for one in session.get_inputs()} == set(inputs)
        found = session.run(names, {key: value.numpy() for key, value in inputs.items()})
        return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, found, strict=True)}

    return run


def assert_written(module: Any, path: Any, x: Tensor, tolerance: float) -> None:
    found, expected = written(module, path, x[:4])(input=x), module(x)
    expected = {module.outputs[0]: expected} if isinstance(expected, Tensor) else expected
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


def test_an_onnx_file_with_draws_and_several_inputs_by_name(tmp_path):
    module, left, right = two_inputs("mc", ALL)
    found = written(module, tmp_path, right=right[:4], left=left[:4])(left=left, right=right)
    for name, value in module(left, right).items():
        assert (found[name] - value).abs().max() < 1e-6, name


@pytest.mark.parametrize("strict", [False, True])
def test_several_inputs_are_exported_with_the_shapes_of_each(strict):
    module, left, right = two_inputs("probit", MEAN)
    n, expected = torch.export.Dim("n"), module(left, right)
    example = left[:4], right[:4]
    by_place = torch.export.export(module, example, dynamic_shapes=({0: n}, {0: n}), strict=strict)
    named, shapes = dict(zip(("left", "right"), example, strict=True)), {"left": {0: n}, "right": {0: n}}
    by_name = torch.export.export(module, (), named, dynamic_shapes=shapes, strict=strict)
    for found in (by_place.module()(left, right), by_name.module()(left=left, right=right)):
        assert (found["mean"] - expected["mean"]).abs().max() < 1e-6


def test_several_inputs_are_compiled_whole_in_each_form():
    module, left, right = two_inputs("probit", "mean")
    expected, named = module(left, right), {"left": left, "right": right}
    assert torch.equal(module(right=right, left=left), expected)
    for args, kwargs in (((left, right), {}), ((), named), ((named,), {}), (((left, right),), {})):
        torch.compiler.reset()
        found = torch.compile(module, fullgraph=True, backend="aot_eager")(*args, **kwargs)
        assert (found - expected).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("form", ["by place", "a tuple", "a mapping", "one row"])
def test_an_onnx_file_takes_several_inputs_in_each_form(form, tmp_path):
    module, left, right = two_inputs("probit", MEAN)
    some = left[:4], right[:4]
    inputs = {"by place": some, "a tuple": (some,), "one row": (left[:1], right[:1])}
    named = dict(zip(("left", "right"), some, strict=True))
    found = written(module, tmp_path, *inputs.get(form, (named,)))(left=left, right=right)
    assert (found["mean"] - module(left, right)["mean"]).abs().max() < 1e-6


@pytest.mark.slow
def test_an_onnx_file_of_a_model_of_hugging_face_has_its_names(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, num_labels=3, **sizes))
    batch = {"input_ids": torch.randint(40, (6, 8)), "attention_mask": (torch.arange(8) < 5).long().repeat(6, 1)}
    la = Laplace(model.eval(), "classification").fit([{**batch, "labels": torch.arange(6) % 3}])
    module = la.module("probit")
    found = written(module, tmp_path, {key: value[:3] for key, value in batch.items()})(**batch)
    assert (found["mean"] - la(batch, link_approx="probit")).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("outputs", ["mean", MEAN, ("epistemic", "mean"), ALL], ids=str)
@pytest.mark.parametrize("link", ["probit", "one_vs_rest", "bridge", "bridge_norm", "delta", "mc"])
def test_an_onnx_file_of_every_link_and_part_runs(link, outputs, tmp_path):
    _, module, x = case("classification", "kron", link, outputs, torch.float32)
    assert_written(module, tmp_path, x, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [MEAN, ALL], ids=str)
@pytest.mark.parametrize(
    ("likelihood", "link"),
    [
        ("regression", None),
        ("heteroscedastic", None),
        ("binary", "probit"),
        ("binary", "mc"),
        ("multilabel", "probit"),
        ("multilabel", "mc"),
        ("poisson", "exact"),
        ("poisson", "mc"),
        (Ordinal(4), "probit"),
    ],
    ids=str,
)
def test_an_onnx_file_of_every_likelihood_runs(likelihood, link, outputs, tmp_path):
    _, module, x = case(likelihood, "kron", link, outputs, torch.float64)
    assert_written(module, tmp_path, x, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 4])
def test_an_onnx_file_of_the_bridge_stays_finite_at_large_logits(classes, tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(40, 5), torch.arange(40) % classes
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, classes))
    module = Laplace(model.eval(), "classification", prior_precision=1e-2).fit(x, y).module("bridge")
    found, expected = written(module, tmp_path, x[:4])(input=300 * x)["mean"], module(300 * x)["mean"]
    assert model(300 * x).abs().max() > 100
    assert found.isfinite().all()
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.slow
def test_an_onnx_file_has_named_inputs_and_outputs(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    _, module, x = case("classification", "kron", "probit", MEAN, torch.float32)
    module.to_onnx(tmp_path / "served.onnx", x[:4])
    session = onnxruntime.InferenceSession(tmp_path / "served.onnx")
    assert [one.name for one in session.get_inputs()] == ["input"]
    found = dict(zip(MEAN, session.run(list(MEAN), {"input": x[:9].numpy()}), strict=True))
    for name, value in module(x[:9]).items():
        assert (torch.from_numpy(found[name]) - value).abs().max() < 1e-6


def test_a_file_that_onnx_runtime_does_not_load_is_warned_of(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    la, module, x = case("classification", "kron", "one_vs_rest", "mean", torch.float64)
    with pytest.warns(LaplaceWarning, match=r"float64.*module\.float\(\)\.to_onnx"):
        module.to_onnx(tmp_path / "double.onnx", x[:4])
    with pytest.raises(Exception, match="Erf"):
        onnxruntime.InferenceSession(tmp_path / "double.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaplaceWarning)
        found = written(module.float(), tmp_path, x[:4].float())(input=x.float())
    assert (found["mean"] - la(x, link_approx="one_vs_rest")).abs().max() < 1e-6


@pytest.mark.slow
def test_what_onnx_does_not_have_is_said(tmp_path):
    model, x, y = nn.Linear(4, 40), torch.randn(50, 4), torch.randint(40, (50,))  # a Cholesky factor of 40 rows
    module = Laplace(model.eval(), "classification").fit([(x, y)]).module("mc", ("mean",))
    assert_recorded("export", module, x, 1e-6)
    with pytest.raises(UnsupportedError, match="up to 32 classes"):
        module.to_onnx(tmp_path / "served.onnx", x[:4])


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    _, module, x = case("regression", "kron", None, MEAN, torch.float32)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"laplace-redux\[onnx\]"):
        module.to_onnx(tmp_path / "served.onnx", x[:4])

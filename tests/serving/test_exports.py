"""torch.export, torch.compile, torch.jit.trace and ONNX Runtime compute what the module does, for any batch size."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace, Ordinal
from laplace.errors import UnsupportedError
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
@pytest.mark.parametrize("link", ["probit", "one_vs_rest", "bridge", "bridge_norm", "delta", "mc"])
def test_every_link_in_single_precision(link, way):
    _, module, x = case("classification", "kron", link, MEAN, torch.float32)
    assert_recorded(way, module, x, 1e-6)


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
    shapes = ({key: {0: torch.export.Dim("n", min=1, max=64)} for key in batch},)
    program = torch.export.export(module, (batch,), dynamic_shapes=shapes).module()
    assert (program({key: value[:3] for key, value in batch.items()}) - expected[:3]).abs().max() < 1e-6
    assert (torch.compile(module, fullgraph=True, backend="aot_eager")(**batch) - expected).abs().max() < 1e-6


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

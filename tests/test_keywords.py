"""Keywords that do not exist are refused by name at run time, and type checkers see them before."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import laplace
from laplace import Laplace, marglik_training
from laplace.errors import OptionError
from laplace.spec import STRUCTURE_OPTIONS, PlanOptions, TrainingOptions

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.arange(4) % 2
SOURCE = Path(laplace.__file__).parents[1]


def net() -> nn.Linear:
    return nn.Linear(3, 2)


CALLS = {
    "Laplace": lambda **options: Laplace(net(), "classification", **options),
    "marglik_training": lambda **options: marglik_training(net(), [(X, Y)], "classification", n_epochs=1, **options),
    "plan": lambda **options: laplace.plan(net(), (X, Y), "classification", **options),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_typo_is_refused_with_the_nearest_keyword(name):
    with pytest.raises(OptionError, match=rf"^{name} has no option 'dampng'\. Did you mean 'damping'\?$"):
        CALLS[name](dampng=True)
    with pytest.raises(OptionError, match=rf"^{name} has no option 'curvatur'\. Did you mean 'curvature'\?$"):
        CALLS[name](curvatur="ggn")
    with pytest.raises(OptionError, match=rf"^{name} has no option 'xyz'\. See help\({name}\)\.$"):
        CALLS[name](xyz=1)


@pytest.mark.parametrize(
    ("function", "n_needed", "typo", "nearest"),
    [
        (laplace.compare, 1, "val_loder", "val_loader"),
        (laplace.from_log_prob, 1, "inverse_lnk", "inverse_link"),
        (laplace.decisions.acquire, 3, "n_sample", "n_samples"),
        (laplace.decisions.score, 2, "n_sample", "n_samples"),
        (laplace.decisions.choose, 2, "genertor", "generator"),
        (laplace.decisions.draw_functions, 1, "generatr", "generator"),
        (Laplace.log_prob, 2, "normalised", "normalized"),
        (Laplace.state_dict, 1, "with_dat", "with_data"),
    ],
)
def test_functions_refuse_a_typo_with_the_nearest_keyword(function, n_needed, typo, nearest):
    with pytest.raises(OptionError, match=rf"has no option '{typo}'\. Did you mean '{nearest}'\?$"):
        function(*[None] * n_needed, **{typo: 1})
    assert nearest in inspect.signature(function).parameters


def test_training_names_its_own_keywords():
    with pytest.raises(OptionError, match=r"no option 'prior_precision'\. Did you mean 'prior_prec_init'"):
        CALLS["marglik_training"](prior_precision=2.0)
    with pytest.raises(OptionError, match=r"no option 'sigma_noise'\. Did you mean 'sigma_noise_init'"):
        CALLS["marglik_training"](sigma_noise=2.0)


@pytest.mark.parametrize("name", ["marglik_training", "plan"])
def test_a_keyword_of_laplace_reaches_it(name):
    with pytest.raises(OptionError, match=r"^memory_budget=-1 must be"):
        CALLS[name](memory_budget=-1)
    with pytest.raises(OptionError, match=r"^class_dim='x'"):
        CALLS[name](class_dim="x")


def test_a_plan_takes_every_keyword_of_laplace():
    own = {name: p.default for name, p in inspect.signature(Laplace).parameters.items() if p.default is not p.empty}
    for name in ("subset_of_weights", "hessian_structure"):
        own.pop(name)
    assert CALLS["plan"](**own)["gp, nystrom"].fits
    with pytest.raises(OptionError, match=r"^functional_approximation='x'"):
        CALLS["plan"](functional_approximation="x")


def test_keywords_that_are_passed_on_are_those_of_laplace_with_their_types():
    own = inspect.signature(Laplace).parameters
    for function, options, renamed in (
        (marglik_training, TrainingOptions, {"prior_precision", "sigma_noise"}),
        (laplace.plan, PlanOptions, {"hessian_structure"}),
    ):
        named = {*inspect.signature(function).parameters}
        assert {*options.__annotations__} | named >= own.keys() - renamed, "a keyword of Laplace is missing"
        assert options.__annotations__.keys() <= own.keys() - named
    types = {**TrainingOptions.__annotations__, **PlanOptions.__annotations__}
    for name, kind in types.items():
        assert getattr(kind, "__forward_arg__", kind) == own[name].annotation, name
    assert STRUCTURE_OPTIONS.items() == {name: own[name].default for name in STRUCTURE_OPTIONS}.items()


def test_signatures_are_there_to_read():
    assert "damping" in inspect.signature(Laplace).parameters
    assert "lr_hyp" in inspect.signature(marglik_training).parameters
    for function in (Laplace, marglik_training, laplace.plan):
        kinds = {p.kind for p in inspect.signature(function).parameters.values() if p.annotation == "Any"}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.slow
def test_a_type_checker_finds_the_typo(tmp_path):
    pyright = shutil.which("pyright") or Path(sys.executable).with_name("pyright")
    if not Path(pyright).exists():
        pytest.skip("pyright is not installed")
    given = [
        "import laplace",
        "from laplace import Categorical, Laplace, marglik_training",
        "from laplace.curvature import Sketch",
        "from laplace.priors import GaussianPrior, StudentT",
        "from laplace.structures import GP, Kron",
        "from laplace.weights import LastLayer",
        "from torch import nn",
        "net = nn.Linear(3, 2)",
        'la = Laplace(net, "classification", prior=GaussianPrior(2.0))',
    ]
    right = [
        'Laplace(net, "classification", damping=True)',
        'marglik_training(net, [], "classification", damping=True)',
        'laplace.plan(net, [], "classification", damping=True)',
        "Kron(damping=True)",
        "GP(n_subset=5)",
        "Categorical(label_smoothing=0.1)",
        'LastLayer(name="head")',
        "Sketch(samples=4)",
        "StudentT(scale=1.0)",
        "GaussianPrior(precision=1.0)",
        "la.fit([], override=True)",
        'la.tune(method="evidence")',
        "la.conformal([], level=0.9)",
        'Laplace.load("file", net, prior=StudentT())',
        "laplace.report(la, [], ood={})",
    ]
    wrong = [re.sub(r"(\w)(\w)=", r"\2\1=", line) for line in right]  # the last two letters change places
    (tmp_path / "typo.py").write_text("\n".join([*given, *right, *wrong]) + "\n")
    settings = {"include": ["typo.py"], "extraPaths": [str(SOURCE)], "venvPath": str(Path(sys.prefix).parent)}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings | {"venv": Path(sys.prefix).name}))
    run = subprocess.run([str(pyright), "--outputjson", "-p", str(tmp_path)], capture_output=True, text=True)
    found = [entry for entry in json.loads(run.stdout)["generalDiagnostics"] if entry["severity"] == "error"]
    seen = {entry["range"]["start"]["line"] - len(given) - len(right) for entry in found}
    assert seen == set(range(len(wrong)))
    typos = [re.findall(r"(\w+)=", line)[-1] for line in wrong]
    assert {typo for typo in typos if any(f'"{typo}"' in entry["message"] for entry in found)} == set(typos)


class Swallows(nn.Module):
    """Takes any keyword, as networks of transformers do, and names one that is like one of ours deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.head = Scaled(), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self.head(self.scaled(x, kwargs.get("sample", 1)))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, sample: float) -> torch.Tensor:
        return sample * x


def test_a_typo_is_refused_if_the_network_would_swallow_it():
    la = Laplace(Swallows(), "classification").fit(X, Y)
    for call in (la, la.predict):
        with pytest.raises(OptionError, match=r"no option 'link_aprox', and no forward .* mean 'link_approx'"):
            call(X, link_aprox="mc")
        with pytest.raises(OptionError, match=r"no option 'num_samples', .* mean 'n_samples'"):
            call(X, num_samples=3)
    with pytest.raises(OptionError, match="no option 'n_sample'"):
        la.predictive_samples(X, n_sample=3)
    assert not torch.equal(la(X, sample=3.0), la(X))  # which a module inside names
    assert torch.equal(la(X, output_attentions=True), la(X))  # which is like none of ours

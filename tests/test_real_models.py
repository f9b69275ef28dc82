"""Networks as they are used, small: fit, evidence and prediction of the last layer and of all weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import oracle
from exact import assert_close
from laplace import Laplace
from laplace.errors import ModelError
from networks import cut

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:\w+ keeps:laplace.errors.LaplaceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STRUCTURES = ["kron", "diag"]


def assert_whole(model: nn.Module, x: Tensor, task: str, subset: str, structure: str) -> Laplace:
    """Diagonal and Kronecker factors are the oracle's; evidence and predictions follow densely from what is kept."""
    model.eval()
    f = model(x).detach()
    y = torch.arange(len(x)) % f.shape[1] if task == "classification" else f.sin()
    la = Laplace(model, task, subset, structure).fit(cut(x, y, [3, 1]))
    names = list(la.posterior.fit.layout.names)
    jac = oracle.jacobian_loop(model, names, x)
    lam = oracle.hessian_of_loss(task, f, y)
    if structure == "diag":
        assert_close(la.H, torch.einsum("ncp,ncd,ndp->p", jac, lam, jac))
    h = la.H.diag() if structure == "diag" else la.H.to_matrix()
    if structure == "kron" and all(p.requires_grad for p in model.parameters()):
        assert_factors(h, oracle.kron_all(model, names, x, lam), names, la.posterior.fit.layout.sizes)
    root = torch.linalg.cholesky(h + la.prior_precision_diag.diag())
    loglik = torch.stack([oracle.log_prob(task, a, b) for a, b in zip(f, y, strict=True)]).sum()
    delta = la.prior_precision_diag
    terms = (la.mean.square() * delta).sum() + 2 * root.diagonal().log().sum() - delta.log().sum()
    assert_close(la.log_marginal_likelihood(), loglik - 0.5 * terms)
    outputs = la.predict(x[:3]).outputs
    assert_close(outputs.mean, f[:3])
    whitened = torch.linalg.solve_triangular(root, jac[:3].flatten(0, 1).T, upper=False).unflatten(1, (3, -1))
    assert_close(outputs.covariance, torch.einsum("pnc,pnd->ncd", whitened, whitened))
    return la


def assert_factors(h: Tensor, expected: dict[str, Tensor], names: list[str], sizes: Sequence[int]) -> None:
    """The blocks that the oracle knows; those that are nothing but rounding (a key's bias) are nothing here either."""
    assert expected
    start, largest = 0, float(h.abs().max())
    for name, size in zip(names, sizes, strict=True):
        if name in expected and float(expected[name].abs().max()) > 1e-14 * largest:
            assert_close(h[start : start + size, start : start + size], expected[name])
        start += size


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """The network of 18 layers, as wide as asked for."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        sizes = [width * 2**i for i in range(4)]
        blocks: list[nn.Module] = []
        for i, (before, size) in enumerate(zip([width, *sizes], sizes, strict=False)):
            blocks += [Block(before, size, 1 if i == 0 else 2), Block(size, size, 1)]
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(sizes[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class ViT(nn.Module):
    """Patches of an image, a class token, learned positions, two encoder layers before their norms."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 4, 3, 3)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 6, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.cls.expand(len(x), -1, -1), h], 1) + self.positions
        return self.head(self.norm(self.encoder(h))[:, 0])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_resnet_18(subset, structure):
    torch.manual_seed(0)
    model, x = ResNet18(1, 3).double(), torch.randn(5, 3, 32, 32, dtype=torch.float64)
    model.train()
    model(x)
    la = assert_whole(model, x, "classification", subset, structure)
    if subset == "all":
        assert {row.rule for row in la.coverage()} == {"conv", "norm", "linear"}


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_vision_transformer(subset, structure, task):
    torch.manual_seed(0)
    model, x = ViT(3).double(), torch.randn(5, 1, 6, 6, dtype=torch.float64)
    la = assert_whole(model, x, task, subset, structure)
    if subset == "all":
        rules = {row.rule for row in la.coverage()}
        assert rules == {"conv", "attention", "norm", "linear", "generic, whole network"}


class OfIds(nn.Module):
    """A model of transformers as a function of token ids; of a language model the last token's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids.long(), attention_mask=torch.ones_like(ids).long()).logits
        return logits[:, -1] if logits.dim() == 3 else logits


def distilbert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=9, max_position_embeddings=5, n_layers=1, n_heads=2, dim=4, hidden_dim=6, num_labels=3
    )
    return transformers.DistilBertForSequenceClassification(config)


def gpt2(tied: bool = True) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7,
        n_positions=5,
        n_embd=4,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    return transformers.GPT2LMHeadModel(config)


def moved(model: nn.Module) -> nn.Module:
    """Away from the small weights that these start with."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_distilbert(subset, structure):
    torch.manual_seed(0)
    model = moved(OfIds(distilbert()).double())
    la = assert_whole(model, torch.randint(1, 7, (5, 4)).double(), "classification", subset, structure)
    if subset == "all":
        rules = {row.name.removeprefix("model.distilbert."): row.rule for row in la.coverage()}
        assert rules["embeddings.word_embeddings.weight"] == "embedding"
        assert set(rules.values()) == {"embedding", "norm", "linear"}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gpt2(structure):
    """Its head is tied to the embedding."""
    torch.manual_seed(0)
    model = moved(OfIds(gpt2()).double())
    la = assert_whole(model, torch.randint(1, 7, (5, 4)).double(), "classification", "all", structure)
    rules = {row.name.removeprefix("model.transformer."): row.rule for row in la.coverage()}
    assert rules["wte.weight"] == "embedding + linear"
    assert rules["h.0.attn.c_attn.weight"] == "conv1d of transformers"
    assert set(rules.values()) == {"embedding + linear", "embedding", "conv1d of transformers", "norm"}


class OnLastToken(nn.Module):
    """The same as `OfIds`, its head called on the last token alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.lm_head(self.model.transformer(input_ids=ids.long()).last_hidden_state[:, -1])


def test_the_last_layer_of_gpt2():
    """A head of its own, whose last token alone counts; a tied one is refused, and said."""
    torch.manual_seed(0)
    ids, model = torch.randint(1, 7, (5, 4)).double(), moved(gpt2(tied=False).double())
    assert_whole(OfIds(model), ids, "classification", "last_layer", "diag")
    la = assert_whole(OnLastToken(model), ids, "classification", "last_layer", "kron")
    other = Laplace(OfIds(model), "classification").fit(cut(ids, torch.arange(5), [3, 1]))
    assert_close(other.H.to_matrix(), la.H.to_matrix())
    assert_close(other(ids), la(ids))
    with pytest.raises(ModelError, match=r"'model\.lm_head' is tied to another module"):
        Laplace(OfIds(gpt2()), "classification").fit(cut(ids, torch.arange(5), 5))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_low_rank_adapters_of_peft(subset, structure):
    """lora_A and lora_B are linear layers inside; what they adapt is frozen."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_lin", "v_lin"])
    model = moved(OfIds(peft.get_peft_model(distilbert(), config)).double())
    la = assert_whole(model, torch.randint(1, 7, (5, 4)).double(), "classification", subset, structure)
    if subset == "all":
        assert sum("lora_" in row.name for row in la.coverage()) == 4
        assert {row.rule for row in la.coverage()} == {"linear"}

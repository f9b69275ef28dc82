"""A head over a vocabulary: nothing of size C x C is made."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, warnings
import torch
from torch import nn
from laplace import Laplace

C, H, T = 50_000, 768, 16
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, H), nn.Tanh(), nn.Linear(H, C))
x, y = torch.randn(8, T, 8), torch.randint(C, (8, T))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    la = Laplace(model, "classification", "last_layer", sys.argv[1])
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])])
assert any("diagonal" in str(w.message) for w in seen) == (sys.argv[1] == "kron"), seen
assert la.log_marginal_likelihood().isfinite()
assert la(x[:1]).shape == (1, T, C)
variance = la.predict(x[:1], n_samples=2).rows.outputs.variance
assert variance.shape == (T, C) and bool((variance > 0).all())
phi = model[1](model[0](x))
p = model[2](phi).softmax(-1).flatten(0, 1)
phi, chosen = phi.flatten(0, 1), torch.arange(0, C, 9973)
b = (p * (1 - p)).sum(0)[chosen].double()
if sys.argv[1] == "kron":  # against the dense covariance of some outputs' weights
    a = (phi.T @ phi / len(phi)).double()
    sigma = [torch.linalg.inv(one * a + torch.eye(H)) for one in b]
    want = [torch.einsum("ni,ij,nj->n", phi[:T].double(), s, phi[:T].double()) for s in sigma]
else:
    own = (p * (1 - p))[:, chosen].double().T @ phi.double().square()
    want = [(phi[:T].double().square() / (row + 1)).sum(1) for row in own]
want = torch.stack(want, 1) + 1 / (b + 1)
torch.testing.assert_close(variance[:, chosen].double(), want, rtol=1e-3, atol=1e-6)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_vocabulary_of_fifty_thousand_takes_less_than_four_gigabytes(structure):
    done = subprocess.run([sys.executable, "-c", SCRIPT, structure], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4

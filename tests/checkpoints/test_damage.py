"""Damaged and foreign files: one clear error each, and never a wrong posterior in silence."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from laplace import Laplace
from laplace.errors import CheckpointError, LaplaceError
from laplace.network import digests
from networks import cut, make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, x, y = make("mlp", "classification")
    la = Laplace(model, "classification", hessian_structure="kron", prior_precision=2.0).fit(cut(x, y, 6))
    path = tmp_path_factory.mktemp("saved") / "la.safetensors"
    la.save(path)
    return path, model, x, la(x), float(la.log_marginal_likelihood())


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy with one of the things that happen to files."""
    at, kind = rng.randrange(len(data)), rng.choice(["flip", "byte", "cut", "hole", "insert", "swap", "append"])
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "byte":
        return data[:at] + rng.randbytes(1) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "hole":
        size = min(rng.choice([1, 8, 512, 4096]), len(data) - at)
        return data[:at] + bytes(size) + data[at + size :]
    if kind == "insert":
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if kind == "swap":
        return data[at:] + data[:at]
    return data + rng.randbytes(rng.randrange(1, 9))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 20))])
def test_random_damage_is_refused_or_changes_nothing(saved, seed, tmp_path):
    path, model, x, expected, evidence = saved
    data, rng, refused = path.read_bytes(), random.Random(seed), 0
    for _ in range(75):
        (tmp_path / "la").write_bytes(damaged(data, rng))
        try:
            la = Laplace.load(tmp_path / "la", model)
        except CheckpointError:
            refused += 1
        else:
            assert float(la.log_marginal_likelihood()) == evidence
            assert torch.equal(la(x), expected)
    assert refused > 60


@pytest.mark.parametrize("part", [slice(0, 8), slice(8, 400), slice(-300, None)])
def test_every_flipped_bit_of_the_length_the_header_and_the_tensors_is_noticed(saved, part, tmp_path):
    path, model, *_ = saved
    data = path.read_bytes()
    for at in range(len(data))[part]:
        (tmp_path / "la").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CheckpointError):
            Laplace.load(tmp_path / "la", model)


def test_each_kind_of_damage_has_its_words(saved, tmp_path):
    path, model, *_ = saved
    data, other = path.read_bytes(), tmp_path / "other"

    def refused(contents: bytes | None, words: str) -> None:
        if contents is not None:
            other.write_bytes(contents)
        with pytest.raises(CheckpointError, match=words):
            Laplace.load(other, model)

    refused(None, "cannot be read: No such file")
    refused(b"", "is cut off: it has 0 bytes")
    refused(data[:200], "is cut off")
    refused(data[:-1], "is damaged")
    refused(data[:-1] + bytes([data[-1] ^ 1]), "checksum is not that of its contents")
    refused((10**12).to_bytes(8, "little") + data[8:], "claims a header of 1,000,000,000,000 bytes; at most")
    torch.save({"a": torch.ones(3)}, other)
    refused(None, r"not a safetensors file.*load_state_dict")
    save_file({"weight": torch.ones(3)}, other)
    refused(None, "but not one that la.save or fit wrote")
    refused(b"just some words, not a posterior", "not a safetensors file")
    other.unlink()
    other.mkdir()
    refused(None, "cannot be read: Is a directory")


def rewritten(path, other, change):
    """A file whose header was changed by someone who knows how to make a checksum."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["laplace"])
    tensors = load_file(path)
    change(header, tensors)
    words = json.dumps(header)
    save_file(tensors, other, {"laplace": words, "checksum": digests.of_tensors(tensors, words)})


def test_a_later_format_is_refused(saved, tmp_path):
    path, model, *_ = saved
    rewritten(path, tmp_path / "la", lambda header, _: header.update(format=2, library="9.0"))
    with pytest.raises(CheckpointError, match=r"has format 2, written by laplace 9\.0; this version reads format 1"):
        Laplace.load(tmp_path / "la", model)


def places(value, path=()):
    """All places in a nest of mappings and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", range(4))
def test_headers_made_by_hand_raise_nothing_but_our_errors(saved, seed, tmp_path):
    path, model, *_ = saved
    rng, refused = random.Random(seed), 0

    def change(header, tensors):
        *above, last = rng.choice([place for place in places(header) if place])
        inside = header
        for key in above:
            inside = inside[key]
        inside[last] = rng.choice([None, -1, 2**70, 0.5, "os.system", [], {}, [[1]], True, {"$tensor": "state/mean"}])

    for _ in range(60):
        rewritten(path, tmp_path / "la", change)
        try:
            Laplace.load(tmp_path / "la", model)
        except LaplaceError:
            refused += 1
    assert refused > 20

"""Weights to start from: what fits is loaded, what does not is named; and where they come from (pretrain)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import cli, errors, models
from fedtailor.data.redeal import pooled
from fedtailor.engine import prefix
from fedtailor.engine.pretrain import pretrain
from fedtailor.models.backbone import read
from tests.pictures import pictures

SHAPE, NAME = (3, 8, 8), "resnet8:width=4"
runner = CliRunner()


def weights(name: str = NAME, classes: int = 3, seed: int = 5) -> dict[str, torch.Tensor]:
    return {k: v for k, v in models.build(name, SHAPE, classes, seed=seed).state_dict().items() if v.is_floating_point()}


def test_both_kinds_of_file_give_the_same_network(tmp_path):
    save_file(weights(), tmp_path / "w.safetensors")
    torch.save(weights(), tmp_path / "w.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in weights().items()}, "epoch": 3}, tmp_path / "wrapped.pth")
    torch.save(models.build(NAME, SHAPE, 3, seed=5).state_dict(), tmp_path / "whole.pt")  # with the norms' counts
    for file in ("w.safetensors", "w.pt", "wrapped.pth", "whole.pt"):
        net = models.build(NAME, SHAPE, 3, seed=1, backbone=tmp_path / file)
        assert all(torch.equal(net.state_dict()[k], v) for k, v in weights().items())
        assert net.notes == (f"The network starts from {tmp_path / file}.",)


def test_adapters_keep_their_start_and_a_head_for_other_classes_is_left_out(tmp_path):
    save_file(weights(classes=7), tmp_path / "w.safetensors")
    fresh = models.build(f"{NAME},adapters", SHAPE, 3, seed=1)
    net = models.resnet(8, 3, width=4, adapters=True, backbone=tmp_path / "w.safetensors")
    assert net.notes[1] == "Its head is for 7 classes, not 3, and was left out: the head starts anew."
    net = models.build(f"{NAME},adapters", SHAPE, 3, seed=1, backbone=tmp_path / "w.safetensors")
    for name, value in net.state_dict().items():
        own = "adapter" in name or name.startswith("fc.") or not value.is_floating_point()
        assert torch.equal(value, fresh.state_dict()[name] if own else weights()[name]), name
    frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert frozen == {
        n for n in weights() if n.endswith(("conv1.weight", "conv2.weight")) or ("downsample" in n and "running" not in n)
    }


def test_a_file_without_a_head_is_fine_and_said(tmp_path):
    save_file({k: v for k, v in weights().items() if not k.startswith("fc.")}, tmp_path / "w.safetensors")
    net = models.build(NAME, SHAPE, 3, backbone=tmp_path / "w.safetensors")
    assert net.notes[1] == "It has no head: the head starts anew."


def test_trained_adapters_are_loaded_too(tmp_path):
    name = f"{NAME},adapters"
    save_file(weights(name), tmp_path / "w.safetensors")
    net = models.build(name, SHAPE, 3, seed=1, backbone=tmp_path / "w.safetensors")
    assert all(torch.equal(net.state_dict()[k], v) for k, v in weights(name).items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("conv1.weight"), r"conv1.weight is missing; use"),
        (lambda w: w.update({"conv1.weight": torch.zeros(4, 1, 3, 3)}), r"conv1.weight is \(4, 1, 3, 3\), not \(4, 3, 3, 3\)"),
        (lambda w: w.update({"layer9.weight": torch.zeros(2)}), "layer9.weight is unknown"),
        (lambda w: [w.pop(k) for k in list(w) if k.startswith("layer1")], "and 6 more"),
    ],
    ids=["missing", "shape", "unknown", "many"],
)
def test_what_does_not_fit_is_named_in_one_line(change, words, tmp_path):
    changed = weights()
    change(changed)
    save_file(changed, tmp_path / "w.safetensors")
    with pytest.raises(errors.ModelMismatch, match=words) as refusal:
        models.build(NAME, SHAPE, 3, backbone=tmp_path / "w.safetensors")
    assert "\n" not in str(refusal.value)


class Evil:
    def __reduce__(self):
        return (print, ("opened",))


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("w.pt", lambda p: torch.save(Evil(), p), "more than tensors"),
        ("w.pt", lambda p: torch.save(nn.Linear(2, 2), p), "more than tensors"),
        ("w.pt", lambda p: p.write_bytes(b"nonsense"), "cannot be read|more than tensors"),
        ("w.pt", lambda p: torch.save(torch.zeros(3), p), "no tensors by name"),
        ("w.pt", lambda p: torch.save({}, p), "no tensors by name"),
        ("w.safetensors", lambda p: p.write_bytes(b"nonsense"), "cannot be read as weights"),
        ("w.safetensors", lambda p: p.write_bytes(b""), "cannot be read as weights"),
        ("w.safetensors", lambda p: None, "there is no file"),
        ("w.safetensors", lambda p: p.mkdir(), "there is no file"),
    ],
    ids=["evil", "module", "bytes", "tensor", "empty", "bad-safetensors", "empty-safetensors", "none", "folder"],
)
def test_files_that_are_no_weights_are_refused(name, write, words, tmp_path, capsys):
    write(tmp_path / name)
    with pytest.raises(errors.InvalidData, match=words) as refusal:
        read(tmp_path / name)
    assert "\n" not in str(refusal.value)
    assert "opened" not in capsys.readouterr().out


def test_only_networks_given_by_name_and_made_for_it_take_a_backbone(tmp_path):
    with pytest.raises(errors.InvalidArgument, match="'mlp' takes no backbone; use one of resnet8"):
        models.build("mlp", SHAPE, 3, backbone=tmp_path / "w.pt")
    with pytest.raises(errors.InvalidArgument, match="given by name"):
        ft.run(ft.FedAvg(), pictures(), models.resnet(8, 3), rounds=1, backbone=tmp_path / "w.pt")


def test_a_frozen_network_at_its_random_start_says_so():
    run = ft.run(ft.FedAvg(), pictures(), f"{NAME},adapters", rounds=1, engine="loop")
    assert any("random start" in note for note in run.summary["notes"])


def test_a_run_starts_from_the_weights_and_is_resumed_by_their_content(tmp_path):
    save_file(weights(), tmp_path / "w.safetensors")
    options = {"rounds": 1, "engine": "loop", "batch_size": 4, "out": tmp_path / "run"}
    name = f"{NAME},adapters"
    run = ft.run(ft.Local(lr=1e-30), pictures(), name, backbone=tmp_path / "w.safetensors", **options)
    assert torch.equal(run.model(0)["conv1.weight"], weights()["conv1.weight"])
    assert any("starts from" in note for note in run.summary["notes"])
    (tmp_path / "moved").mkdir()
    moved = (tmp_path / "w.safetensors").rename(tmp_path / "moved" / "same.safetensors")
    ft.run(ft.Local(lr=1e-30), pictures(), name, backbone=moved, resume=True, **options)
    save_file(weights(seed=6), moved)
    with pytest.raises(errors.BadRun, match="backbone"):
        ft.run(ft.Local(lr=1e-30), pictures(), name, backbone=moved, resume=True, **options)


# -- pretraining -------------------------------------------------------------------------------------------------------------


def test_pretraining_on_pooled_rows_is_plain_torch(tmp_path):
    """One epoch of one full batch: momentum has no past, the step size is the first of the cosine."""
    fed = pictures((5, 7))
    pretrain(fed, NAME, epochs=1, lr=0.1, momentum=0.9, weight_decay=0.01, batch_size=99, out=tmp_path / "w.safetensors")
    net = models.build(NAME, SHAPE, 3, seed=0).train()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    nn.functional.cross_entropy(net(fed.train.x.float()), fed.train.y).backward()
    opt.step()
    weights = load_file(tmp_path / "w.safetensors")
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=name)
    assert not list(tmp_path.glob("*.part"))


def test_pooled_rows_are_those_of_one_client_and_fedavg_leaves_them(tmp_path):
    fed = pictures((5, 7))
    one = pooled(fed)
    assert (len(one), one.train.sizes.tolist(), one.test.sizes.tolist()) == (1, [12], [10])
    done = pretrain(fed, NAME, epochs=1, method="fedavg", out=tmp_path / "w.safetensors")
    assert done.summary["clients"] == 2
    models.build(f"{NAME},adapters", SHAPE, 3, backbone=tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "mlp"}, "one of resnet8"),
        ({"model": "resnet8:adapters"}, "leave the adapters"),
        ({"method": "central"}, "unknown method 'central'"),
        ({"method": "ditto"}, "method must be pooled or a method that gives one model for all"),
    ],
    ids=str,
)
def test_what_pretraining_refuses(settings, words):
    with pytest.raises(errors.InvalidArgument, match=words):
        pretrain(pictures(), **{"model": NAME, "epochs": 1, **settings})


def test_the_commands_pretrain_and_run_with_a_backbone(tmp_path):
    where, base = str(tmp_path / "w.safetensors"), ["digits", "--clients", "3", "--with", "images=true"]
    made = runner.invoke(cli.app, ["pretrain", *base, "--model", "resnet8:width=2", "--epochs", "1", "--out", where, "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["out"] == where
    asked = ["run", "fedavg", *base, "--model", "resnet8:width=2,head", "--rounds", "1", "--backbone", where]
    done = runner.invoke(cli.app, [*asked, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "starts from" in done.stderr
    assert "computed once" in done.stderr
    again = runner.invoke(cli.app, ["resume", str(tmp_path / "run"), "--json"])
    assert again.exit_code == 0, again.output
    wrong = runner.invoke(cli.app, [*asked[:-4], "--rounds", "1", "--backbone", str(tmp_path / "none.pt")])
    assert wrong.exit_code == 2
    assert wrong.stderr.count("\n") == 1
    assert "there is no file of weights" in wrong.stderr


@pytest.mark.parametrize(
    "ask", [lambda *a, **k: ft.advise(*a, **k).race, lambda *a, **k: ft.sweep(*a, lams=2, **k).table()], ids=["advise", "sweep"]
)
def test_advice_and_sweeps_start_from_a_backbone_and_go_through_its_frozen_layers_once(ask, tmp_path, monkeypatch):
    save_file(weights("resnet8:width=4"), tmp_path / "w.safetensors")
    name, fed, options = "resnet8:adapters,width=4,last=1,dropout=0", pictures([12, 9, 10]), {"rounds": 5, "steps": 2}
    module = models.build(name, SHAPE, 3, backbone=tmp_path / "w.safetensors")
    monkeypatch.setattr(prefix, "ROOM", 0)
    long = ask(fed, module, **options)
    monkeypatch.undo()
    calls = []
    on = prefix._on
    monkeypatch.setattr(prefix, "_on", lambda task, device: lambda x: calls.append(len(x)) or on(task, device)(x))
    short = ask(fed, name, backbone=tmp_path / "w.safetensors", **options)
    assert len(calls) == 3  # training, validation and test rows
    for a, b in zip(short, long, strict=True):
        assert a.keys() == b.keys()
        assert all(a[k] == pytest.approx(b[k], abs=1e-4) if isinstance(a[k], float) else a[k] == b[k] for k in a)

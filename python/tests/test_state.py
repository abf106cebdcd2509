"""Whole state dicts of models and optimizers beside those of plain ones, both ways, and checkpoints.

Ranks that write files share a folder of the run (`folder`), which rank 0 makes and removes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import tessera
import torch
from support import MLP_UNITS, Mlp, Plain, assert_bits, assert_same_parameters, drawn, shard_layers
from tessera import SGD, AdamW, MixedPrecisionPolicy, Muon, StateDictOptions, fully_shard
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as upstream

# Wide enough that ranks share a weight.
WIDTH = 16
ROOT = pathlib.Path(__file__).resolve().parents[2]


def mse(model: Any, rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the loss of a rank's batch of a step."""
    x = drawn(1, step, rank, shape=(4, WIDTH), dtype=dtype)
    return nn.functional.mse_loss(model(x).float(), drawn(2, step, rank, shape=(4, WIDTH)))


@pytest.fixture
def folder(world: Any, request: pytest.FixtureRequest) -> Iterator[pathlib.Path]:
    """A folder that all ranks see."""
    run = os.environ.get("MASTER_PORT", os.getpid())
    path = pathlib.Path(tempfile.gettempdir(), f"tessera_{run}_{request.node.name}")
    yield path
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(path, ignore_errors=True)


class Counter(nn.Module):
    """A linear layer with state of every kind: extra state, buffers that are persistent and not, a version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.extra = {"words": ["none"]}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x) * self.scratch[0]


class Everything(nn.Module):
    """Tied places, a batch norm, extra state, a frozen parameter, and the same module in two places."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.counter = Counter()
        self.twice = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.embed, self.counter, *self.twice, self.norm, self.head):
            x = torch.tanh(layer(x))
        return x + self.frozen.sum()


EVERYTHING_UNITS = ("counter", "twice.0", "norm")


def assert_same_dicts(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails unless both have the same keys in the same order, metadata, and values."""
    assert list(found) == list(expected)
    assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert_bits(name, found[name], value)
        else:
            assert found[name] == value


class TestModel:
    """state_dict and load_state_dict of a sharded module are those of the plain one."""

    def test_round_trip(self, world: Any) -> None:
        """Plain to sharded to another sharding to plain: keys, order, metadata, bits stay, buffers after steps too."""
        plain = Everything()
        model = shard_layers(Everything(seed=2), EVERYTHING_UNITS)
        result = model.load_state_dict(plain.state_dict())
        assert result == ([], [])
        assert_same_dicts(model.state_dict(), plain.state_dict())
        x = drawn(5, world.rank, shape=(4, WIDTH))
        model(x).sum().backward()
        state = model.state_dict()
        assert state["counter.seen"] == 1
        other = shard_layers(Everything(seed=3), ("twice.0",))
        other.load_state_dict(state)
        again = Everything(seed=4)
        again.load_state_dict(other.state_dict())
        assert_same_dicts(again.state_dict(), state)
        model.eval()
        other.eval()
        again.eval()
        expected = again(x)
        assert_bits("sharded", model(x), expected)
        assert_bits("otherwise sharded", other(x), expected)
        assert again.counter.extra == model.counter.extra == {"words": ["none"]}

    def test_values_are_copies(self, world: Any) -> None:
        """Writing into a dict, or into the dict that was loaded, does not reach the module; tied entries are one."""
        model = shard_layers(Everything(), EVERYTHING_UNITS)
        brought = Everything().state_dict()
        model.load_state_dict(brought)
        assert brought._metadata == Everything().state_dict()._metadata  # a plain module copies from it, as ever
        for value in brought.values():
            if isinstance(value, Tensor):
                value.zero_()
        assert_same_dicts(model.state_dict(), Everything().state_dict())
        state = model.state_dict()
        assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
        kept = {name: v.clone() for name, v in state.items() if isinstance(v, Tensor)}
        for value in kept:
            state[value].zero_()
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                assert_bits(name, value, kept[name])

    def test_units_and_prefixes(self, world: Any) -> None:
        """A unit inside gives its own plain dict; prefix and destination are as in torch.nn.Module."""
        plain = Everything()
        model = shard_layers(Everything(), EVERYTHING_UNITS)
        assert_same_dicts(model.counter.state_dict(), plain.counter.state_dict())
        assert_same_dicts(model.state_dict(prefix="a.b."), plain.state_dict(prefix="a.b."))
        model.counter.load_state_dict({**plain.counter.state_dict(), "linear.bias": torch.full((WIDTH,), 2.0)})
        assert (model.state_dict()["counter.linear.bias"] == 2).all()
        around = nn.ModuleDict({"inside": model})
        assert list(around.state_dict()) == [f"inside.{name}" for name in plain.state_dict()]

    def test_hooks(self, world: Any) -> None:
        """Hooks of saving and loading are called as a plain module calls them, and may change the dict."""
        calls: list[str] = []

        def with_hooks(model: nn.Module, mark: str) -> nn.Module:
            layer = model.get_submodule("layers.1")
            layer.register_state_dict_pre_hook(lambda m, prefix, keep: calls.append(f"{mark} before {prefix}"))
            more = torch.ones(1)
            layer.register_state_dict_post_hook(lambda m, state, prefix, _: state.update({prefix + "more": more}))
            layer.register_load_state_dict_pre_hook(
                lambda m, state, prefix, *_: (calls.append(f"{mark} load {prefix}"), state.pop(prefix + "more", None))
            )
            model.register_load_state_dict_post_hook(lambda m, keys: calls.append(f"{mark} {keys.unexpected_keys}"))
            return model

        plain = with_hooks(Mlp(WIDTH, seed=1), "plain")
        model = with_hooks(shard_layers(Mlp(WIDTH, seed=2), MLP_UNITS), "sharded")
        state = plain.state_dict()
        plain.load_state_dict(state)
        assert "layers.1.more" in state
        theirs = [call.replace("plain", "") for call in calls]
        calls.clear()
        model.load_state_dict(state)
        loaded = model.state_dict()
        assert sorted(call.replace("sharded", "") for call in calls) == sorted(theirs)
        assert_same_dicts(loaded, state)

    def test_own_way_of_loading(self, world: Any) -> None:
        """A class that reads its parameters in _load_from_state_dict finds them whole."""

        class Doubles(nn.Linear):
            def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
                with torch.no_grad():
                    self.bias.copy_(self.bias * 2 + state.pop(prefix + "bias").sum())
                state[prefix + "bias"] = self.bias.detach().clone()
                super()._load_from_state_dict(state, prefix, *rest)

        torch.manual_seed(4)
        plain = nn.Sequential(Doubles(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = copy.deepcopy(plain)
        state = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).state_dict()
        fully_shard(model)
        plain.load_state_dict(state)
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            assert_bits(name, value, plain.state_dict()[name])

    def test_meta_parameters(self, world: Any) -> None:
        """A model that was made on the meta device has values once a dict is loaded."""
        plain = Mlp(WIDTH, seed=6)
        with torch.device("meta"):
            model = Mlp(WIDTH, seed=7)
        shard_layers(model, MLP_UNITS)
        model.load_state_dict(plain.state_dict(), assign=True)
        x = drawn(3, world.rank, shape=(4, WIDTH))
        assert_bits("loss", model(x), plain(x))

    def test_meta_buffers(self, world: Any) -> None:
        """A buffer on the meta device is refused by its name, and the module can be sharded once it has values."""
        with torch.device("meta"):
            model = Everything()
        with pytest.raises(tessera.Error, match=r"buffer counter\.seen on the meta device") as caught:
            fully_shard(model)
        assert caught.value.kind == "usage"
        assert type(model) is Everything
        for module in model.modules():
            for key, buffer in module._buffers.items():
                setattr(module, key, torch.ones(buffer.shape, dtype=buffer.dtype))
        plain = Everything()
        fully_shard(model).load_state_dict(plain.state_dict())
        assert_same_dicts(model.state_dict(), plain.state_dict())

    def test_copies_of_the_model(self, world: Any) -> None:
        """With HSDP's copies alone, a dict goes to and from shards with its bits."""
        plain = Everything()
        model = Everything(seed=2)
        mesh = tessera.Mesh(dp_replicate=world.size, dp_shard=1)
        fully_shard(model.counter, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.load_state_dict(plain.state_dict())
        assert_same_dicts(model.state_dict(), plain.state_dict())

    def test_ignored_parameters(self, world: Any) -> None:
        """What sharding leaves alone is in the dict, and is loaded."""
        plain = Mlp(WIDTH, seed=1)
        model = Mlp(WIDTH, seed=2)
        ignored = model.layers[1].weight
        fully_shard(model, ignored_params=[ignored])
        model.load_state_dict(plain.state_dict())
        assert_bits("ignored", ignored.detach(), plain.layers[1].weight.detach())
        assert_same_dicts(model.state_dict(), plain.state_dict())


class TestRefusedLoads:
    """A dict that does not fit on one rank is refused on all, with PyTorch's words, and nothing has changed."""

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda s: s.pop("layers.1.bias"), 'Missing key.*"layers.1.bias"'),
            (lambda s: s.update(more=torch.ones(1)), 'Unexpected key.*"more"'),
            (
                lambda s: s.update({"layers.0.weight": torch.ones(WIDTH, 7)}),
                r"size mismatch for layers\.0\.weight: .*\[16, 7\]",
            ),
            (
                lambda s: s.update({"layers.0.bias": torch.ones(WIDTH).double()}),
                r"layers\.0\.bias: found the dtype Double",
            ),
            (lambda s: s.update({"layers.0.bias": 3}), r"layers\.0\.bias.*expected torch\.Tensor"),
        ],
        ids=["missing", "unexpected", "shape", "dtype", "no tensor"],
    )
    def test_on_one_rank(self, world: Any, change: Any, words: str) -> None:
        model = shard_layers(Mlp(WIDTH, seed=2), MLP_UNITS)
        before = model.state_dict()
        state = Mlp(WIDTH, seed=1).state_dict()
        if world.rank == world.size - 1:
            change(state)
        with pytest.raises(tessera.Error, match=f"(?s){words}") as caught:
            model.load_state_dict(state)
        assert caught.value.kind == "contract"
        assert isinstance(caught.value, RuntimeError)
        assert_same_dicts(model.state_dict(), before)

    def test_lenient(self, world: Any) -> None:
        """strict=False returns what torch.nn.Module returns, and leaves what is missing as it is."""
        plain, model = Mlp(WIDTH, seed=2), shard_layers(Mlp(WIDTH, seed=2), MLP_UNITS)
        state = Mlp(WIDTH, seed=1).state_dict()
        del state["layers.1.bias"]
        state["more"] = torch.ones(1)
        expected = plain.load_state_dict(state, strict=False)
        assert model.load_state_dict(state, strict=False) == expected
        for name, value in model.state_dict().items():
            assert_bits(name, value, plain.state_dict()[name])

    @pytest.mark.parametrize("missing", ["0.weight", "1.weight"])
    @pytest.mark.parametrize("own", [True, False])
    def test_one_name_of_a_tied_parameter(self, world: Any, missing: str, own: bool) -> None:
        """One of its names is enough for strict=False, also in classes that load by themselves."""

        class OwnWay(nn.Linear):
            def _load_from_state_dict(self, *arguments: Any) -> None:
                super()._load_from_state_dict(*arguments)

        made = OwnWay if own else nn.Linear
        model = nn.Sequential(made(WIDTH, WIDTH, bias=False), made(WIDTH, WIDTH, bias=False))
        model[1].weight = model[0].weight
        fully_shard(model)
        values = drawn(6, shape=(WIDTH, WIDTH))
        state = {name: values for name in ("0.weight", "1.weight") if name != missing}
        assert model.load_state_dict(state, strict=False).missing_keys == [missing]
        for value in model.state_dict().values():
            assert_bits("loaded", value, values)

    def test_missing_buffer_keeps_its_digits(self, world: Any) -> None:
        """A buffer that a lenient load misses keeps the digits with which it was loaded, beside a class that loads by
        itself, too."""

        class OwnWay(nn.Linear):
            def __init__(self) -> None:
                super().__init__(WIDTH, WIDTH)
                self.register_buffer("third", torch.full((3,), 1 / 3))

            def _load_from_state_dict(self, *arguments: Any) -> None:
                super()._load_from_state_dict(*arguments)

        model = nn.Sequential(OwnWay())
        narrow = tessera.Rule("0.third", param_dtype=torch.bfloat16)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(rules=(narrow,)))
        before = model.state_dict()
        model(drawn(7, shape=(4, WIDTH)))
        assert model[0].third.dtype == torch.bfloat16  # fewer digits, from the first forward on
        state = {name: value for name, value in before.items() if "third" not in name}
        assert model.load_state_dict(state, strict=False).missing_keys == ["0.third"]
        assert_bits("third", model.state_dict()["0.third"], torch.full((3,), 1 / 3))

    def test_tied_values_that_differ(self, world: Any) -> None:
        """Two values for one tied parameter are named: a plain module takes the last without a word."""
        model = shard_layers(Everything(), EVERYTHING_UNITS)
        state = model.state_dict()
        state["head.weight"] = state["head.weight"] + 1
        with pytest.raises(tessera.Error, match=r"two different values for embed\.weight"):
            model.load_state_dict(state)

    def test_tied_values_with_nan(self, world: Any) -> None:
        """Copies of one value are the same value, NaN among its elements; another bit is another value."""
        model = shard_layers(Everything(), EVERYTHING_UNITS)
        state = model.state_dict()
        state["embed.weight"][0, 0] = math.nan
        state["head.weight"] = state["embed.weight"].clone()
        model.load_state_dict(state)
        for name in ("embed.weight", "head.weight"):
            assert_bits(name, model.state_dict()[name].view(torch.int32), state[name].view(torch.int32))
        state["head.weight"][0, 1] = math.nan
        with pytest.raises(tessera.Error, match=r"two different values for embed\.weight"):
            model.load_state_dict(state)

    def test_no_dict(self, world: Any) -> None:
        """As in torch.nn.Module."""
        with pytest.raises(TypeError, match="dict-like"):
            shard_layers(Mlp(WIDTH), MLP_UNITS).load_state_dict([1, 2])


class TestOptions:
    """The options of PyTorch's state dict functions."""

    def test_rank_zero_on_the_cpu(self, world: Any) -> None:
        """cpu_offload: rank 0 has everything, others an empty dict, of model and optimizer."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS)
        optimizer = AdamW(model)
        mse(model, world.rank).backward()
        optimizer.step()
        whole = tessera.get_model_state_dict(model), tessera.get_optimizer_state_dict(model, optimizer)
        options = StateDictOptions(cpu_offload=True)
        state = tessera.get_model_state_dict(model, options=options)
        of_optimizer = tessera.get_optimizer_state_dict(model, optimizer, options=options)
        if world.rank != 0:
            assert state == {}
            assert of_optimizer == {}
            return
        assert_same_dicts(state, whole[0])
        assert list(of_optimizer["state"]) == list(whole[1]["state"])

    def test_broadcast_from_rank0(self, world: Any) -> None:
        """Rank 0's dicts are loaded everywhere, whatever the others bring: tensors of any dtype, and other values."""
        source = Everything()
        source.counter.extra = {"words": ["one", "two"], 3: 4.5}
        model = shard_layers(Everything(seed=2), EVERYTHING_UNITS)
        options = StateDictOptions(broadcast_from_rank0=True)
        tessera.set_model_state_dict(model, source.state_dict() if world.rank == 0 else {}, options=options)
        assert_same_dicts(model.state_dict(), source.state_dict())
        plain = torch.optim.AdamW(source.parameters())
        source(drawn(5, shape=(4, WIDTH))).sum().backward()
        plain.step()
        optimizer = AdamW(model)
        named = upstream.get_optimizer_state_dict(source, plain)
        tessera.set_optimizer_state_dict(model, optimizer, named if world.rank == 0 else {}, options=options)
        found = tessera.get_optimizer_state_dict(model, optimizer)["state"]
        assert_bits("exp_avg", found["embed.weight"]["exp_avg"], named["state"]["embed.weight"]["exp_avg"])

    def test_frozen_parameters_are_left_out(self, world: Any) -> None:
        """ignore_frozen_params: they are not in the dict, and a strict load does not miss them, but for others."""
        model = shard_layers(Everything(), EVERYTHING_UNITS)
        options = StateDictOptions(ignore_frozen_params=True)
        state = tessera.get_model_state_dict(model, options=options)
        assert set(model.state_dict()) - set(state) == {"frozen"}
        tessera.set_model_state_dict(model, state, options=options)
        del state["norm.bias"]
        with pytest.raises(tessera.Error, match=r"Missing key\(s\) in state_dict: \"norm\.bias\"\. $"):
            tessera.set_model_state_dict(model, state, options=options)

    def test_torchs_options_and_refusals(self, world: Any) -> None:
        """PyTorch's class is taken; what asks for DTensors, flat or other names is refused by the option's name."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS)
        plain = upstream.StateDictOptions(full_state_dict=True)
        assert_same_dicts(tessera.get_model_state_dict(model, options=plain), model.state_dict())
        with pytest.raises(tessera.Error, match="found full_state_dict=False"):
            tessera.get_model_state_dict(model, options=upstream.StateDictOptions())
        options, optimizer = StateDictOptions(flatten_optimizer_state_dict=True), AdamW(model)
        with pytest.raises(tessera.Error, match="found flatten_optimizer_state_dict=True"):
            tessera.get_optimizer_state_dict(model, optimizer, options=options)
        with pytest.raises(TypeError, match="StateDictOptions"):
            tessera.get_model_state_dict(model, options={"full_state_dict": True})


def stepped(world: Any, make: Any, make_plain: Any, steps: int = 2) -> tuple[Any, Any, Any, Any]:
    """Returns a sharded model and the plain one, and their optimizers, after `steps` steps with the same gradients."""
    model = Mlp(WIDTH)
    plain = Plain(model, world.size)
    shard_layers(model, MLP_UNITS)
    optimizer = make(model)
    optimizers = [make_plain(one.parameters()) for one in plain.copies]
    advance(world, model, optimizer, plain, optimizers, steps)
    return model, optimizer, plain, optimizers


def advance(world: Any, model: nn.Module, optimizer: Any, plain: Plain, optimizers: Any, steps: int = 1) -> None:
    """Takes further steps on both sides, which stay equal bit for bit."""
    for step in range(steps):
        mse(model, world.rank, step).backward()
        plain.backward(lambda one, rank, at=step: mse(one, rank, at))
        optimizer.step()
        plain.step(optimizers)
        optimizer.zero_grad()
        plain.zero_grad()
    assert_same_parameters(model, plain)


OPTIMIZERS = {
    "AdamW": (lambda m: AdamW(m, lr=0.01, fused=True), lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "SGD": (
        lambda m: SGD(m, lr=0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False),
    ),
    "torch.AdamW": (
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ),
    "torch.SGD": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ),
}


class TestOptimizers:
    """Optimizer states of shards and of whole parameters are one format."""

    @pytest.mark.parametrize("name", list(OPTIMIZERS))
    def test_interchange(self, world: Any, name: str) -> None:
        """The dict has the bits of the plain model's; each side goes on from the other's, by name and by number."""
        make, make_plain = OPTIMIZERS[name]
        model, optimizer, plain, optimizers = stepped(world, make, make_plain)
        named = tessera.get_optimizer_state_dict(model, optimizer)
        expected = upstream.get_optimizer_state_dict(plain.copies[0], optimizers[0])
        assert list(named["state"]) == list(expected["state"])
        for parameter, state in expected["state"].items():
            assert set(state) <= set(named["state"][parameter])
            for key, value in state.items():
                assert_bits(f"{key} of {parameter}", named["state"][parameter][key], value)
        assert [group["params"] for group in named["param_groups"]] == [g["params"] for g in expected["param_groups"]]
        assert set(expected["param_groups"][0]) <= set(named["param_groups"][0])
        # The plain side goes on from the sharded one's dict, then the sharded one, made anew, from the plain one's.
        optimizers = [make_plain(one.parameters()) for one in plain.copies]
        for one, new in zip(plain.copies, optimizers, strict=True):
            upstream.set_optimizer_state_dict(one, new, copy.deepcopy(named))
        optimizer = make(model)
        tessera.set_optimizer_state_dict(model, optimizer, expected)
        advance(world, model, optimizer, plain, optimizers)
        numbered = optimizers[0].state_dict()
        optimizer = make(model)
        if name.startswith("torch."):
            tessera.set_optimizer_state_dict(model, optimizer, numbered)
        else:
            by_number = optimizer.state_dict()
            assert by_number["param_groups"][0]["params"] == numbered["param_groups"][0]["params"]
            optimizer.load_state_dict(numbered)
            back = optimizer.state_dict()
            for new in optimizers:
                new.load_state_dict(copy.deepcopy(back))
        advance(world, model, optimizer, plain, optimizers)

    def test_other_layout(self, world: Any) -> None:
        """State of four units goes on in one unit, from a learning rate that a scheduler has set."""
        model, optimizer, plain, optimizers = stepped(world, *OPTIMIZERS["AdamW"])
        optimizer.param_groups[0]["lr"] = 0.125
        for one in optimizers:
            one.param_groups[0]["lr"] = 0.125
        other = fully_shard(Mlp(WIDTH, seed=9))
        other.load_state_dict(model.state_dict())
        continued = AdamW(other, lr=0.01)
        tessera.set_optimizer_state_dict(other, continued, tessera.get_optimizer_state_dict(model, optimizer))
        assert continued.param_groups[0]["lr"] == 0.125
        advance(world, other, continued, plain, optimizers)

    @pytest.mark.parametrize(
        ("dtype", "beside"), [(torch.bfloat16, "master_remainder"), (torch.float16, "master")], ids=str
    )
    def test_sixteen_bits(self, world: Any, dtype: torch.dtype, beside: str) -> None:
        """Bits beside 16-bit shards come back; a state without them, as of torch.optim, is taken all the same."""
        policy = MixedPrecisionPolicy(loss_scaling=dtype == torch.float16)
        model = shard_layers(Mlp(WIDTH).to(dtype), MLP_UNITS, mp_policy=policy)
        optimizer = AdamW(model, lr=1e-3)
        for step in range(2):
            mse(model, world.rank, step, dtype).backward()
            optimizer.step()
            optimizer.zero_grad()
        named = tessera.get_optimizer_state_dict(model, optimizer)
        again = shard_layers(Mlp(WIDTH, seed=5).to(dtype), MLP_UNITS[:1], mp_policy=policy)
        again.load_state_dict(model.state_dict())
        continued = AdamW(again, lr=1e-3)
        tessera.set_optimizer_state_dict(again, continued, named)
        for each, own in ((model, optimizer), (again, continued)):
            mse(each, world.rank, 7, dtype).backward()
            own.step()
        for name, value in again.state_dict().items():
            assert_bits(name, value, model.state_dict()[name])
        narrow = {
            "state": {
                name: {"step": s["step"], **{k: s[k].bfloat16() for k in ("exp_avg", "exp_avg_sq")}}
                for name, s in named["state"].items()
            },
            "param_groups": named["param_groups"],
        }
        tessera.set_optimizer_state_dict(again, continued, narrow)
        values = again.state_dict()
        for name, taken in tessera.get_optimizer_state_dict(again, continued)["state"].items():
            assert_bits("exp_avg", taken["exp_avg"], narrow["state"][name]["exp_avg"].float())
            exact = values[name].float() if beside == "master" else torch.zeros_like(values[name], dtype=torch.int16)
            assert_bits(beside, taken[beside], exact)

    def test_refusals(self, world: Any) -> None:
        """Other names, shapes, values of groups and optimizers are refused on all ranks, and nothing has changed."""
        model, optimizer, _, _ = stepped(world, *OPTIMIZERS["AdamW"])
        named = tessera.get_optimizer_state_dict(model, optimizer)

        def refused(words: str, change: Any, into: Any = optimizer) -> None:
            state = copy.deepcopy(named)
            if world.rank == world.size - 1:
                change(state)
            with pytest.raises(tessera.Error, match=words) as caught:
                tessera.set_optimizer_state_dict(model, into, state)
            assert caught.value.kind in ("contract", "usage")

        def without(state: Any) -> None:
            del state["state"]["layers.1.bias"]
            state["param_groups"][0]["params"].remove("layers.1.bias")

        refused(r"missing layers\.1\.bias", without)
        refused("unexpected other", lambda s: s["state"].update(other={"step": 1}))
        refused("found betas", lambda s: s["param_groups"][0].update(betas=(0.5, 0.5)))
        refused(r"exp_avg of the shape", lambda s: s["state"]["layers.0.bias"].update(exp_avg=torch.ones(3)))
        refused('expected "state"', lambda s: s.pop("state"))
        after = tessera.get_optimizer_state_dict(model, optimizer)
        for name, state in named["state"].items():
            for key, value in state.items():
                assert_bits(f"{key} of {name}", after["state"][name][key], value)
        other = torch.optim.SGD(Mlp(WIDTH).parameters(), lr=0.1)
        with pytest.raises(tessera.Error, match="a parameter of the shape"):
            tessera.get_optimizer_state_dict(model, other)

    @pytest.mark.parametrize("way", ["no state", "another key", "another shape", "a foreign parameter", "no dict"])
    def test_other_state_on_one_rank(self, world: Any, way: str) -> None:
        """A rank whose optimizer of torch.optim has other state than rank 0's ends the call on all ranks."""
        if world.size == 1:
            pytest.skip("one rank has no other")
        model, optimizer, _, _ = stepped(world, *OPTIMIZERS["torch.AdamW"])
        shard = dict(model.named_parameters())["layers.1.weight"]
        kind = "contract" if way in ("no state", "another key") else "usage"
        words = r"exp_avg.* of layers\.1\.weight"
        if way == "a foreign parameter":
            words = "a parameter of the shape"
        elif way == "no dict":
            words = "AttributeError"
        if world.rank == world.size - 1:
            if way == "no state":
                del optimizer.state[shard]
            elif way == "another key":
                optimizer.state[shard]["other"] = optimizer.state[shard].pop("exp_avg_sq")
            elif way == "another shape":
                optimizer.state[shard]["exp_avg"] = torch.ones(2, 3)
            elif way == "a foreign parameter":
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            else:
                optimizer.state[shard] = None
        with pytest.raises(tessera.Error, match=words) as caught:
            tessera.get_optimizer_state_dict(model, optimizer)
        assert caught.value.kind == kind

    @pytest.mark.parametrize("name", ["AdamW", "torch.AdamW"])
    def test_exceptions_on_one_rank(self, world: Any, name: str) -> None:
        """Whatever a load raises on one rank, all ranks raise, and nothing has changed on any."""
        model, optimizer, _, _ = stepped(world, *OPTIMIZERS[name])
        named = tessera.get_optimizer_state_dict(model, optimizer)
        fails = world.rank == world.size - 1

        def refused(words: str, state: Any) -> None:
            with pytest.raises(tessera.Error, match=words) as caught:
                tessera.set_optimizer_state_dict(model, optimizer, state)
            assert caught.value.kind == "contract"
            after = tessera.get_optimizer_state_dict(model, optimizer)
            assert after["param_groups"] == named["param_groups"]
            for parameter, state in named["state"].items():
                for key, value in state.items():
                    assert_bits(f"{key} of {parameter}", after["state"][parameter][key], value)

        zeros = copy.deepcopy(named)
        for of_one in zeros["state"].values():
            of_one["exp_avg"].zero_()
        zeros["param_groups"][0]["lr"] = 0.5
        refused("AttributeError", {**zeros, "state": None} if fails else zeros)
        if name == "AdamW":
            broken = copy.deepcopy(zeros)
            broken["state"]["layers.1.bias"]["step"] = "many"
            refused("many", broken if fails else zeros)
            return

        def fail(*_: Any) -> None:
            raise LookupError("the hook has failed")

        hook = optimizer.register_load_state_dict_post_hook(fail if fails else lambda _: None)
        refused("LookupError: .*the hook has failed", zeros)
        hook.remove()

    def test_momentum_of_sixteen_bits(self, world: Any) -> None:
        """Momentum of torch.optim.SGD, which has more digits than 16-bit shards, comes back with all of them."""
        model = shard_layers(Mlp(WIDTH).bfloat16(), MLP_UNITS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for step in range(2):
            mse(model, world.rank, step, torch.bfloat16).backward()
            optimizer.step()
            optimizer.zero_grad()
        named = tessera.get_optimizer_state_dict(model, optimizer)
        momenta = {name: state["momentum_buffer"] for name, state in named["state"].items()}
        assert list(momenta) == [name for name, _ in model.named_parameters()]
        assert any(not torch.equal(x, x.bfloat16().float()) for x in momenta.values())
        continued = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        tessera.set_optimizer_state_dict(model, continued, named)
        for name, state in tessera.get_optimizer_state_dict(model, continued)["state"].items():
            assert_bits(f"momentum of {name}", state["momentum_buffer"], momenta[name])

    def test_of_a_unit_inside(self, world: Any) -> None:
        """An optimizer that was made for a unit inside has that unit's names there, and the model's in the model."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS)
        inner = model.get_submodule("layers.1")
        optimizer = SGD(inner, lr=0.1, momentum=0.9)
        mse(model, world.rank).backward()
        gradients = dict(tessera.full_gradients(model))
        before = model.state_dict()
        optimizer.step()
        for name, value in model.state_dict().items():
            expected = before[name].add(gradients[name], alpha=-0.1) if "layers.1." in name else before[name]
            assert_bits(name, value, expected)
        named = tessera.get_optimizer_state_dict(inner, optimizer)
        assert list(named["state"]) == ["weight", "bias"]
        assert_bits("momentum", named["state"]["bias"]["momentum_buffer"], gradients["layers.1.bias"])
        of_model = tessera.get_optimizer_state_dict(model, optimizer)
        assert list(of_model["state"]) == ["layers.1.weight", "layers.1.bias"]
        assert of_model["param_groups"][0]["params"] == list(of_model["state"])
        continued = SGD(inner, lr=0.1, momentum=0.9)
        tessera.set_optimizer_state_dict(inner, continued, named)
        assert_bits(
            "loaded momentum",
            tessera.get_optimizer_state_dict(inner, continued)["state"]["weight"]["momentum_buffer"],
            gradients["layers.1.weight"],
        )

    def test_several_optimizers(self, world: Any) -> None:
        """The states of several optimizers are one dict, from which each takes its part."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS)

        def made() -> list[Any]:
            first = SGD(model.get_submodule("layers.0"), lr=0.1, momentum=0.9)
            rest = [p for name, p in model.named_parameters() if "layers.0." not in name]
            return [first, torch.optim.Adam(rest, lr=0.01)]

        optimizers = made()
        mse(model, world.rank).backward()
        for one in optimizers:
            one.step()
        named = tessera.get_optimizer_state_dict(model, optimizers)
        assert list(named["state"]) == [name for name, _ in model.named_parameters()]
        assert [len(group["params"]) for group in named["param_groups"]] == [2, 4]
        again = made()
        tessera.set_optimizer_state_dict(model, again, named)
        found = tessera.get_optimizer_state_dict(model, again)
        for name, state in named["state"].items():
            for key, value in state.items():
                assert_bits(f"{key} of {name}", found["state"][name][key], value)
        assert again[1].param_groups[0]["lr"] == 0.01

    def test_muon_keeps_both(self, world: Any) -> None:
        """Momenta of matrices and moments of the rest go on in another layout."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS)
        optimizer = Muon(model, lr=0.01)
        mse(model, world.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        named = tessera.get_optimizer_state_dict(model, optimizer)
        assert set(named["state"]["layers.0.weight"]) == {"step", "momentum_buffer"}
        assert set(named["state"]["layers.0.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
        other = fully_shard(Mlp(WIDTH, seed=9))
        other.load_state_dict(model.state_dict())
        continued = Muon(other, lr=0.01)
        tessera.set_optimizer_state_dict(other, continued, named)
        for each, own in ((model, optimizer), (other, continued)):
            mse(each, world.rank, 1).backward()
            own.step()
        for name, value in other.state_dict().items():
            assert_bits(name, value, model.state_dict()[name])


ONE_RANK = """
import sys
sys.path.insert(0, "python/tests")
import tessera, torch
from support import Mlp, drawn
WIDTH = 16
tessera.init()
model = tessera.fully_shard(Mlp(WIDTH, seed=11))
optimizer = tessera.AdamW(model, lr=0.01)
found = tessera.load_checkpoint(model, optimizer, sys.argv[1])
assert (found.step, found.world_size, found.user) == (2, int(sys.argv[3]), {"epoch": 3, "name": "run"}), found
model(drawn(4, shape=(4, WIDTH))).sum().backward()
optimizer.step()
tessera.save_checkpoint(model, optimizer, sys.argv[2], 3)
"""


class TestCheckpoints:
    """Checkpoints in the format of docs/checkpoint.md."""

    def test_to_one_rank_and_back(self, world: Any, folder: pathlib.Path) -> None:
        """One rank goes on from what these ranks have saved, and these from what it has saved, with its bits.

        The program `tessera` lists the tensors of both.
        """
        model, optimizer, plain, optimizers = stepped(world, *OPTIMIZERS["AdamW"])
        assert not tessera.has_checkpoint(folder / "first")
        tessera.save_checkpoint(model, optimizer, folder / "first", 2, user={"epoch": 3, "name": "run"})
        assert tessera.has_checkpoint(folder / "first")
        if world.rank == 0:
            of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            alone = {k: v for k, v in os.environ.items() if k not in of_ranks and not k.startswith("TORCHELASTIC")}
            words = [sys.executable, "-c", ONE_RANK, folder / "first", folder / "second", str(world.size)]
            subprocess.run(words, check=True, cwd=ROOT, env=alone)
            program = pathlib.Path(tessera.__file__).parent / "lib/tessera/tessera"
            for name in ("first/step-2", "second/step-3"):
                words = [program, "inspect", folder / name, "--json"]
                listed = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                tensors = listed["tensors"]
                for place in ("model", "optim/exp_avg", "optim/exp_avg_sq"):
                    assert all(f"{place}/{parameter}" in tensors for parameter in plain.parameters())
                assert tensors["model/layers.0.weight"]["shape"] == [WIDTH, WIDTH]
        world.barrier()
        for each, own in zip(plain.copies, optimizers, strict=True):
            each(drawn(4, shape=(4, WIDTH))).sum().backward()
            own.step()
            own.zero_grad()
        other = shard_layers(Mlp(WIDTH, seed=8), MLP_UNITS[1:])
        continued = AdamW(other, lr=0.01)
        found = tessera.load_checkpoint(other, continued, folder / "second")
        assert (found.step, found.world_size, found.user) == (3, 1, {})
        assert pathlib.Path(found.path) == folder / "second" / "step-3"
        advance(world, other, continued, plain, optimizers)

    def test_the_learning_rate_goes_on(self, world: Any, folder: pathlib.Path) -> None:
        """What a scheduler has made of the rate is saved, and its own state goes on from there: the run that went on
        and the one that was loaded step alike."""

        def made() -> tuple[Any, Any, Any]:
            model = shard_layers(Mlp(WIDTH), MLP_UNITS)
            optimizer = AdamW(model, lr=0.1)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def step(model: Any, optimizer: Any, scheduler: Any, number: int) -> None:
            mse(model, world.rank, number).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        first, second = made(), made()
        step(*first, 0)
        tessera.save_checkpoint(first[0], first[1], folder, 1, user={"epoch": 2})
        assert tessera.load_checkpoint(second[0], second[1], folder).user == {"epoch": 2}
        second[2].load_state_dict(first[2].state_dict())
        assert second[1].param_groups[0]["lr"] == 0.05
        for number in (1, 2):
            step(*first, number)
            step(*second, number)
        assert second[1].param_groups[0]["lr"] == first[1].param_groups[0]["lr"] == 0.0125
        assert_same_dicts(first[0].state_dict(), second[0].state_dict())

    def test_scaler_latest_and_refusals(self, world: Any, folder: pathlib.Path) -> None:
        """The loss scale is saved; keep_latest_k removes; what does not fit is named, and nothing has changed."""
        model = shard_layers(Mlp(WIDTH), MLP_UNITS, mp_policy=MixedPrecisionPolicy(loss_scaling=True))
        optimizer, scaler = SGD(model, lr=0.1, momentum=0.5), tessera.GradScaler(model, init_scale=64.0)
        for step in (1, 2):
            scaler.scale(mse(model, world.rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            tessera.save_checkpoint(model, optimizer, folder, step, scaler=scaler, keep_latest_k=1)
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-2"]
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
        assert tessera.load_checkpoint(model, optimizer, folder, scaler=scaler).step == 2
        assert scaler.get_scale() == 64.0
        assert scaler.state_dict()["_growth_tracker"] == 2
        before = model.state_dict()
        with pytest.raises(tessera.Error, match="SGD") as caught:
            tessera.load_checkpoint(model, AdamW(model), folder)
        assert caught.value.kind == "config"
        with pytest.raises(tessera.Error, match="step 0") as caught:
            tessera.save_checkpoint(model, optimizer, folder, 0)
        assert caught.value.kind == "usage"
        with pytest.raises(tessera.Error, match="found no checkpoint") as caught:
            tessera.load_checkpoint(model, optimizer, folder / "nothing")
        assert caught.value.kind == "io"
        with pytest.raises(tessera.Error, match=r"torch\.optim\.sgd\.SGD, expected an optimizer of tessera"):
            tessera.save_checkpoint(model, torch.optim.SGD(model.parameters()), folder, 3)
        assert_same_dicts(model.state_dict(), before)

    def test_what_would_be_lost_is_named(self, world: Any, folder: pathlib.Path) -> None:
        """Ignored parameters and extra state, which the format does not hold, are refused; nothing is written."""
        model = Mlp(WIDTH)
        fully_shard(model, ignored_params=[model.layers[0].bias])
        with pytest.raises(tessera.Error, match=r"found layers\.0\.bias, which sharding does not know"):
            tessera.save_checkpoint(model, AdamW(model), folder, 0)
        other = fully_shard(nn.Sequential(Counter(), nn.Linear(WIDTH, WIDTH)))
        with pytest.raises(tessera.Error, match=r"found 0\._extra_state"):
            tessera.save_checkpoint(other, AdamW(other), folder, 0)
        assert not folder.exists()

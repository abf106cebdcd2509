"""Whole state dicts of models compared with those of plain ones, both ways, and the options of PyTorch's functions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import tessera
import torch
from states import WIDTH, Counter, assert_same_dicts, mse
from support import MLP_UNITS, Mlp, assert_bits, drawn, shard_layers
from tessera import AdamW, MixedPrecisionPolicy, StateDictOptions, fully_shard
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as upstream


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
        """A buffer that a lenient load misses keeps the digits with which it was loaded, next to a class that loads by
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
        """Two values for one tied parameter are named: a plain module takes the last silently."""
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
        """Rank 0's dicts are loaded everywhere, for all that others bring: tensors of any dtype, and other values."""
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

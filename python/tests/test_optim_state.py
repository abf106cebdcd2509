"""Whole states of optimizers compared with those of plain ones, both ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tessera
import torch
from states import OPTIMIZERS, WIDTH, advance, mse, stepped
from support import MLP_UNITS, Mlp, assert_bits, shard_layers
from tessera import SGD, AdamW, MixedPrecisionPolicy, Muon, fully_shard
from torch import nn
from torch.distributed.checkpoint import state_dict as upstream


class TestOptimizers:
    """Optimizer states of shards and of whole parameters are one format."""

    @pytest.mark.parametrize("name", list(OPTIMIZERS))
    def test_interchange(self, world: Any, name: str) -> None:
        """The dict has the bits of the plain model's; each side resumes from the other's, by name and by number."""
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
        # The plain side resumes from the sharded one's dict, then the sharded one, made again, from the plain one's.
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
        """State of four units continues in one unit, from a learning rate that a scheduler has set."""
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
        ("dtype", "rest"), [(torch.bfloat16, "master_remainder"), (torch.float16, "master")], ids=str
    )
    def test_sixteen_bits(self, world: Any, dtype: torch.dtype, rest: str) -> None:
        """Bits that 16-bit shards lack come back; a state without them, as of torch.optim, is taken all the same."""
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
            exact = values[name].float() if rest == "master" else torch.zeros_like(values[name], dtype=torch.int16)
            assert_bits(rest, taken[rest], exact)

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
        """The error that a load raises on one rank, all ranks raise, and nothing has changed on any."""
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
        """Momenta of matrices and moments of the rest continue in another layout."""
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

"""Models of transformers, sharded as they are: no family of Tessera's own knows them.

Small models of seven families, from configs, with a unit a layer and the rest in one. Attention is eager, so that
nothing depends on kernels that add in an order of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import tessera
import torch
from support import Plain, Unitwise, assert_bits, assert_same_gradients, drawn, tokens
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

BFLOAT16 = torch.bfloat16
VOCABULARY = 33
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**SMALL, "tie_word_embeddings": True}),
    "llama": ("LlamaConfig", {**SMALL, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3TextConfig", {**SMALL, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", {**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.1,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmo2": ("Olmo2Config", SMALL),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    ),
}


def model_of(family: str, **changes: Any) -> Any:
    """Returns the family's small model for causal language, with weights that are drawn."""
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**{**values, **changes}, attn_implementation="eager")
    torch.manual_seed(13)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(drawn(8, i, shape=parameter.shape) * 0.05)
    return model.train()


def layers_of(model: Any) -> list[str]:
    """Returns the paths of the decoder's layers."""
    prefix = "transformer.h" if hasattr(model, "transformer") else "model.layers"
    return [f"{prefix}.{i}" for i in range(len(model.get_submodule(prefix)))]


def shard(model: Any, **options: Any) -> None:
    """Makes a unit of each layer, and of the rest."""
    for path in layers_of(model):
        fully_shard(model.get_submodule(path), **options)
    fully_shard(model, **options)


def loss_of(model: Any, rank: int, step: int = 0) -> Tensor:
    """Returns the loss that transformers computes itself, of a rank's tokens."""
    ids = tokens(31, step, rank, shape=(2, 7), below=VOCABULARY - 3) + 3
    torch.manual_seed(step + rank)
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_losses_and_gradients_of_the_plain_model(world: Any, family: str, recompute: bool) -> None:
    """In float32, bit for bit, also with gradient_checkpointing_enable (non-reentrant) around the units."""
    model = model_of(family)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    unitwise = Unitwise(model, world.size, units=[*layers_of(model), ""])
    plain = Plain(model, world.size)
    shard(model)
    for step in range(2):
        loss = loss_of(model, world.rank, step)
        loss.backward()
        losses = unitwise.backward(lambda one, rank, at=step: loss_of(one, rank, at))
        unitwise.reduce()
        assert_bits("loss", loss, losses[world.rank])
        assert_same_gradients(model, unitwise)
        # Three addends of a residual stream have another order without units.
        plain.backward(lambda one, rank, at=step: loss_of(one, rank, at))
        assert_same_gradients(model, plain, bound=1e-6)
        model.zero_grad()
        unitwise.zero_grad()
        plain.zero_grad()


def cast_results(module: nn.Module, _arguments: Any, result: Tensor) -> Tensor:
    """A hook: transformers' own norms give the dtype of their weight, which the next product does not take."""
    return result.to(BFLOAT16)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_bfloat16_layers_with_norms_pinned_to_float32_have_the_bits_of_copies_cast_by_hand(
    world: Any, family: str
) -> None:
    """param_dtype bf16, and a rule that pins every norm: gradients arrive in two dtypes in one unit."""
    model = model_of(family)
    units = [*layers_of(model), ""]

    def compute(name: str) -> torch.dtype:
        return torch.float32 if "norm" in name else BFLOAT16

    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_hook(cast_results)
    unitwise = Unitwise(model, world.size, units=units, compute=compute, cast=lambda unit: BFLOAT16)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BFLOAT16, rules=[Rule("*norm", pin=True)]))
    loss = loss_of(model, world.rank)
    loss.backward()
    assert_bits("loss", loss, unitwise.backward(loss_of)[world.rank])
    unitwise.reduce()
    assert_same_gradients(model, unitwise)
    computes = {one.compute for one in model.contract().parameters}
    assert computes == {BFLOAT16, torch.float32}


def test_a_tied_head_keeps_its_plain_names_and_its_state_dict_loads_into_a_plain_model(world: Any) -> None:
    """qwen3 with tied embeddings, after a step of torch's AdamW on shards."""
    model = model_of("qwen3")
    fresh = model_of("qwen3")
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    shard(model)
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, world.rank).backward()
    optimizer.step()
    whole = model.state_dict()
    assert list(whole) == keys
    fresh.load_state_dict(whole)
    with torch.no_grad():
        assert_bits("loss", loss_of(model, 0, 1), loss_of(fresh, 0, 1))
    for name, value in tessera.full_parameters(model):
        assert_bits(name, value, whole[name])


def test_generation_with_a_cache_gives_the_plain_tokens(world: Any) -> None:
    """generate() calls the sharded forward as often on every rank, with a cache object among its arguments."""
    model = model_of("llama").eval()
    plain = model_of("llama").eval()
    shard(model)
    ids = tokens(5, shape=(1, 4), below=VOCABULARY - 3) + 3
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        expected = plain.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(found, expected)

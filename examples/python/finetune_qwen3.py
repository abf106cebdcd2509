#!/usr/bin/env python3
"""Trains transformers' Qwen3 in mixed dtypes, saves a checkpoint, and resumes from it when it is run again.

    torchrun --standalone --nproc-per-node 2 examples/python/finetune_qwen3.py --steps 40
    python examples/python/finetune_qwen3.py                         (one rank)
    ... --model FOLDER --data FILE.jsonl --export FOLDER             (a model of the hub, your text)

needs the packages `tessera` (docs/python.md, Installing) and `transformers`. Without --model the model is a small one
of random weights that reads bytes, and without --data it learns sums ("17 plus 25 is 42."). --data is a text file, or
*.jsonl with a key "text"; --export writes a folder that transformers loads. Parameters are stored in fp32; layers
compute in bf16 and norms in fp32; gradients are summed in fp32. Every layer is a unit. At the end the checkpoint is
loaded into a second model, which has the same loss.
"""

import argparse
import json
import pathlib
import random

import tessera
import torch
import transformers
from tessera import MixedPrecisionPolicy, Rule, fully_shard
from torch import Tensor, nn


def small_config() -> transformers.Qwen3Config:
    """Returns the configuration of a model that reads bytes."""
    return transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def plain_model(folder: str | None) -> transformers.PreTrainedModel:
    """Returns the model of a folder, or a small one; the same values on every rank."""
    if folder is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(small_config()).float()


def sharded(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Makes a unit of each layer, and of the model with what is left; returns the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, rules=[Rule("*norm", pin=True)])
    for name, module in model.named_modules():
        if name.endswith("norm"):  # computes in fp32, and the products behind it in bf16
            module.register_forward_hook(lambda _module, _inputs, result: result.to(torch.bfloat16))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def texts_of(path: str | None) -> list[str]:
    """Returns the texts of a file, or sums."""
    if path is None:
        drawn = random.Random(0)
        pairs = [(drawn.randrange(50), drawn.randrange(50)) for _ in range(4000)]
        return [f"{a} plus {b} is {a + b}.\n" for a, b in pairs]
    text = pathlib.Path(path).read_text(encoding="utf-8")
    return [json.loads(line)["text"] for line in text.splitlines()] if path.endswith(".jsonl") else [text]


def tokens_of(arguments: argparse.Namespace) -> Tensor:
    """Returns all tokens in a row: by the folder's tokenizer, or bytes."""
    texts = texts_of(arguments.data)
    if arguments.model is None:
        return torch.tensor(list("".join(texts).encode()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"] + end])


def batch_of(tokens: Tensor, index: int, rank: int, arguments: argparse.Namespace) -> Tensor:
    """Returns [rows, sequence] tokens: other ones for every step and rank, the same in every run."""
    drawn = torch.Generator().manual_seed(1_000_003 * index + rank)
    starts = torch.randint(0, len(tokens) - arguments.sequence, (arguments.rows,), generator=drawn)
    return torch.stack([tokens[start : start + arguments.sequence] for start in starts.tolist()])


def optimizer_of(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Returns AdamW over the shards, and a rate that rises for a tenth of the steps, then falls to a tenth."""
    optimizer = tessera.AdamW(model, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, no_decay=["*norm"])
    rise = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, 1.0 - 0.9 * max(0, step - rise) / max(1, steps - rise))
    )
    return optimizer, scheduler


def held_out_loss(model: nn.Module, tokens: Tensor, world: tessera.World, arguments: argparse.Namespace) -> float:
    """Returns the mean over the ranks on batches that no step has."""
    model.eval()
    with torch.no_grad():
        ids = batch_of(tokens, 1_000_000, world.rank, arguments)
        loss = model(input_ids=ids, labels=ids).loss.float()
    model.train()
    return (world.all_reduce(loss) / world.size).item()


def main() -> None:
    """Trains, saves, and loads what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder as the hub has it")
    parser.add_argument("--data", help="a text file, or *.jsonl with a key text")
    parser.add_argument("--steps", type=int, default=40, help="in this run")
    parser.add_argument("--rows", type=int, default=8, help="of a rank and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--checkpoint", default="outputs/finetune_qwen3", help="a folder")
    parser.add_argument("--export", help="a folder for transformers, written at the end")
    arguments = parser.parse_args()

    world = tessera.init()
    tokens = tokens_of(arguments)
    model = sharded(plain_model(arguments.model)).train()
    done = 0
    optimizer, scheduler = optimizer_of(model, arguments.steps)
    if tessera.has_checkpoint(arguments.checkpoint):
        done = tessera.load_checkpoint(model, optimizer, arguments.checkpoint).step
        if world.rank == 0:
            print(f"resuming from step {done}, saved in {arguments.checkpoint}")
    elif world.rank == 0:
        print(model.contract())

    count = arguments.micro_batches
    for step in range(done, done + arguments.steps):
        total = torch.zeros(())
        for part in range(count):
            model.set_requires_gradient_sync(part + 1 == count)
            ids = batch_of(tokens, count * step + part, world.rank, arguments)
            loss = model(input_ids=ids, labels=ids).loss / count
            loss.backward()
            total += loss.detach().float()
        norm = tessera.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = world.all_reduce(total) / world.size
        if world.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {mean.item():.4f}  norm {norm.item():.3f}", flush=True)

    done += arguments.steps
    tessera.save_checkpoint(model, optimizer, arguments.checkpoint, done)
    before = held_out_loss(model, tokens, world, arguments)

    again = sharded(plain_model(arguments.model)).train()
    step = tessera.load_checkpoint(again, optimizer_of(again, arguments.steps)[0], arguments.checkpoint).step
    after = held_out_loss(again, tokens, world, arguments)
    if world.rank == 0:
        print(f"step {step} loaded back: held-out loss {after:.5f}, before {before:.5f}")
    if (step, after) != (done, before):
        raise SystemExit("the checkpoint does not give what was saved")

    if arguments.export:
        options = tessera.StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = tessera.get_model_state_dict(model, options=options)  # empty on other ranks than 0
        if world.rank == 0:
            plain_model(arguments.model).save_pretrained(arguments.export, state_dict=whole)
            print(f"exported to {arguments.export}")


if __name__ == "__main__":
    main()

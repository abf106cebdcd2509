#!/usr/bin/env python3
"""PyTorch's side of bench/context_compare: the dense model of bench/fsdp2_compare.py in fp32, its
rows cut over the ranks of context parallelism.

    .venv/bin/python bench/context_compare.py --folder DIR [--sequence 8192] [--steps 4]
                                              [--rows stream|documents] [--ranks 2]
                                              [--attention parts|mask]
                                              [--allocator tuned|default]

DIR gets, once, what both sides read: `model/` (a Hugging Face folder with the initial weights) and
`row-T.bin` with `.json` and `.docs.bin`: T + 1 random tokens and where documents end in them,
lengths log-normal with a median of 403. Every step trains on that one row, as one document
(stream) or with attention inside of documents. Then the ranks train, a thread each over Gloo, and
one line of JSON is printed: step times, losses, and the most memory of a rank above what it takes
after its imports.

FSDP2 shards over dp_shard x cp, flattened. A row is cut into 2 x ranks parts, of which rank r has
the r-th from the head and the r-th from the tail. In each layer k and v of all positions are
gathered by a differentiable collective, whose backward is a reduce-scatter in fp32, and own queries
go through scaled_dot_product_attention: each part, document by document, with the keys up to its
end, or (mask) all at once with a mask over all keys. Masks are formed once a step for all layers.
Unmasked targets are counted over ranks; labels are shifted before the cut.

torch.distributed.tensor.experimental.context_parallel cannot be the peer. torch 2.13 refuses it on
CPUs: `_scaled_dot_product_flash_attention_for_cpu` has no sharding strategy there, and
FlexAttention no backward.
"""

import argparse
import json
import math
import pathlib
import random
import statistics
import struct
import time

import fsdp2_compare as models
import local_ranks

RANKS = 2
ROWS = ("stream", "documents")
ATTENTION = ("parts", "mask")
ALLOCATORS = ("tuned", "default")
MEDIAN_DOCUMENT, SPREAD = 403, 1.0  # of a log-normal distribution of lengths
MOST_POSITIONS = 1 << 17


def row_of(folder, sequence):
    """The path of the row's tokens."""
    return folder / f"row-{sequence}.bin"


def document_lengths(tokens):
    """Lengths that add up to `tokens`, the same in every call."""
    drawn, lengths, left = random.Random(1), [], tokens
    while left > 0:
        length = max(2, round(drawn.lognormvariate(math.log(MEDIAN_DOCUMENT), SPREAD)))
        if left - length < 2:  # no document of one token
            length = left
        lengths.append(length)
        left -= length
    return lengths


def prepare(folder, sequence):
    """Writes model/ and the row's files unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model/model.safetensors").exists():
        import torch
        torch.manual_seed(0)
        model = models.new_model("dense").float()
        model.config.max_position_embeddings = MOST_POSITIONS
        model.save_pretrained(folder / "model")
    path = row_of(folder, sequence)
    if path.exists():
        return
    tokens = sequence + 1
    drawn, end, ends = random.Random(2), 0, []
    for length in document_lengths(tokens):
        end += length
        ends.append(end)
    path.with_suffix(".json").write_text(json.dumps(
        {"dtype": "uint16", "num_tokens": tokens, "vocab_size": models.VOCABULARY}))
    path.with_suffix(".docs.bin").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    path.write_bytes(struct.pack(f"<{tokens}H",
                                 *(drawn.randrange(models.VOCABULARY) for _ in range(tokens))))


def read_row(arguments):
    """Inputs, targets (-100: none) and the first position of each input's document, [T]."""
    import torch
    path = row_of(arguments.folder, arguments.sequence)
    tokens = torch.tensor(struct.unpack(f"<{arguments.sequence + 1}H", path.read_bytes()))
    inputs, targets = tokens[:-1], tokens[1:].clone()
    starts = torch.zeros(arguments.sequence, dtype=torch.long)
    if arguments.rows == "documents":
        written = path.with_suffix(".docs.bin").read_bytes()
        ends = struct.unpack(f"<{len(written) // 8}Q", written)
        for begin, end in zip((0, *ends), ends):
            starts[begin:end] = begin
            if begin > 0:
                targets[begin - 1] = -100  # a document's first token is no target
    return inputs, targets, starts


class Cut:
    """The row's parts: which of them this rank has, and which of the gathered ones come when."""

    def __init__(self, positions, rank, ranks):
        self.rank, self.ranks, self.count = rank, ranks, 2 * ranks
        if positions % self.count:
            raise SystemExit(f"context_compare: {positions} positions, expected a multiple of "
                             f"{self.count}")
        self.size = positions // self.count
        self.own = self.parts_of(rank)

    def parts_of(self, rank):
        return rank, self.count - 1 - rank

    def range_of(self, part):
        return part * self.size, (part + 1) * self.size

    def take_own(self, row):
        """The own positions of a row, [T] to [n]."""
        import torch
        return torch.cat([row[slice(*self.range_of(part))] for part in self.own])

    def place_of(self, part):
        """Rank and which of its halves."""
        return (part, 0) if part < self.ranks else (self.count - 1 - part, 1)


def visible(begin, end, first, last, starts):
    """The mask of queries [begin, end) over keys [first, last), as attention adds it."""
    import torch
    queries, keys = torch.arange(begin, end).unsqueeze(1), torch.arange(first, last)
    seen = (keys <= queries) & (keys >= starts[begin:end].unsqueeze(1))
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


class ContextAttention:
    """What transformers' layers call: gathers k and v, computes own queries."""

    def __init__(self, cut, group, kind):
        self.cut, self.group, self.kind = cut, group, kind
        self.calls = []

    def see(self, starts):
        """Forms the masks of a step: own queries, keys, mask (None: causal from the first key)."""
        import torch
        cut, size = self.cut, self.cut.size
        if self.kind == "mask":
            parts = [visible(*cut.range_of(part), 0, cut.count * size, starts) for part in cut.own]
            self.calls = [(slice(0, 2 * size), slice(0, cut.count * size), torch.cat(parts))]
            return
        self.calls, offset = [], 0  # of own queries
        for part in cut.own:
            begin, end = cut.range_of(part)
            while begin < end:  # a document's queries after the other's
                first = int(starts[begin])
                stop = begin + int((starts[begin:end] == first).sum())
                mask = None if first == begin else visible(begin, stop, first, stop, starts)
                here = slice(offset, offset + stop - begin)
                self.calls.append((here, slice(first, stop), mask))
                begin, offset = stop, here.stop

    def gathered(self, key, value):
        """[2, B, G, T, D] in the order of positions."""
        import torch
        from torch.distributed import _functional_collectives as collectives
        both = torch.stack((key, value))
        if self.cut.ranks > 1:
            every = collectives.wait_tensor(
                collectives.all_gather_single_autograd(both, gather_dim=0, group=self.group))
        else:
            every = both
        halves = every.unflatten(0, (self.cut.ranks, 2)).unflatten(-2, (2, self.cut.size))
        places = [self.cut.place_of(part) for part in range(self.cut.count)]
        return torch.cat([halves[rank, ..., half, :, :] for rank, half in places], dim=-2)

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **_):
        import torch
        from torch.nn.functional import scaled_dot_product_attention
        if attention_mask is not None:
            raise RuntimeError("context_compare: found a mask of transformers' own, expected none")
        key, value = self.gathered(key, value)
        out = [scaled_dot_product_attention(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], attn_mask=mask,
            is_causal=mask is None, scale=scaling, enable_gqa=True)
            for queries, keys, mask in self.calls]
        return torch.cat(out, dim=2).transpose(1, 2), None


def sharded_model(folder, attention, mesh):
    import torch
    import transformers
    from torch.distributed.fsdp import fully_shard

    transformers.AttentionInterface.register("context", attention)
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="context").train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def resident(key):
    """VmRSS or VmHWM of this process in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) / 1024


def import_all():
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401  (torch.optim does when it is first used)
    import torch.distributed.device_mesh  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401


def train(arguments):
    import_all()
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    local_ranks.join(arguments)
    mesh = init_device_mesh("cpu", (1, arguments.ranks), mesh_dim_names=("dp_shard", "cp"))
    cut = Cut(arguments.sequence, arguments.rank, arguments.ranks)
    attention = ContextAttention(cut, mesh["cp"].get_group(), arguments.attention)
    model = sharded_model(arguments.folder, attention, mesh["dp_shard", "cp"]._flatten("shards"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **models.OPTIMIZER)
    inputs, targets, starts = read_row(arguments)

    def step():
        attention.see(starts)
        own_starts, places = cut.take_own(starts), cut.take_own(torch.arange(arguments.sequence))
        own = cut.take_own(targets)
        count = (own != -100).sum()
        dist.all_reduce(count)
        logits = model(input_ids=cut.take_own(inputs).unsqueeze(0), use_cache=False,
                       position_ids=(places - own_starts).unsqueeze(0)).logits
        loss = torch.nn.functional.cross_entropy(logits[0], own, reduction="sum") / count
        del logits
        (loss * arguments.ranks).backward()  # FSDP2 takes the mean of ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), models.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, milliseconds = [], []
    for _ in range(arguments.steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        milliseconds.append(1e3 * (time.perf_counter() - start))
    peak = resident("VmHWM") - before
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    local_ranks.report(arguments, {
        "step_ms": milliseconds, "loss": losses.tolist(), "peak_mib": peak, "before_mib": before,
        "parameters": sum(p.numel() for p in model.parameters())})
    local_ranks.leave(arguments)


def environment_of(allocator):
    environment = local_ranks.quiet_environment()
    if allocator == "default":
        return {name: environment[name] for name in environment if not name.startswith("MALLOC_")}
    return environment


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--rows", choices=ROWS, default=ROWS[0])
    parser.add_argument("--steps", type=int, default=4,
                        help="the first one is not counted; 0 writes the files alone")
    parser.add_argument("--attention", choices=ATTENTION, default=ATTENTION[0])
    parser.add_argument("--allocator", choices=ALLOCATORS, default=ALLOCATORS[0])
    local_ranks.add_rank_arguments(parser)
    return parser.parse_args()


def main():
    arguments = parse()
    if arguments.rank is not None:
        return train(arguments)
    prepare(arguments.folder, arguments.sequence)
    if arguments.steps == 0:
        return
    passed = ["--folder", arguments.folder, "--sequence", arguments.sequence, "--rows",
              arguments.rows, "--steps", arguments.steps, "--attention", arguments.attention]
    ranks = local_ranks.run_ranks(__file__, passed, arguments.ranks,
                                  environment=environment_of(arguments.allocator))
    slowest = [max(times) for times in zip(*(rank["step_ms"] for rank in ranks))]
    print(json.dumps({
        "median_ms": statistics.median(slowest[1:] or slowest), "step_ms": slowest,
        "loss": ranks[0]["loss"], "peak_mib": [rank["peak_mib"] for rank in ranks],
        "before_mib": [rank["before_mib"] for rank in ranks],
        "parameters": ranks[0]["parameters"]}))


if __name__ == "__main__":
    main()

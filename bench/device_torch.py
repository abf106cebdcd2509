#!/usr/bin/env python3
"""PyTorch's side of bench/fsdp2_compare --device cuda: one rank of FSDP2 on one device.

    python3 bench/device_torch.py --folder DIR --model dense|moe [--size full|tiny] --write
    python3 bench/device_torch.py --folder DIR --model dense|moe [--size full|tiny] [--compile]
                                  [--steps 20] [--rows 2] [--device cuda|cpu]

The model is written out here, so that nothing but torch is needed: Llama, or Qwen3-MoE with
grouped products, under the names of their Hugging Face folders. With --write DIR gets what Tessera
reads: `model/` (config.json, and the initial weights in bf16, which both sides store in fp32) and
`batches.safetensors` (`input_ids`, `labels` [S,B,T], fixed random tokens). Without it the rank
draws the same weights from the same seeds, trains and prints one line of JSON: milliseconds of each
step, losses, peak memory. The steps are queued without waiting for the device and timed by events.
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import tempfile
import time
import zlib

import torch
import torch.nn.functional as F
from torch import nn

from device_shapes import INITIAL_DEVIATION, MAX_NORM, OPTIMIZER, SEED, SHAPES, WARM_UP_STEPS


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def turned(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = linear(shape.hidden, shape.heads * shape.head_dim)
        self.k_proj = linear(shape.hidden, shape.key_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden, shape.key_heads * shape.head_dim)
        self.o_proj = linear(shape.heads * shape.head_dim, shape.hidden)
        if shape.experts:  # Qwen3 norms each head's queries and keys, Llama does not
            self.q_norm = Norm(shape.head_dim, shape.eps)
            self.k_norm = Norm(shape.head_dim, shape.eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        heads = (rows, length, -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v,
                                               is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = linear(shape.hidden, shape.inner)
        self.up_proj = linear(shape.hidden, shape.inner)
        self.down_proj = linear(shape.inner, shape.hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertWeights(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, 2 * shape.inner, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.inner))

    def forward(self, x, ends):
        both = torch._grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class Experts(nn.Module):
    """Order, ends and weights are formed on the device; the host reads nothing."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.gate = linear(shape.hidden, shape.experts)
        self.experts = ExpertWeights(shape)

    def forward(self, x):
        chosen = self.shape.chosen
        tokens = x.reshape(-1, self.shape.hidden)
        share, expert = F.softmax(self.gate(tokens).float(), dim=-1).topk(chosen, dim=-1)
        share = (share / share.sum(dim=-1, keepdim=True)).to(x.dtype)
        sorted_experts, order = expert.flatten().sort(stable=True)
        numbers = torch.arange(self.shape.experts, device=x.device)
        ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        rows = self.experts(tokens.index_select(0, order // chosen), ends)
        rows = rows.index_select(0, back).view(-1, chosen, self.shape.hidden)
        return torch.bmm(share.unsqueeze(1), rows).view_as(x)


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Experts(shape) if shape.experts else Mlp(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)


def mean_loss(logits, labels):
    """Position t predicts labels[t + 1]."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.model = Body(shape)
        self.lm_head = linear(shape.hidden, shape.vocabulary)

    def forward(self, ids, labels, cos, sin):
        """The mean loss."""
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return mean_loss(self.lm_head(self.model.norm(x)).float(), labels)


def rope_tables(shape, device):
    powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(shape.sequence, dtype=torch.float32, device=device),
                         shape.theta ** -powers)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def initial(name, shape, device):
    """The first values of a parameter, by its name alone; norms start at one."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    drawn = torch.Generator(device).manual_seed(SEED + zlib.crc32(name.encode()))
    return torch.randn(shape, generator=drawn, device=device).mul_(INITIAL_DEVIATION).bfloat16()


def on_meta(shape):
    with torch.device("meta"):
        return Model(shape)


def in_folder(name, size):
    """The tensors of a Hugging Face folder that a parameter makes: name, shape, how to cut."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, size, lambda whole: whole)]
    stem, last = name.rsplit(".", 1)
    parts = []
    for expert in range(size[0]):
        if last == "down_proj":
            parts.append((f"{stem}.{expert}.down_proj.weight", size[1:], lambda w, e=expert: w[e]))
            continue
        inner = size[1] // 2
        for half, word in enumerate(("gate", "up")):
            cut = slice(half * inner, (half + 1) * inner)
            parts.append((f"{stem}.{expert}.{word}_proj.weight", (inner, size[2]),
                          lambda w, e=expert, c=cut: w[e, c]))
    return parts


def write_safetensors(path, tensors):
    """tensors: (name, dtype's name in the format, bytes an element, shape, callable) in order."""
    header, end = {}, 0
    for name, dtype, width, size, _ in tensors:
        begin, end = end, end + width * math.prod(size)
        header[name] = {"dtype": dtype, "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for *_, make in tensors:
            tensor = make().contiguous().cpu()
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def batches(shape, steps, rows):
    drawn = torch.Generator().manual_seed(SEED)
    return torch.randint(0, shape.vocabulary, (steps, rows, shape.sequence), generator=drawn)


def write(arguments, shape):
    """What Tessera reads, unless it is there; config.json last: with it the folder is complete."""
    model = arguments.folder / "model"
    config = json.dumps(shape.config_json(), indent=2)
    if (model / "config.json").exists() and (model / "config.json").read_text() == config:
        return
    (model / "config.json").unlink(missing_ok=True)
    model.mkdir(parents=True, exist_ok=True)
    whole = {}  # the parameter that is being written

    def parameter(name, size):
        if name not in whole:
            whole.clear()
            whole[name] = initial(name, size, arguments.device).cpu()
        return whole[name]

    tensors = [(part, "BF16", 2, part_size,
                lambda n=name, s=value.shape, c=cut: c(parameter(n, s)))
               for name, value in on_meta(shape).named_parameters()
               for part, part_size, cut in in_folder(name, tuple(value.shape))]
    write_safetensors(model / "model.safetensors", tensors)
    (model / "config.json").write_text(config)


def write_batches(arguments, shape):
    ids = batches(shape, arguments.steps, arguments.rows)
    write_safetensors(arguments.folder / "batches.safetensors",
                      [(name, "I64", 8, ids.shape, lambda: ids)
                       for name in ("input_ids", "labels")])


class Clock:
    """Marks between steps: events of the device, or the host's time."""

    def __init__(self, device):
        self.on_device, self.marks = device.type == "cuda", []

    def mark(self):
        if self.on_device:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self):
        pairs = list(zip(self.marks, self.marks[1:]))
        if not self.on_device:
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


def sharded_model(shape, device, compiled):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = on_meta(shape)
    layers = model.model.layers
    if compiled:
        for index in range(len(layers)):
            layers[index] = torch.compile(layers[index], fullgraph=True)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace("_orig_mod.", "")
            parameter.to_local().copy_(initial(name, parameter.shape, device))
    return model


def train(arguments, shape):
    import torch.distributed as dist

    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as meet:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                init_method=f"file://{meet}/store", rank=0, world_size=1,
                                **({"device_id": device} if device.type == "cuda" else {}))
        result = train_in_group(arguments, shape, device)
        dist.destroy_process_group()
    print(json.dumps(result))


def train_in_group(arguments, shape, device):
    model = sharded_model(shape, device, arguments.compile)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    ids = batches(shape, arguments.steps, arguments.rows).to(device)
    cos, sin = rope_tables(shape, device)
    losses, norms, clock = [], [], Clock(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock.mark()
    for index in range(arguments.steps):
        loss = model(ids[index], ids[index], cos, sin)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if index < WARM_UP_STEPS:
            norms.append(norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        del loss
        clock.mark()
    milliseconds = clock.milliseconds()
    result = {"step_ms": milliseconds, "loss": torch.stack(losses).tolist(),
              "grad_norm": torch.stack(norms).tolist(), "torch": torch.__version__,
              "parameters": sum(parameter.numel() for parameter in model.parameters())}
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
        result["peak_device_mib"] = torch.cuda.max_memory_allocated() / 2**20
        result["peak_device_reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=SHAPES["full"], default="dense")
    parser.add_argument("--size", choices=SHAPES, default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2, help="of a step")
    parser.add_argument("--compile", action="store_true", help="torch.compile for each layer")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.size][arguments.model]
    if not arguments.write:
        # As `tessera train` asks for it. Read when CUDA's allocator is first used.
        if not os.environ.keys() & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        return train(arguments, shape)
    write(arguments, shape)
    write_batches(arguments, shape)


if __name__ == "__main__":
    main()

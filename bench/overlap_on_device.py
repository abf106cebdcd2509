"""Forward overlapped with backward on one card: what pipeline.overlap hides, and that it changes no bit.

    python3 bench/overlap_on_device.py --tessera PATH --program PATH [--device cuda] [--small]

1. Bits: two processes that share the card over Gloo, Paired1F1B, ep 2, fp32 and bf16: losses, norms
   and checkpoints with and without overlap.
2. Time: one process that stands for one rank of two (bench/overlap_on_device.cpp), each exchange of
   2 ms on the group's stream: median step with, without, and with no delay (alternating rounds).
   Bars: with / without at most 0.75; of what exchanges add without, 0.8 hidden.
3. Memory of the same runs: overlap holds one exchange more, at most X = 2 T K H c f bytes (T tokens,
   K experts a token, H width, c bytes an element, f imbalance: 2 ranks that send alike, so at most 2).

--small: a few tokens, for a try on a CPU, where nothing is delayed and no bar holds. Exit codes: 0,
1 where a bar is missed or a run fails, 2 where launches would wait for each other
(CUDA_DEVICE_MAX_CONNECTIONS=1), 3 where a bit differs.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

STEPS, WARM_UP, ROUNDS = 5, 3, 3
DELAY_MS, BAR, HIDDEN_BAR, IMBALANCE = 2.0, 0.75, 0.8, 2


def model(small):
    wide = 64 if small else 2048
    return {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": wide,
        "num_hidden_layers": 4, "num_attention_heads": wide // 32, "num_key_value_heads": 2,
        "head_dim": 32 if small else 128, "intermediate_size": wide, "vocab_size": 512,
        "tie_word_embeddings": False, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": wide // 2, "norm_topk_prob": True, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }


class Bench:
    def __init__(self, arguments, folder):
        self.arguments, self.folder, self.failed = arguments, folder, 0
        self.text = folder / "text.txt"
        drawn = random.Random(1)
        self.text.write_text(" ".join(str(drawn.randrange(10**6)) for _ in range(200000)))

    def config(self, name, small, rows, seq_len, **keys):
        """The path of a configuration of 4 layers, and where its run goes."""
        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        (self.folder / f"{name}.json").write_text(json.dumps(model(small)))
        all_keys = {
            "job.dump_folder": str(run), "model.config": str(self.folder / f"{name}.json"),
            "data.path": [str(self.text)], "optimizer.lr": 1e-3,
            "training.steps": STEPS + WARM_UP, "debug.seed": 1,
            "training.seq_len": seq_len, "training.local_batch_size": rows,
            "training.global_batch_size": 16 * rows, "checkpoint.enable": False,
            "parallelism.data_parallel_shard_degree": 2, "parallelism.expert_parallel_degree": 2,
            "pipeline.schedule": "Paired1F1B",
        } | {key.replace("__", "."): value for key, value in keys.items()}
        sections = {}
        for key, value in all_keys.items():
            section, _, key = key.rpartition(".")
            sections.setdefault(section, {})[key] = value
        path = self.folder / f"{name}.toml"
        path.write_text("".join(
            (f"[{section}]\n" if section else "") + "".join(
                f"{key} = {json.dumps(value)}\n" for key, value in of.items())
            for section, of in sorted(sections.items())))
        return path, run

    def call(self, command):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([str(each) for each in command], env=environment, text=True,
                              capture_output=True, timeout=self.arguments.seconds)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def bits_of(self, dtype, overlap):
        path, run = self.config(f"bits-{dtype}-{overlap}", True, 2, 64, **{
            "pipeline__overlap": overlap, "precision__param_dtype": dtype,
            "comm__backend": "gloo", "checkpoint__enable": True,
            "checkpoint__interval": STEPS + WARM_UP, "device": self.arguments.device})
        self.call([self.arguments.tessera, "train", path, "--nproc", 2])
        lines = [json.loads(line) for line in (run / "metrics/metrics.jsonl").read_text().splitlines()]
        metrics = [[line.get("loss"), line.get("grad_norm")] for line in lines]
        weights = {str(each.relative_to(run)): each.read_bytes()
                   for each in sorted((run / "checkpoint").rglob("*.safetensors"))}
        return metrics, weights

    def bits(self):
        for dtype in ("float32", "bfloat16"):
            overlapped, in_turn = self.bits_of(dtype, "experts"), self.bits_of(dtype, "off")
            if not overlapped[1] or overlapped != in_turn:
                print(f"bits, {dtype}: differ, or no checkpoint was written")
                return 3
            print(f"bits, {dtype}: {len(overlapped[0])} lines of metrics and {len(overlapped[1])} files of "
                  "weights are the same", flush=True)
        return 0

    def measure(self):
        small = self.arguments.small
        rows, seq_len = (1, 64) if small else (4, 4096)
        sides = {"with": ("experts", DELAY_MS), "without": ("off", DELAY_MS), "no delay": ("off", 0)}
        times, losses, peaks = {side: [] for side in sides}, {}, {}
        for number in range(1 if small else ROUNDS):
            for side in sorted(sides, reverse=number % 2 == 1):
                overlap, delay = sides[side]
                path, _ = self.config("time", small, rows, seq_len, **{
                    "pipeline__overlap": overlap, "precision__param_dtype": "bfloat16"})
                found = json.loads(self.call([self.arguments.program, self.arguments.device, delay,
                                              WARM_UP, path]).splitlines()[-1])
                times[side].append(statistics.median(found["step_ms"]))
                losses[side], peaks[side] = found["loss"], found["peak_bytes"]
        if len({tuple(each) for each in losses.values()}) != 1:
            print("time: losses differ")
            return 3
        on, off, none = (statistics.median(times[side]) for side in sides)
        hidden = (off - on) / max(off - none, 1e-9)
        self.row("step with / without overlap", f"{on:.1f} / {off:.1f} ms", on / off, on / off <= BAR)
        self.row("hidden of what exchanges add", f"{off - on:.1f} of {off - none:.1f} ms", hidden,
                 hidden >= HIDDEN_BAR)
        of_model = model(small)
        most = (2 * rows * seq_len * of_model["num_experts_per_tok"] * of_model["hidden_size"] * 2
                * IMBALANCE)
        more = peaks["with"] - peaks["without"]
        self.row("memory that overlap adds, MiB", f"{more / 2**20:.1f} of at most {most / 2**20:.1f}",
                 more / most, more <= most)
        return self.failed

    def row(self, what, found, ratio, holds):
        if not holds and not self.arguments.small:
            self.failed = 1
        missed = '' if holds or self.arguments.small else '  missed'
        print(f"{what:32} {found:32} {ratio:8.3f}{missed}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tessera", type=pathlib.Path, required=True)
    parser.add_argument("--program", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=int, default=100, help="of each run")
    arguments = parser.parse_args()
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    print(f"CUDA_DEVICE_MAX_CONNECTIONS: {connections or 'not set'}")
    if connections == "1":
        print("overlap: found 1, with which no stream passes another one; unset it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, pathlib.Path(folder))
        return bench.bits() or bench.measure()


if __name__ == "__main__":
    sys.exit(main())

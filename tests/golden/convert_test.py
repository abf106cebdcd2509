#!/usr/bin/env python3
"""What `tessera convert` writes, as transformers and safetensors read it.

A part of the folders and forms; all of them with TESSERA_FULL=1 (`scripts/full families`). Run by ctest with
TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77 (skipped) where `transformers` is missing, as with TESSERA_TORCH.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import load_file
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

DATA = pathlib.Path(os.environ["TESSERA_TEST_DATA"])
FOLDERS = ("qwen3-fp32", "qwen3-mixed", "llama-fp32", "llama-mixed", "qwen2-mixed", "mistral-fp32", "olmo2-fp32", "olmo2-mixed", "granite-mixed", "smollm3-fp32", "phi3-fp32", "phi4-mini-fp32", "gemma3-text-fp32", "gemma3-text-mixed", "deepseek-v2-fp32", "deepseek-v2-group-mixed",
           "deepseek-v3-mixed", "glm4-moe-fp32", "llama4-text-mixed", "qwen3-next-fp32", "qwen3-next-mixed", "qwen3-5-text-mixed",
           "nemotron-h-fp32", "nemotron-h-mixed")
FLOAT32 = ("--precision.param_dtype", "float32", "--precision.storage_dtype", "float32")
# From a second fp32 implementation, in the README of the reference data.
LOGITS_BOUND = 5e-5
GROUP_LOGITS_BOUND = 1e-4  # of the full DeepSeek V2
FULL = os.environ.get("TESSERA_FULL") == "1"
# Keys of published configs that transformers carries along without reading them.
HUB_ONLY = ("moe_layer_freq", "scoring_func", "topk_method")


def in_turn(items, parts, number):
    """Every `parts`th, as in_turn of tests/proof.h."""
    return items if FULL else items[number % parts::parts]


class Program(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)

    def run_tessera(self, *words, code=0):
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], *map(str, words)], capture_output=True, text=True,
                              cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def gradients(self, model, batch, *more):
        self.run_tessera("gradients", "--model", model, "--batch", batch, "--out", "gradients.safetensors", *more)
        return load_file(self.folder / "gradients.safetensors")

    def train(self, model, data, *more, steps=3, ranks=2):
        seq_len = "" if data.endswith('.safetensors"') else "seq_len = 24\n"  # such a file has its own
        (self.folder / "run.toml").write_text(
            f"[model]\n{model}\n[data]\npath = {data}\n[training]\nsteps = {steps}\n{seq_len}"
            'global_batch_size = 2\n[optimizer]\nlr = 0.01\n[job]\ndump_folder = "run"\n')
        self.run_tessera("train", "run.toml", "--nproc", str(ranks), "--checkpoint.interval", "2", *more)
        return self.folder / f"run/checkpoint/step-{steps}"

    def tensors(self, folder):
        """By name, with the file that each stands in."""
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            if path.name == "reference.safetensors":
                continue
            with safe_open(path, "pt") as file:
                self.assertEqual(file.metadata() or {}, {"format": "pt"} if folder.parent != DATA else
                                 file.metadata() or {})
                for name in file.keys():
                    self.assertNotIn(name, found)
                    found[name] = (file.get_tensor(name), path.name)
        return found

    def logits_of_transformers(self, folder, ids):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(ids).logits

    def assertSameBits(self, found, expected):
        self.assertEqual(found.keys(), expected.keys())
        for name, tensor in expected.items():
            self.assertEqual(found[name].dtype, tensor.dtype, name)
            self.assertTrue(torch.equal(found[name], tensor), name)

    def copy_of(self, name):
        folder = self.folder / name
        folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((DATA / "llama-fp32" / file).read_bytes())
        return folder


class ConvertFolder(Program):
    def test_a_layer_that_the_config_does_not_count_is_refused_and_not_taken_for_one_that_predicts(self):
        from safetensors.torch import save_file
        tensors = load_file(DATA / "glm4-moe-fp32" / "model.safetensors")
        for named, more, layers in (("uncounted", {"num_nextn_predict_layers": 0}, 3), ("no eh_proj", {}, 3),
                                    ("one too many", {}, 2)):
            with self.subTest(named):
                source = self.folder / named
                source.mkdir()
                config = json.loads((DATA / "glm4-moe-fp32" / "config.hub.json").read_text())
                config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1, **more}
                (source / "config.json").write_text(json.dumps(config))
                predicting = {} if named == "no eh_proj" else {f"model.layers.{layers}.eh_proj.weight": torch.ones(2)}
                save_file({**tensors, **predicting}, source / "model.safetensors")
                said = self.run_tessera("convert", source, self.folder / "out", code=2)
                self.assertIn("found the tensor model.layers.3.", said)

    def test_a_folder_comes_out_with_the_same_bytes_and_gradients(self):
        for number, name in enumerate(FOLDERS):
            batch = DATA / name / "reference.safetensors"
            expected = self.gradients(DATA / name, batch)
            for limit, files in in_turn((("5GB", 1), ("60KB", None)), 2, number):
                with self.subTest(name, limit=limit):
                    out = self.folder / f"{name}-{limit}"
                    self.run_tessera("convert", DATA / name, out, "--max-shard-size", limit)
                    before, after = self.tensors(DATA / name), self.tensors(out)
                    self.assertSameBits({k: v[0] for k, v in after.items()}, {k: v[0] for k, v in before.items()})
                    names = {file for _, file in after.values()}
                    if files == 1:
                        self.assertEqual(names, {"model.safetensors"})
                    else:
                        index = json.loads((out / "model.safetensors.index.json").read_text())
                        self.assertGreater(len(names), 1)
                        self.assertEqual(index["weight_map"], {k: v[1] for k, v in after.items()})
                        self.assertEqual(index["metadata"]["total_size"], sum(v[0].nbytes for v in after.values()))
                    self.assertSameBits(self.gradients(out, batch), expected)

    def test_transformers_computes_the_logits_that_tessera_does(self):
        one_of_each_family = {name.rpartition("-")[0]: name for name in FOLDERS}.values()
        for name in FOLDERS if FULL else one_of_each_family:
            with self.subTest(name):
                out = self.folder / name
                self.run_tessera("convert", DATA / name, out, "--max-shard-size", "60KB")
                batch = DATA / name / "reference.safetensors"
                expected = load_file(batch)
                found = self.logits_of_transformers(out, expected["input_ids"])
                ours = self.gradients(DATA / name, batch, *FLOAT32)["logits"]
                bound = GROUP_LOGITS_BOUND if "group" in name else LOGITS_BOUND
                self.assertLess((found - ours).abs().max(), bound)
                self.assertLess((found - expected["logits"]).abs().max(), bound)
                # The config that transformers reads from the folder is what it wrote there once,
                # key for key.
                original = transformers.AutoConfig.from_pretrained(DATA / name).to_dict()
                written = transformers.AutoConfig.from_pretrained(out).to_dict()
                for key in ("_name_or_path", "transformers_version", "head_dim", "partial_rotary_factor", *HUB_ONLY):
                    original.pop(key, None), written.pop(key, None)
                written.get("rope_parameters", {}).pop("type", None)  # how deepseek's configs call rope_type
                for key in ("mrope_interleaved", "mrope_section"):  # of positions that images tell apart
                    original.get("rope_parameters", {}).pop(key, None)
                self.assertEqual(written, original)

    def test_blocks_of_eight_bits_are_read_and_further_layers_left_out(self):
        """A folder as DeepSeek V3 is published: PyTorch's own eight-bit dtype says what it means."""
        from safetensors.torch import save_file
        source = self.folder / "published"
        source.mkdir()
        config = json.loads((DATA / "deepseek-v3-fp32" / "config.hub.json").read_text())
        config["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                         "weight_block_size": [16, 8]}
        config["num_nextn_predict_layers"] = 1
        (source / "config.json").write_text(json.dumps(config))
        stored, expected = {}, {}
        for name, tensor in load_file(DATA / "deepseek-v3-mixed" / "model.safetensors").items():
            if not name.endswith("proj.weight"):
                stored[name] = expected[name] = tensor
                continue
            rows, columns = tensor.shape
            whole = torch.zeros(-(-rows // 16) * 16, -(-columns // 8) * 8)
            whole[:rows, :columns] = tensor.float()
            blocks = whole.view(whole.shape[0] // 16, 16, whole.shape[1] // 8, 8)
            scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
            wide = scale.repeat_interleave(16, 0).repeat_interleave(8, 1)[:rows, :columns]
            packed = (tensor.float() / wide).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = packed, scale
            expected[name] = (packed.float() * wide).bfloat16()
        for name in ("eh_proj.weight", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
            stored[f"model.layers.3.{name}"] = torch.ones(12, 4)
        save_file(stored, source / "model.safetensors")
        said = subprocess.run([os.environ["TESSERA_PROGRAM"], "convert", source, self.folder / "out"],
                              capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("3 tensors are left out", said.stderr)
        self.assertIn("prediction layer", said.stderr)
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "out").items()}, expected)
        written = json.loads((self.folder / "out/config.json").read_text())
        self.assertNotIn("quantization_config", written)
        self.assertEqual(written["num_nextn_predict_layers"], 0)
        self.assertEqual(written["torch_dtype"], "bfloat16")
        # Blocks are rounded to bfloat16: no equals.
        lines = self.run_tessera("convert", source, self.folder / "out", "--verify").splitlines()
        said = dict(line[1:].split("': ", 1) for line in lines[:-1])
        kinds = {torch.bfloat16: "equal, bfloat16", torch.float32: "equal, float32",
                 torch.float8_e4m3fn: "cast, float8_e4m3fn to bfloat16"}
        self.assertEqual(said, {name: kinds[stored[name].dtype] for name in expected})
        casts = sum(name.endswith("proj.weight") for name in expected)
        self.assertTrue(lines[-1].endswith(f" {casts} cast, 0 changed; 3 of the source left out"), lines[-1])
        ids = load_file(DATA / "deepseek-v3-mixed" / "reference.safetensors")["input_ids"]
        self.assertTrue(self.logits_of_transformers(self.folder / "out", ids).isfinite().all())

    def test_the_layer_behind_the_last_of_glm_is_left_out(self):
        from safetensors.torch import save_file
        source, reference = self.folder / "published", DATA / "glm4-moe-fp32"
        source.mkdir()
        config = json.loads((reference / "config.hub.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (source / "config.json").write_text(json.dumps(config))
        tensors = load_file(reference / "model.safetensors")
        further = {f"model.layers.{config['num_hidden_layers']}.{name}": torch.ones(12, 4)
                   for name in ("eh_proj.weight", "enorm.weight", "mlp.gate.weight", "shared_head.norm.weight")}
        save_file({**tensors, **further}, source / "model.safetensors")
        said = subprocess.run([os.environ["TESSERA_PROGRAM"], "convert", source, self.folder / "out"],
                              capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("4 tensors are left out", said.stderr)
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "out").items()}, tensors)
        self.assertEqual(json.loads((self.folder / "out/config.json").read_text())["num_nextn_predict_layers"], 0)

    def test_the_prediction_layer_of_qwen3_next_is_left_out(self):
        """As the hub has it: under names of its own, which transformers skips."""
        from safetensors.torch import save_file
        source, reference = self.folder / "published", DATA / "qwen3-next-mixed"
        source.mkdir()
        shutil.copy(reference / "config.hub.json", source / "config.json")
        tensors = load_file(reference / "model.safetensors")
        further = {f"mtp.{name}": torch.ones(12, 4)
                   for name in ("fc.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")}
        save_file({**tensors, **further}, source / "model.safetensors")
        said = subprocess.run([os.environ["TESSERA_PROGRAM"], "convert", source, self.folder / "out"],
                              capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("3 tensors are left out", said.stderr)
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "out").items()}, tensors)

    def test_gpt2_as_published_is_trained_without_its_dropout_and_exported_with_it(self):
        keys = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
        config = json.loads((DATA / "gpt2-fp32" / "config.hub.json").read_text())
        weights = {}
        for name, values in (("none", {key: 0.0 for key in keys}), ("published", {key: 0.1 for key in keys}),
                             ("absent", {})):
            with self.subTest(name):
                source, batch = self.folder / name, DATA / "gpt2-fp32" / "reference.safetensors"
                source.mkdir()
                (source / "config.json").write_text(
                    json.dumps({**{key: value for key, value in config.items() if key not in keys}, **values}))
                shutil.copy(DATA / "gpt2-fp32" / "model.safetensors", source)
                checkpoint = self.train(f'path = "{source}"', f'"{batch}"')
                log = (self.folder / "run/logs/rank_0.log").read_text()
                said = "attn_pdrop = 0.1, embd_pdrop = 0.1, resid_pdrop = 0.1: trained without dropout"
                self.assertEqual(log.count(said), 0 if name == "none" else 1)
                self.run_tessera("convert", checkpoint, f"{name}-trained")
                self.run_tessera("convert", source, f"{name}-new")
                for made in (f"{name}-trained", f"{name}-new"):
                    written = json.loads((self.folder / made / "config.json").read_text())
                    self.assertEqual({key: written[key] for key in keys}, {key: values.get(key, 0.1) for key in keys})
                weights[name] = load_file(self.folder / f"{name}-trained" / "model.safetensors")
                self.assertSameBits(weights[name], weights["none"])
                shutil.rmtree(self.folder / "run")
        before = load_file(DATA / "gpt2-fp32" / "model.safetensors")
        self.assertFalse(torch.equal(weights["none"]["wpe.weight"], before["wpe.weight"]), "it was trained")

    def test_llama_4_that_sees_images_gives_its_text_model(self):
        from safetensors.torch import save_file
        source, text = self.folder / "whole", DATA / "llama4-text-fp32"
        source.mkdir()
        config = json.loads((text / "config.hub.json").read_text())
        (source / "config.json").write_text(json.dumps({
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": config,
            "vision_config": {"hidden_size": 8}, "image_token_index": 6}))
        tensors = load_file(text / "model.safetensors")
        save_file({**{f"language_model.{name}": tensor for name, tensor in tensors.items()},
                   "vision_model.class_embedding": torch.ones(8)}, source / "model.safetensors")
        said = subprocess.run([os.environ["TESSERA_PROGRAM"], "convert", source, self.folder / "out"],
                              capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("vision_model.class_embedding", said.stderr)
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "out").items()}, tensors)

    def test_a_chosen_dtype_is_every_tensors(self):
        for name, dtype in (("qwen3-mixed", "float32"), ("qwen3-mixed", "bfloat16"), ("llama-fp32", "bfloat16")):
            with self.subTest(name, dtype=dtype):
                out = self.folder / f"{name}-{dtype}"
                self.run_tessera("convert", DATA / name, out, "--dtype", dtype)
                expected = {k: v[0].to(getattr(torch, dtype)) for k, v in self.tensors(DATA / name).items()}
                self.assertSameBits({k: v[0] for k, v in self.tensors(out).items()}, expected)
                self.assertEqual(json.loads((out / "config.json").read_text())["torch_dtype"], dtype)

    def test_tokenizers_and_processors_come_along_and_nothing_else(self):
        source = self.copy_of("source")
        texts = {"tokenizer.json": "{}", "tokenizer_config.json": "[1]", "special_tokens_map.json": "", "vocab.json": "v",
                 "merges.txt": "m", "generation_config.json": "{}", "chat_template.jinja": "c", "tokenizer.model": "t",
                 "spiece.model": "s", "vocab.txt": "w", "added_tokens.json": "{}", "qwen.tiktoken": "q", "tekken.json": "k",
                 "chat_template.json": "{}", "preprocessor_config.json": "{}", "processor_config.json": "p",
                 "video_preprocessor_config.json": "f", "tokenization_own.py": "o", "processing_own.py": "r",
                 "additional_chat_templates/tools.jinja": "a"}
        (source / "additional_chat_templates").mkdir()
        (source / "tokenizer_notes").mkdir()
        others = {"notes.md": "n", "training_args.bin": "t", "modeling_own.py": "m", "configuration_own.py": "c",
                  "additional_chat_templates/notes.md": "n", "tokenizer_notes/tokenizer.json": "t"}
        for file, text in {**texts, **others}.items():
            (source / file).write_text(text)
        self.assertIn(f", {len(texts)} tokenizer file(s) copied", self.run_tessera("convert", source, "out"))
        out = self.folder / "out"
        found = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
        self.assertEqual(found.keys(), texts.keys() | {"config.json", "model.safetensors"})
        for file, text in texts.items():
            self.assertEqual(found[file].read_text(), text)
        (source / "merges.txt").unlink()
        (self.folder / "secret").write_text("s")
        (source / "merges.txt").symlink_to("../secret")
        self.assertIn("merges.txt", self.run_tessera("convert", source, "other", code=2))
        self.assertFalse((self.folder / "other").exists())

    def test_a_tied_head_that_is_stored_all_the_same_is_written_once(self):
        source = self.copy_of("source")
        tensors = load_file(source / "model.safetensors")
        self.assertNotIn("lm_head.weight", tensors)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        from safetensors.torch import save_file
        save_file(tensors, source / "model.safetensors")
        self.run_tessera("convert", source, "out")
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "out").items()},
                            load_file(DATA / "llama-fp32" / "model.safetensors"))

    def test_what_is_there_is_not_overwritten_and_refusals_leave_nothing(self):
        (self.folder / "out").mkdir()
        (self.folder / "out" / "mine").write_text("mine")
        self.assertIn("empty one", self.run_tessera("convert", DATA / "llama-fp32", "out", code=2))
        self.assertIn("--dtype", self.run_tessera("convert", DATA / "llama-fp32", "x", "--dtype", "int8", code=2))
        self.assertIn("--max-shard-size",
                      self.run_tessera("convert", DATA / "llama-fp32", "x", "--max-shard-size", "lots", code=2))
        damaged = self.copy_of("damaged")
        (damaged / "model.safetensors").write_bytes(b"\0" * 100)
        self.run_tessera("convert", damaged, "x", code=2)
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["damaged", "out"])
        (self.folder / "out" / "mine").unlink()
        self.run_tessera("convert", DATA / "llama-fp32", "out")  # an empty folder is as good as none
        self.assertEqual(len(list((self.folder / "out").iterdir())), 2)


class ConvertVerify(Program):
    """Each tensor equal, cast or changed, and what --verify says where somebody changed one."""

    def verify(self, *words, code=0):
        """{tensor: what is said of it} and the last line."""
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], "convert", *map(str, words), "--verify"],
                              capture_output=True, text=True, cwd=self.folder, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        lines = [line for line in done.stdout.splitlines() if "file(s)" not in line]
        return dict(line[1:].split("': ", 1) for line in lines[:-1]), lines[-1]

    def test_every_tensor_of_a_folder_is_equal_or_cast(self):
        for name in (*FOLDERS, "qwen3-moe-mixed", "gpt-oss-mixed", "gpt-oss-mxfp4", "gemma4-mixed"):
            with self.subTest(name):
                said, last = self.verify(DATA / name, f"{name}-new")
                if FULL or name == FOLDERS[0]:  # what is there is only read
                    self.assertEqual(self.verify(DATA / name, f"{name}-new"), (said, last))
                written = {k: v[0] for k, v in self.tensors(self.folder / f"{name}-new").items()}
                self.assertEqual(said, {k: f"equal, {str(v.dtype).removeprefix('torch.')}" for k, v in written.items()})
                self.assertEqual(last, f"{name}-new: {len(written)} equal, 0 cast, 0 changed")
        said, last = self.verify(DATA / "qwen3-mixed", "narrow", "--dtype", "bfloat16", "--max-shard-size", "60KB")
        before = {k: v[0].dtype for k, v in self.tensors(DATA / "qwen3-mixed").items()}
        cast = {k for k, v in before.items() if v == torch.float32}
        self.assertEqual({k for k, v in said.items() if v == "cast, float32 to bfloat16"}, cast)
        self.assertEqual({k for k, v in said.items() if v == "equal, bfloat16"}, before.keys() - cast)
        self.assertEqual(last, f"narrow: {len(before) - len(cast)} equal, {len(cast)} cast, 0 changed")
        said, last = self.verify(DATA / "qwen3-mixed", "narrow", "--dtype", "float32", code=3)
        self.assertEqual(set(said.values()), {"changed, found bfloat16, expected the dtype float32 that was asked for"})
        self.assertEqual(last, f"narrow: 0 equal, 0 cast, {len(before)} changed")
        said, _ = self.verify(DATA / "qwen3-mixed", "wide", "--dtype", "float32")
        self.assertEqual({k for k, v in said.items() if v == "cast, bfloat16 to float32"}, before.keys() - cast)

    def test_what_was_changed_is_named_with_exit_code_3(self):
        from safetensors.torch import save_file
        source = DATA / "llama-fp32"
        self.run_tessera("convert", source, "out")
        weights = self.folder / "out/model.safetensors"
        tensors = load_file(weights)
        kept, bent = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
        flat = tensors[bent].view(-1)
        flat[7:9] = torch.tensor([2.5, -1.25])
        del tensors["model.norm.weight"]
        tensors["model.extra"] = torch.ones(3)
        tensors["model.layers.0.input_layernorm.weight"] = torch.ones(5)
        tensors[kept] = tensors[kept].to(torch.bfloat16)  # rounded as --dtype rounds
        save_file(tensors, weights, metadata={"format": "pt"})
        said, last = self.verify(source, "out", code=3)
        before = load_file(source / "model.safetensors")
        first = before[bent].view(-1)[7].item()
        self.assertRegex(said[bent], rf"\Achanged, 2 of {flat.numel()} elements, the first at 7: found 2.5, expected ")
        self.assertAlmostEqual(float(said[bent].rpartition(" ")[2]), first, delta=1e-5 * abs(first))
        self.assertEqual(said["model.norm.weight"], "changed, missing in what was written")
        self.assertEqual(said["model.extra"], "changed, not a tensor of the source")
        self.assertIn("changed, found the shape [5], expected [", said["model.layers.0.input_layernorm.weight"])
        self.assertEqual(said[kept], "cast, float32 to bfloat16")
        others = {k for k in said if said[k] == "equal, float32"}
        self.assertEqual(others, before.keys() - {kept, bent, "model.norm.weight", "model.layers.0.input_layernorm.weight"})
        self.assertEqual(last, f"out: {len(others)} equal, 1 cast, 4 changed")
        self.assertEqual(load_file(weights).keys(), tensors.keys())  # nothing was written
        # One bit, the lowest: no tolerance hides it.
        self.run_tessera("convert", source, "again")
        content = bytearray((self.folder / "again/model.safetensors").read_bytes())
        content[-4] ^= 1
        (self.folder / "again/model.safetensors").write_bytes(content)
        self.assertIn(" 0 cast, 1 changed", self.verify(source, "again", code=3)[1])
        (self.folder / "again/model.safetensors").write_bytes(content[:-1])
        self.assertIn("OUT: ", self.run_tessera("convert", source, "again", "--verify", code=2))

    def test_checkpoints_are_read_again_too(self):
        batch = DATA / "qwen3-mixed" / "reference.safetensors"
        checkpoint = self.train(f'path = "{DATA / "qwen3-mixed"}"', f'"{batch}"')
        said, last = self.verify(checkpoint, "out")
        dtypes = {k: v[0].dtype for k, v in self.tensors(self.folder / "out").items()}
        self.assertEqual(said, {k: "equal, float32" if v == torch.float32 else "cast, float32 to bfloat16"
                                for k, v in dtypes.items()})
        self.verify(DATA / "qwen3-mixed", "out", code=3)  # another model's values

    def test_adapters_and_merged_models_are_read_again_too(self):
        batch = DATA / "qwen3-mixed" / "reference.safetensors"
        checkpoint = self.train(f'path = "{DATA / "qwen3-mixed"}"', f'"{batch}"', "--lora.rank", "2", "--lora.targets",
                                "['q_proj', 'down_proj']")
        said, _ = self.verify(checkpoint, "adapter")
        self.assertEqual({line for line in said.values()}, {"equal, float32"})
        self.assertTrue(all(".lora_" in name for name in said))
        said, _ = self.verify(checkpoint, "merged", "--merged")
        adapted = {k for k in said if "q_proj.weight" in k or "down_proj.weight" in k}
        self.assertEqual({k for k, v in said.items() if v == "cast, float32 to bfloat16"}, adapted)
        self.assertEqual({v.split(",")[0] for k, v in said.items() if k not in adapted}, {"equal"})
        self.verify(DATA / "qwen3-mixed", "merged", code=3)


class ConvertCheckpoint(Program):
    """The same of checkpoints that two ranks wrote."""

    def check_same_model(self, checkpoint, out, batch, bound=LOGITS_BOUND):
        """transformers on what convert wrote, and gradients on either, give the same."""
        ours = self.gradients(checkpoint, batch, *FLOAT32)
        self.assertSameBits(self.gradients(out, batch, *FLOAT32), ours)
        found = self.logits_of_transformers(out, load_file(batch)["input_ids"])
        self.assertLess((found - ours["logits"]).abs().max(), bound)

    def test_a_finetuned_folder_keeps_its_dtypes_and_its_tokenizer(self):
        source = self.copy_of("source")
        (source / "tokenizer.json").write_text("{}")
        batch = DATA / "llama-fp32" / "reference.safetensors"
        checkpoint = self.train('path = "source"', f'"{batch}"', *FLOAT32)
        self.run_tessera("convert", checkpoint, "out", "--max-shard-size", "60KB")
        self.assertTrue((self.folder / "out" / "tokenizer.json").is_file())
        self.assertNotIn("lm_head.weight", self.tensors(self.folder / "out"))
        self.check_same_model(checkpoint, self.folder / "out", batch)
        before = load_file(source / "model.safetensors")
        after = {k: v[0] for k, v in self.tensors(self.folder / "out").items()}
        self.assertEqual(before.keys(), after.keys())
        self.assertFalse(any(torch.equal(before[k], after[k]) for k in before if before[k].ndim == 2))
        # `checkpoint` alone means the latest one.
        self.run_tessera("convert", checkpoint.parent, "latest")
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "latest").items()}, after)

    def test_a_mixed_folder_comes_back_in_the_dtypes_it_had(self):
        batch = DATA / "qwen3-mixed" / "reference.safetensors"
        checkpoint = self.train(f'path = "{DATA / "qwen3-mixed"}"', f'"{batch}"')
        self.run_tessera("convert", checkpoint, "out")
        dtypes = {k: v[0].dtype for k, v in self.tensors(self.folder / "out").items()}
        self.assertEqual(dtypes, {k: v[0].dtype for k, v in self.tensors(DATA / "qwen3-mixed").items()})
        self.assertEqual(set(dtypes.values()), {torch.float32, torch.bfloat16})
        self.run_tessera("convert", checkpoint, "wide", "--dtype", "float32")
        self.check_same_model(checkpoint, self.folder / "wide", batch)
        # Rounded once to what the folder had.
        wide = {k: v[0] for k, v in self.tensors(self.folder / "wide").items()}
        self.assertSameBits({k: v[0] for k, v in self.tensors(self.folder / "out").items()},
                            {k: v.to(dtypes[k]) for k, v in wide.items()})
        # Under the run's own precision a checkpoint computes as the run did: norms in fp32.
        bf16 = self.gradients(checkpoint, batch)
        self.assertSameBits(bf16, self.gradients(checkpoint, batch, "--precision.rule",
                                                 '[{match = ["*norm"], param_dtype = "float32"}]'))
        self.assertFalse(torch.equal(bf16["loss"], self.gradients(checkpoint, batch, *FLOAT32)["loss"]))

    def test_a_byte_model_from_scratch(self):
        (self.folder / "page.txt").write_text("".join(f"line {i} of a page.\n" for i in range(60)))
        (self.folder / "model.json").write_text(json.dumps({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "intermediate_size": 32, "vocab_size": 260, "max_position_embeddings": 64}))
        checkpoint = self.train('config = "model.json"', '"page.txt"')
        said = self.run_tessera("convert", checkpoint, "out")
        self.assertIn("0 tokenizer file(s)", said)
        self.assertEqual(json.loads((self.folder / "out/config.json").read_text())["tessera_tokenizer"], "bytes")
        ids = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(1))
        from safetensors.torch import save_file
        save_file({"input_ids": ids, "labels": ids.clone()}, self.folder / "batch.safetensors")
        self.check_same_model(checkpoint, self.folder / "out", self.folder / "batch.safetensors")
        words = ("--prompt", "line ", "--max-new-tokens", "20")
        text = self.run_tessera("generate", "--model", checkpoint, *words)
        self.assertEqual(self.run_tessera("generate", "--model", "out", *words), text)
        # As ./run proposes: on with the run's own config to another length, from another folder.
        os.rename(self.folder / "page.txt", self.folder / "moved.txt")
        self.run_tessera("train", "run/config.toml", "--nproc", "2", "--training.steps", "5",
                         "--data.path", "moved.txt")
        self.run_tessera("convert", "run/checkpoint", "longer")
        self.check_same_model(self.folder / "run/checkpoint/step-5", self.folder / "longer",
                              self.folder / "batch.safetensors")

    def test_the_folder_that_training_began_with_may_be_gone(self):
        source = self.copy_of("source")
        batch = DATA / "llama-fp32" / "reference.safetensors"
        checkpoint = self.train('path = "source"', f'"{batch}"', *FLOAT32)
        source.rename(self.folder / "elsewhere")
        self.run_tessera("convert", checkpoint, "out")
        self.check_same_model(checkpoint, self.folder / "out", batch)

    def test_an_altered_checkpoint_is_named_and_nothing_is_written(self):
        self.copy_of("source")
        batch = DATA / "llama-fp32" / "reference.safetensors"
        checkpoint = self.train('path = "source"', f'"{batch}"', *FLOAT32)
        file = checkpoint / "rank_1.safetensors"
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
        for words in (("convert", checkpoint, "out"),
                      ("generate", "--model", checkpoint, "--prompt-tokens", "1", "--max-new-tokens", "1")):
            self.assertIn("rank_1.safetensors", self.run_tessera(*words, code=2))
        self.assertFalse((self.folder / "out").exists())


class WritePhi4Mini(Program):
    def test_text_that_outgrows_the_original_context_is_written_as_transformers_writes_it(self):
        source = DATA / "phi4-mini-fp32"  # 16 positions
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        ids = load_file(source / "reference.safetensors")["input_ids"]
        for row, length in ((0, 6), (1, 12), (1, 20)):
            prompt = ids[row:row + 1, :length]
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                      max_new_tokens=12)[0, length:].tolist()
            found = self.run_tessera("generate", "--model", source, "--max-new-tokens", "12", "--prompt-tokens",
                                     ",".join(str(token) for token in prompt[0].tolist()))
            self.assertEqual([int(token) for token in found.strip().split(",")], expected)


if __name__ == "__main__":
    unittest.main(verbosity=1)

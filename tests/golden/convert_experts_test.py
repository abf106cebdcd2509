#!/usr/bin/env python3
"""`tessera convert` of models with experts: tensors under the names of files, for any layout in memory.

A part of the folders; all of them with TESSERA_FULL=1 (`scripts/full families`). Run by ctest with
TESSERA_PROGRAM and TESSERA_TEST_DATA; leaves with 77 (skipped) where `transformers` is missing, as with TESSERA_TORCH.
"""

import json
import unittest

from convert_test import DATA, FLOAT32, LOGITS_BOUND, Program, in_turn, load_file, transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDERS = ("qwen3-moe-fp32", "qwen3-moe-mixed", "gpt-oss-fp32", "gpt-oss-mixed", "mixtral-fp32", "mixtral-mixed")


class ConvertExperts(Program):
    def values(self, folder):
        return {name: tensor for name, (tensor, _) in self.tensors(folder).items()}

    def assertSameConfig(self, out, source):
        original = transformers.AutoConfig.from_pretrained(source).to_dict()
        written = transformers.AutoConfig.from_pretrained(out).to_dict()
        for config in (original, written):
            # The last two stand in the hub's spelling only; what is written is spelled so.
            for key in ("_name_or_path", "transformers_version", "quantization_config",
                        "experts_per_token", "initial_context_length"):
                config.pop(key, None)
        self.assertEqual(written, original)

    def test_a_folder_comes_out_with_the_same_names_bytes_and_gradients(self):
        for name in in_turn(FOLDERS, 2, 0):
            with self.subTest(name):
                out, again = self.folder / name, self.folder / f"{name}-again"
                self.run_tessera("convert", DATA / name, out, "--max-shard-size", "60KB")
                self.run_tessera("convert", out, again)
                expected = self.values(DATA / name)
                self.assertGreater(len(list(out.glob("*.safetensors"))), 1)
                self.assertSameBits(self.values(out), expected)
                self.assertSameBits(self.values(again), expected)
                self.assertSameConfig(out, DATA / name)
                batch = DATA / name / "reference.safetensors"
                gradients = self.gradients(out, batch)
                self.assertSameBits(gradients, self.gradients(DATA / name, batch))
                wanted = {key for key in load_file(batch) if key.startswith("grad/")}
                self.assertEqual({key for key in gradients if key.startswith("grad/")}, wanted)

    def test_a_trained_checkpoint_has_every_expert_under_its_name(self):
        for name in in_turn(FOLDERS, 2, 1):
            with self.subTest(name):
                batch = DATA / name / "reference.safetensors"
                checkpoint = self.train(f'path = "{DATA / name}"', f'"{batch}"', *FLOAT32)
                out = self.folder / "out"
                self.run_tessera("convert", checkpoint, out, "--dtype", "float32")
                ours = self.gradients(checkpoint, batch, *FLOAT32)
                self.assertSameBits(self.gradients(out, batch, *FLOAT32), ours)
                found = self.logits_of_transformers(out, load_file(batch)["input_ids"])
                self.assertLess((found - ours["logits"]).abs().max(), LOGITS_BOUND)
                before, after = self.values(DATA / name), self.values(out)
                self.assertEqual(before.keys(), after.keys())
                still = {key for key in before if (before[key].float() == after[key]).all()}
                self.assertEqual(still, set())
                self.clear("run", "out")

    def clear(self, *names):
        for name in names:
            for path in sorted((self.folder / name).rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            (self.folder / name).rmdir()

    # The stored blocks are the truth, and transformers' values of them.
    def test_packed_experts_are_unpacked_as_transformers_does(self):
        source, out = DATA / "gpt-oss-mxfp4", self.folder / "out"
        self.run_tessera("convert", source, out)
        stored = self.values(source)
        packed = {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}
        self.assertEqual(len(packed), 4)
        expected = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
        for name in packed:
            expected[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        self.assertSameBits(self.values(out), expected)
        self.assertNotIn("quantization_config", json.loads((out / "config.json").read_text()))
        self.assertSameConfig(out, source)
        reference = load_file(source / "reference.safetensors")
        found = self.logits_of_transformers(out, reference["input_ids"])
        self.assertLess((found - reference["logits"]).abs().max(), LOGITS_BOUND)
        # Packed or not, the same model.
        batch = source / "reference.safetensors"
        self.assertSameBits(self.gradients(source, batch, *FLOAT32), self.gradients(out, batch, *FLOAT32))

    def test_packed_experts_that_the_config_does_not_speak_of_are_refused(self):
        folder = self.folder / "silent"
        folder.mkdir()
        config = json.loads((DATA / "gpt-oss-mxfp4/config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((DATA / "gpt-oss-mxfp4/model.safetensors").read_bytes())
        message = self.run_tessera("convert", folder, "out", code=2)
        self.assertIn("found no tensor model.layers.0.mlp.experts.gate_up_proj", message)
        self.assertIn("quantization_config", message)


if __name__ == "__main__":
    unittest.main(verbosity=1)

#!/usr/bin/env python3
"""tests/golden/data as write_data.py writes it: the bytes that transformers wrote, or a refusal."""

import array
import hashlib
import json
import lzma
import pathlib
import shutil
import tempfile
import unittest

import write_data

# Both with shards, of one file more or less.
FOLDERS = ("mistral-fp32", "mistral-mixed")


class WrittenData(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)
        self.out = self.folder / "out"

    def copy_of_stored(self):
        stored = self.folder / "stored"
        for name in FOLDERS:
            shutil.copytree(write_data.STORED / name, stored / name)
        lines = (write_data.STORED / "SHA256SUMS").read_text().splitlines(keepends=True)
        (stored / "SHA256SUMS").write_text("".join(line for line in lines if line.split("  ")[1].startswith("mistral-")))
        return stored

    def refusal(self, stored):
        with self.assertRaises(write_data.Refused) as caught:
            write_data.write(self.out, stored)
        self.assertFalse(self.out.exists())
        return str(caught.exception)

    def test_every_file_has_the_bytes_that_transformers_wrote(self):
        write_data.write(self.out)
        sums = [line.split("  ") for line in (write_data.STORED / "SHA256SUMS").read_text().splitlines()]
        for digest, name in sums:
            self.assertEqual(hashlib.sha256((self.out / name).read_bytes()).hexdigest(), digest, name)
        names = {name for _, name in sums}
        # Each family in both dtypes, and each folder whole.
        folders = {name.split("/")[0] for name in names}
        for name in folders:
            if name != "phi4-mini-fp32":  # the classes of phi3, which has both
                self.assertIn(name.replace("-fp32", "-mixed"), folders)
            self.assertLessEqual({f"{name}/{file}" for file in ("config.json", "config.hub.json", "model.safetensors",
                                                                "reference.json", "reference.safetensors")}, names)
        self.assertGreaterEqual(len(folders), 33)

    def test_what_follows_from_other_files_is_not_stored(self):
        stored = {path.relative_to(write_data.STORED).as_posix() for path in write_data.STORED.rglob("*")}
        for _, name in (line.split("  ") for line in (write_data.STORED / "SHA256SUMS").read_text().splitlines()):
            whole = name.split("/")[0].endswith(("-fp32", "-mxfp4")) and name.count("/") == 1
            kept = whole and "/reference." not in name or name.endswith(".index.json")
            self.assertEqual(name in stored, kept, name)

    def test_values_go_to_the_nearest_and_ties_to_even(self):
        for wide, narrow in ((0x3F800000, 0x3F80), (0x3F807FFF, 0x3F80), (0x3F808000, 0x3F80), (0x3F808001, 0x3F81),
                             (0x3F818000, 0x3F82), (0xBF818000, 0xBF82), (0x3FFFFFFF, 0x4000), (0x80000000, 0x8000)):
            found = array.array("H", write_data.to_bfloat16(array.array("I", [wide]).tobytes()))
            self.assertEqual(found[0], narrow, f"{wide:x}")

    def test_a_changed_file_is_refused_by_name(self):
        def turn_a_bit(path, byte=-1):
            data = bytearray(path.read_bytes())
            data[byte] ^= 1
            path.write_bytes(data)

        def cut(path):
            path.write_bytes(path.read_bytes()[:-100])

        def in_packed(path, change):
            path.write_bytes(lzma.compress(change(lzma.decompress(path.read_bytes()))))

        def move_a_tensor(path):
            index = json.loads(path.read_text())
            first, last = index["weight_map"]["model.norm.weight"], index["weight_map"]["model.embed_tokens.weight"]
            self.assertNotEqual(first, last)
            index["weight_map"]["model.norm.weight"] = last
            path.write_text(json.dumps(index))

        for change, named in (
                (lambda at: turn_a_bit(at / "mistral-fp32/model.safetensors"), "mistral-fp32/model.safetensors"),
                (lambda at: turn_a_bit(at / "mistral-fp32/config.json"), "mistral-fp32/config.json"),
                (lambda at: in_packed(at / "mistral-mixed/reference.safetensors.xz", lambda data: data[:-1] + b"?"),
                 "mistral-mixed/reference.safetensors"),
                (lambda at: in_packed(at / "mistral-mixed/reference.json.xz",
                                      lambda data: data.replace(b'"dtype": "BF16"', b'"dtype": "F32"', 1)),
                 "mistral-mixed/model.safetensors"),
                (lambda at: cut(at / "mistral-mixed/reference.json.xz"), "mistral-mixed/reference.json.xz"),
                (lambda at: move_a_tensor(at / "mistral-mixed/sharded/model.safetensors.index.json"),
                 "mistral-mixed/sharded/model-0000"),
                (lambda at: (at / "mistral-fp32/config.hub.json").write_text("{}"), "mistral-fp32/config.hub.json"),
                (lambda at: (at / "mistral-fp32/more.json.xz").write_bytes(lzma.compress(b"{}")),
                 "mistral-fp32/more.json: found"),
                (lambda at: (at / "mistral-fp32/reference.json.xz").unlink(),
                 "mistral-fp32/reference.json: found no such file")):
            with self.subTest(named):
                stored = self.copy_of_stored()
                change(stored)
                self.assertIn(named, self.refusal(stored))
                shutil.rmtree(stored)

    def test_a_folder_that_it_has_not_written_stays(self):
        self.out.mkdir()
        (self.out / "mine").write_text("mine")
        with self.assertRaisesRegex(write_data.Refused, "has not written"):
            write_data.write(self.out, self.copy_of_stored())
        self.assertEqual((self.out / "mine").read_text(), "mine")

    def test_an_earlier_call_is_replaced(self):
        stored = self.copy_of_stored()
        write_data.write(self.out, stored)
        (self.out / "of-another-time").mkdir()
        write_data.write(self.out, stored)
        self.assertFalse((self.out / "of-another-time").exists())

    def test_a_call_that_was_ended_is_followed_by_a_whole_one(self):
        stored = self.copy_of_stored()
        for left in ("out.new", "out.old"):
            (self.folder / left).mkdir()
            (self.folder / left / "part").write_text("part")
        write_data.write(self.out, stored)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["out", "stored"])

    def test_what_transformers_has_not_written_is_not_stored(self):
        stored = self.copy_of_stored()
        before = write_data.files_of(stored)
        for made in (stored / FOLDERS[0], self.folder / "absent" / FOLDERS[0]):
            with self.assertRaisesRegex(write_data.Refused, "found no reference.json"):
                write_data.store(made, stored)
        self.assertEqual(write_data.files_of(stored), before)

    def test_what_was_written_is_stored_as_it_was(self):
        stored, again = self.copy_of_stored(), self.folder / "again"
        write_data.write(self.out, stored)
        for name in FOLDERS:
            write_data.store(self.out / name, again)
        self.assertEqual((again / "SHA256SUMS").read_text(), (stored / "SHA256SUMS").read_text())
        self.assertEqual(set(write_data.files_of(again)), set(write_data.files_of(stored)))
        write_data.write(self.folder / "second", again)


if __name__ == "__main__":
    unittest.main()

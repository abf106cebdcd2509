"""Our families' tables of parameters that stay in fp32 are those of transformers' classes: the strict
list under every dtype, the other one under float16 only. Skipped where transformers is not installed."""

import json
import os
import subprocess
import sys
import unittest

try:
    import transformers
except ImportError:
    sys.exit(77)

LISTS = {"strict": "_keep_in_fp32_modules_strict", "under_float16": "_keep_in_fp32_modules"}


class Pins(unittest.TestCase):
    def test_tables_are_those_of_the_classes(self):
        families = json.loads(subprocess.run([os.environ["TESSERA_PINS"]], check=True, capture_output=True).stdout)
        self.assertGreaterEqual(len(families), 2)
        for family in families:
            model = getattr(transformers, family["architecture"])
            for ours, theirs in LISTS.items():
                with self.subTest(architecture=family["architecture"], list=theirs):
                    self.assertEqual(sorted(family[ours]), sorted(getattr(model, theirs) or []))


if __name__ == "__main__":
    unittest.main()

"""The programs of examples/python run as their first lines say, and print what they promise.

One process of pytest, which starts them as a user does: by torchrun and by plain python.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/python"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(name: str, *arguments: str, ranks: int) -> str:
    """Returns what the program prints. More than one rank are started by torchrun, one by python."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCHER and not key.startswith(("TORCHELASTIC_", "PYTEST_"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.setdefault("PYTHONPATH", str(ROOT / "build/release/python"))
    done = subprocess.run(
        [sys.executable, *torchrun, str(EXAMPLES / name), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_mixed_dtypes_has_the_bits_of_the_plain_model() -> None:
    """The program of pytorch issue 156784 compares itself."""
    printed = run("mixed_dtypes.py", "--epochs", "2", ranks=2)
    assert "all 6 parameters are equal to the plain model's, bit for bit" in printed
    assert len(re.findall(r"^epoch \d  loss 0\.\d+", printed, re.MULTILINE)) == 2


def test_finetune_resumes_on_another_number_of_ranks(tmp_path: pathlib.Path) -> None:
    """Two ranks train and save, one resumes where they stopped, and transformers reads the model that it exports."""
    pytest.importorskip("transformers")
    small = ["--rows", "2", "--sequence", "32", "--steps", "10", "--checkpoint", str(tmp_path / "saved")]
    printed = run("finetune_qwen3.py", *small, ranks=2)
    (first,) = re.findall(r"^step 10  loss (\S+)", printed, re.MULTILINE)
    (loaded, before) = re.findall(r"^step 10 loaded back: held-out loss (\S+), before (\S+)$", printed, re.MULTILINE)[0]
    assert loaded == before
    data = tmp_path / "sums.txt"
    data.write_text("1 plus 1 is 2.\n" * 50)
    export = str(tmp_path / "export")
    printed = run("finetune_qwen3.py", *small, "--data", str(data), "--export", export, ranks=1)
    assert "resuming from step 10" in printed
    (second,) = re.findall(r"^step 20  loss (\S+)", printed, re.MULTILINE)
    assert float(second) < float(first) < 5.6  # ln 256 at first

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert model.config.num_hidden_layers == 3
